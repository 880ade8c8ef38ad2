"""What one side's tactic costs on the other side's problem, from the best evidence there is.

Best is an interleaved final with both tactics in it, then whole-layer records, then the sum of sort, gemm1 and gemm2
from stage records, and last the cost model, which is shown but never decides anything.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from fitune.cost import predict_us
from fitune.diff.sides import Cell
from fitune.families import find_family, runs_sort
from fitune.measure.recording import COMPOSED
from fitune.record import Measurement, Record, Regime
from fitune.tactic import STAGES, Stage, Tactic
from fitune.target import Environment

Source = Literal["identical", "measured", "composed", "predicted", "none"]
Judgement = Literal["tie", "slower", "faster", "unclear", "unknown"]

Sorts = dict[tuple[str, int], float]
"""Time of the slot sort in µs by family and tile size."""

APART_BAND: Final = 0.03
"""Least band for times that were not taken in turns: clocks drift by some percent between runs."""
WIDE: Final = 0.10
"""Overlapping intervals that leave room for more than this are no evidence of a tie."""
COMPOSED_SIGMAS: Final = 2.0
MIN_CHECKED_SUMS: Final = 3


@dataclass(frozen=True, slots=True)
class Regret:
    """time(tactic) / time(the host's own choice) - 1 on the host's problem; negative where the tactic is faster.

    `low` and `high` bound it from both confidence intervals; `band` is what counts as noise. `source` is `measured`
    for whole layers, `composed` for sums of stage times, `predicted` from the cost model, `identical` where both
    tactics are one, `none` where nothing is known (then every number is None). `interleaved` says that both times
    were taken in turns in one run. `judgement` is `unknown` unless the times were measured.
    """

    source: Source
    judgement: Judgement
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    band: float = 0.0
    time_us: float | None = None
    reference_us: float | None = None
    interleaved: bool = False


IDENTICAL: Final = Regret("identical", "tie", 0.0, 0.0, 0.0)
NO_REGRET: Final = Regret("none", "unknown")


@dataclass(frozen=True, slots=True)
class Span:
    """A time with its 95 % confidence interval, all in µs."""

    median_us: float
    low_us: float
    high_us: float

    @classmethod
    def of(cls, measurement: Measurement) -> Span:
        return cls(measurement.median_us, measurement.ci_low_us, measurement.ci_high_us)

    def plus(self, other: Span) -> Span:
        """Sum of two independent times: the halves of the intervals add in squares."""
        below = math.hypot(self.median_us - self.low_us, other.median_us - other.low_us)
        above = math.hypot(self.high_us - self.median_us, other.high_us - other.median_us)
        median = self.median_us + other.median_us
        return Span(median, median - below, median + above)


def regret(guest: Cell, host: Cell) -> Regret:
    """The cost of using the guest's tactic on the host's problem instead of the host's own choice."""
    tactic = guest.tactic
    if tactic == host.tactic:
        return IDENTICAL
    return (
        _measured(tactic, host) or _composed(tactic, host, _sorts(guest, host)) or _predicted(tactic, host) or NO_REGRET
    )


def same_regime(a: Regime, b: Regime) -> bool:
    """Times of these two regimes may be compared (taking turns aside)."""
    return replace(a, interleaved=False) == replace(b, interleaved=False)


def same_code(a: Environment | None, b: Environment | None) -> bool:
    """Nothing known says that the two environments compile the same tactic differently."""
    if a is None or b is None:
        return True
    return all(x == y or not x or not y for x, y in ((a.kernels, b.kernels), (a.triton, b.triton)))


def surely(band: float, finalists: int) -> float:
    """The gap to the fastest of several finalists that is beyond chance.

    `band` bounds what one pair of equal tactics differs by in 95 of 100 runs. A choice was the fastest of many and so
    flattered by chance: each of its `finalists - 1` comparisons gets its share of the 5 in 100.
    """
    comparisons = max(1, finalists - 1)
    normal = statistics.NormalDist()
    return band * normal.inv_cdf(1.0 - 0.025 / comparisons) / normal.inv_cdf(0.975)


def judge(time: Span, reference: Span, band: float, source: Source, interleaved: bool, finalists: int = 2) -> Regret:
    """Compare two times: a tie where intervals overlap or the gap is within the band, unclear just beyond it."""
    ratio = time.median_us / reference.median_us - 1.0
    low = time.low_us / reference.high_us - 1.0
    high = time.high_us / reference.low_us - 1.0
    judgement: Judgement
    if abs(ratio) <= band:
        judgement = "tie"
    elif low <= 0.0 <= high:
        judgement = "tie" if max(-low, high) <= WIDE else "unclear"
    elif abs(ratio) <= surely(band, finalists):
        judgement = "unclear"
    else:
        judgement = "slower" if ratio > 0.0 else "faster"
    return Regret(source, judgement, ratio, low, high, band, time.median_us, reference.median_us, interleaved)


def is_composed(measurement: Measurement) -> bool:
    """Whether a layer's time was put together from parts rather than measured as a whole."""
    return measurement.regime.execution == COMPOSED


def _measured(tactic: Tactic, host: Cell) -> Regret | None:
    decision = host.decision
    mine, chosen = decision.member(tactic), decision.member(host.tactic)
    if mine is not None and chosen is not None and _took_turns(mine.measurement, chosen.measurement):
        spans = Span.of(mine.measurement), Span.of(chosen.measurement)
        found = judge(*spans, decision.noise, "measured", True, len(decision.members))
        return replace(found, judgement="tie") if mine.tied and chosen.tied else found
    for reference in _layer_times(host, host.tactic):
        for time in _layer_times(host, tactic):
            if same_regime(time.regime, reference.regime):
                band = max(decision.noise, APART_BAND)
                return judge(Span.of(time), Span.of(reference), band, "measured", False)
    return None


def _took_turns(a: Measurement, b: Measurement) -> bool:
    return a.regime == b.regime and a.regime.interleaved and not is_composed(a)


def _layer_times(host: Cell, tactic: Tactic) -> Iterator[Measurement]:
    """Times of a tactic as a whole layer on the host's key, best evidence first."""
    member = host.decision.member(tactic)
    found = [] if member is None else [member.measurement]
    records = sorted(_usable(host, tactic), key=lambda record: (record.phase != "final", -record.time_s))
    found += [record.measurement for record in records if record.measurement is not None]
    return (measurement for measurement in found if not is_composed(measurement))


def _usable(host: Cell, tactic: Tactic | Stage) -> Sequence[Record]:
    """Successful records on the host's key that were taken with the code its decision was taken with."""
    index, home = host.index, host.environment
    return [
        record
        for record in host.tried.of(tactic)
        if record.measurement is not None and same_code(index.environment(record.environment_id), home)
    ]


def _composed(tactic: Tactic, host: Cell, sorts: Sorts) -> Regret | None:
    """Sums of stage times, judged twice: against the host's own sum, and against its whole-layer time.

    The host's stages won because they were seen fast, partly by luck, so that their sum flatters them; its final
    time does so less (it is the fastest of the finalists), but holds what a sum leaves out. Only where both agree,
    and by more than the luck of the fastest of so many, is anything claimed.
    """
    for regime in _stage_regimes(host):
        if (tactic.family, tactic.tile_size) == (host.tactic.family, host.tactic.tile_size):
            time, reference = _sum(tactic, host, regime, sorts), _sum(host.tactic, host, regime, sorts)
        else:
            time, reference = _whole_sum(tactic, host, regime, sorts), _whole_sum(host.tactic, host, regime, sorts)
        if time is None or reference is None:
            continue
        band = max(host.decision.noise, APART_BAND, _composition_spread(host, regime, sorts))
        finalists = len(host.decision.members)
        found = judge(time, reference, band, "composed", False, finalists)
        anchor = _anchor(host, regime, sorts)
        if anchor is None or judge(time, anchor, band, "composed", False, finalists).judgement == found.judgement:
            return found
        return replace(found, judgement="unclear")
    return None


def _anchor(host: Cell, regime: Regime, sorts: Sorts) -> Span | None:
    """The host's whole-layer time on the scale of sums: divided by what a layer is to its sum for the default.

    The default was not picked for being seen fast, so its sum is not flattered.
    """
    decision = host.decision
    chosen, default = decision.member(host.tactic), decision.member(decision.default)
    if chosen is None or is_composed(chosen.measurement):
        return None
    span, scale = Span.of(chosen.measurement), 1.0
    if default is not None and decision.default != host.tactic and not is_composed(default.measurement):
        total = _whole_sum(decision.default, host, regime, sorts)
        if total is not None:
            scale = total.median_us / default.measurement.median_us
    return Span(span.median_us * scale, span.low_us * scale, span.high_us * scale)


def _sum(tactic: Tactic, host: Cell, regime: Regime, sorts: Sorts) -> Span | None:
    """gemm1 + gemm2 + the sort where its time is known: for tactics that sort alike."""
    total = _sum_of_stages(tactic, host, regime)
    sort_us = _sort_us(tactic, sorts) or 0.0
    return None if total is None else total.plus(Span(sort_us, sort_us, sort_us))


def _whole_sum(tactic: Tactic, host: Cell, regime: Regime, sorts: Sorts) -> Span | None:
    """gemm1 + gemm2 + sort; None where one of the three is not known."""
    return None if _sort_us(tactic, sorts) is None else _sum(tactic, host, regime, sorts)


def _stage_regimes(host: Cell) -> list[Regime]:
    """Regimes the host's own gemm1 was timed under, latest first."""
    records = _usable(host, host.tactic.stage("gemm1"))
    regimes = [record.measurement.regime for record in reversed(records) if record.measurement]
    return list(dict.fromkeys(replace(regime, interleaved=False) for regime in regimes))


def _sum_of_stages(tactic: Tactic, host: Cell, regime: Regime) -> Span | None:
    total: Span | None = None
    for name in STAGES:
        span = _stage_span(tactic.stage(name), host, regime)
        if span is None:
            return None
        total = span if total is None else total.plus(span)
    return total


def _stage_span(stage: Stage, host: Cell, regime: Regime) -> Span | None:
    for record in reversed(_usable(host, stage)):
        if record.measurement is not None and same_regime(record.measurement.regime, regime):
            return Span.of(record.measurement)
    return None


def _sorts(guest: Cell, host: Cell) -> Sorts:
    """Sort times on the host's key; those it lacks from the guest's where that sorts as many slots on one device."""
    a, b = guest.key, host.key
    alike = (a.num_tokens, a.layer.top_k, a.layer.device) == (b.num_tokens, b.layer.top_k, b.layer.device)
    return {**_sort_times(guest), **_sort_times(host)} if alike else _sort_times(host)


def _sort_times(host: Cell) -> Sorts:
    """Time of the slot sort by family and tile size, in µs, wherever a layer on this key was split by kernel."""
    times: Sorts = {}
    measured = [(record.tactic, record.measurement) for record in host.tried.layers()]
    measured += [(member.tactic, member.measurement) for member in host.decision.members]
    for tactic, measurement in measured:
        if measurement is not None:
            for name, time_us in measurement.parts_us:
                if name == "sort":
                    times[tactic.family, tactic.tile_size] = time_us
    return times


def _sort_us(tactic: Tactic, sorts: Sorts) -> float | None:
    """The sort of this tactic, or of the nearest tile size of its family; nothing is sorted for single rows."""
    if not runs_sort(tactic.family, tactic.tile_size):
        return 0.0
    near = [tile for family, tile in sorts if family == tactic.family]
    if not near:
        return None
    return sorts[tactic.family, min(near, key=lambda tile: (abs(tile - tactic.tile_size), tile))]


def _composition_spread(host: Cell, regime: Regime, sorts: Sorts) -> float:
    """How far sums of stage times scatter around whole-layer times, seen on the finalists that have both."""
    logs = []
    for member in host.decision.members:
        total = _sum(member.tactic, host, regime, sorts)
        if total is not None and not is_composed(member.measurement):
            logs.append(math.log(member.measurement.median_us / total.median_us))
    return COMPOSED_SIGMAS * statistics.stdev(logs) if len(logs) >= MIN_CHECKED_SUMS else 0.0


def _predicted(tactic: Tactic, host: Cell) -> Regret | None:
    target = host.target
    if target is None or any(find_family(choice.family) is None for choice in (tactic, host.tactic)):
        return None
    time, reference = (
        sum(predict_us(choice.stage(name), host.problem, target) for name in STAGES) for choice in (tactic, host.tactic)
    )
    if not (0.0 < reference < math.inf and 0.0 < time < math.inf):
        return None
    return Regret("predicted", "unknown", time / reference - 1.0, time_us=time, reference_us=reference)
