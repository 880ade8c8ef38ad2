"""Which axes of a tactic decide a GEMM's time: PED-ANOVA over the stages tried, with what makes its numbers readable.

An importance says how differently the fastest quarter of the stages chose on an axis than all of them did. From few
stages that is mostly luck. So each comes with an interval (stages drawn again with replacement) and with the answer to
whether chance alone gives as much (times dealt anew to the stages).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from fitune.problem import Key
from fitune.search.history import History
from fitune.search.pool import Floats, Ints, StagePool, Value
from fitune.search.study import quiet
from fitune.tactic import StageName

LEAST_STAGES: Final = 12
FEW_STAGES: Final = 5
"""A value of an axis with fewer stages is marked."""
RESAMPLES: Final = 50
SHUFFLES: Final = 100
INTERVAL: Final = (5.0, 95.0)
CHANCE: Final = 95.0
TOP_SHARE: Final = 0.25
"""The stages that count as fast."""
SURE_SHARE: Final = 0.05
"""An axis matters where its interval begins here or above."""
COPIES: Final = 6
"""The most often that one stage is drawn into a resample; by chance it is more often once in 10,000 stages."""
MOST_NAMED: Final = 3
"""Axes that a reading names for one range of token counts."""

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ValueEffect:
    """One value of an axis: how many stages had it, and the best of their times over the best of all."""

    value: Value
    stages: int
    ratio: float

    @property
    def is_thin(self) -> bool:
        return self.stages < FEW_STAGES


@dataclass(frozen=True, slots=True)
class AxisImportance:
    """One axis of which more than one value has a time.

    `share` is its part of the importance of all axes, from 0 to 1, `low` and `high` its 90 % interval (widened to hold
    `share` where resampling leaves it outside);
    `above_chance` says whether shuffled times give as much on any axis in at most one case of 20. All are None where
    there are too few stages. `effects` are sorted, the best value first.
    """

    axis: str
    effects: tuple[ValueEffect, ...]
    share: float | None = None
    low: float | None = None
    high: float | None = None
    above_chance: bool | None = None

    @property
    def matters(self) -> bool:
        """Whether it is above chance and surely some part of the importance."""
        return bool(self.above_chance) and self.low is not None and self.low >= SURE_SHARE


@dataclass(frozen=True, slots=True)
class GemmImportance:
    """The axes of one key and GEMM, the most important first.

    `stages` counts those with a time, `failed` the others; the times in µs are None without any. `reason` says why
    there are no importances; empty where there are.
    """

    key: Key
    part: StageName
    environment_id: str
    stages: int
    failed: int
    best_us: float | None
    median_us: float | None
    worst_us: float | None
    axes: tuple[AxisImportance, ...]
    reason: str = ""


def importance_of(history: History, seed: int = 0) -> GemmImportance:
    """The importance of each axis in the stages of a history that have a time. The same every time it is called."""
    times = history.times_us
    pool, times_us = StagePool(tuple(times)), np.array(list(times.values()), dtype=np.float64)
    axes = [name for name, distribution in pool.distributions.items() if len(distribution.choices) > 1]
    effects = {axis: _effects(pool, times_us, axis) for axis in axes}
    reason = ""
    if len(pool) < LEAST_STAGES:
        reason = f"{len(pool)} stages with a time; importances need {LEAST_STAGES}"
    elif np.ptp(times_us) == 0.0:
        reason = "all stages took the same time"
    if reason:
        found = [AxisImportance(axis, effects[axis]) for axis in axes]
    else:
        found = _importances(pool, times_us, axes, effects, seed)
    return GemmImportance(
        history.key,
        history.part,
        history.environment.id,
        len(pool),
        len(history.records) - len(pool),
        float(times_us.min()) if len(pool) else None,
        float(np.median(times_us)) if len(pool) else None,
        float(times_us.max()) if len(pool) else None,
        tuple(found),
        reason,
    )


def timed_study(name: str, pool: StagePool, times_us: Sequence[float], copies: int = 1) -> optuna.Study:
    """A study in the form of the search's own, with one finished trial per stage, all of them `copies` times over."""
    with quiet():
        study = optuna.create_study(study_name=name, direction="minimize")
    distributions: dict[str, BaseDistribution] = dict(pool.distributions)
    for _ in range(copies):
        for stage, params, time_us in zip(pool.stages, pool.params, times_us, strict=True):
            attributes = {"stage": str(stage)}
            study.add_trial(
                create_trial(params=dict(params), distributions=distributions, value=time_us, user_attrs=attributes)
            )
    return study


def evaluator() -> PedAnovaImportanceEvaluator:
    """Optuna's PED-ANOVA with the fastest quarter as target; the argument's name changed with Optuna's releases."""
    known = inspect.signature(PedAnovaImportanceEvaluator).parameters
    share: dict[str, Any] = {"target_quantile" if "target_quantile" in known else "baseline_quantile": TOP_SHARE}
    return PedAnovaImportanceEvaluator(**share)


def _effects(pool: StagePool, times_us: Floats, axis: str) -> tuple[ValueEffect, ...]:
    best_us, rows = float(times_us.min()), dict[Value, list[int]]()
    for row, params in enumerate(pool.params):
        rows.setdefault(params[axis], []).append(row)
    found = [ValueEffect(value, len(own), float(times_us[own].min()) / best_us) for value, own in rows.items()]
    return tuple(sorted(found, key=lambda effect: effect.ratio))


def _importances(
    pool: StagePool, times_us: Floats, axes: list[str], effects: dict[str, tuple[ValueEffect, ...]], seed: int
) -> list[AxisImportance]:
    """Every axis with its share, interval and standing against chance, the largest share first."""
    rng, count = np.random.default_rng(seed), len(pool)
    study = timed_study("stages", pool, times_us.tolist())
    measured = _raw(study, axes, times_us)
    dealt = [_raw(study, axes, rng.permutation(times_us)) for _ in range(SHUFFLES)]
    copied, drawn = timed_study("copies", pool, times_us.tolist(), COPIES), []
    for _ in range(RESAMPLES):
        told_us = np.where(_drawn(rng.integers(0, count, count), count), times_us, np.inf)
        drawn.append(_shares(_raw(copied, axes, told_us.ravel())))
    above, shares = _above_chance(measured, np.array(dealt)), _shares(measured)
    low, high = np.percentile(np.array(drawn), INTERVAL, axis=0)
    low, high = np.minimum(low, shares), np.maximum(high, shares)
    found = [
        AxisImportance(axis, effects[axis], float(share), float(bottom), float(top), bool(stands_out))
        for axis, share, bottom, top, stands_out in zip(axes, shares, low, high, above, strict=True)
    ]
    return sorted(found, key=lambda axis: -(axis.share or 0.0))


def _raw(study: optuna.Study, axes: list[str], told_us: Floats) -> Floats:
    """PED-ANOVA's importance of each axis, where trial `number` took told_us[number] µs; infinite: it is left out."""
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # too few trials of a value: what the interval is for
        found = get_param_importances(
            study,
            evaluator=evaluator(),
            params=axes,
            target=lambda trial: float(told_us[trial.number]),
            normalize=False,
        )
    return np.array([found[axis] for axis in axes], dtype=np.float64)


def _shares(raw: Floats) -> Floats:
    total = float(raw.sum())
    shares: Floats = raw / total if total > 0.0 else np.zeros_like(raw)
    return shares


def _drawn(rows: Ints, count: int) -> Bools:
    """bool [COPIES, count]: copy c of a stage is in where the stage was drawn more than c times."""
    times: Ints = np.bincount(rows, minlength=count)
    return np.arange(COPIES)[:, None] < times[None, :]


def _above_chance(raw: Floats, dealt: Floats) -> Bools:
    """bool [axes]: whether importances are beyond the largest that shuffled times give, float64 [SHUFFLES, axes].

    Axes are compared in their own standard deviations (Westfall and Young's maximum), so that among many of them none
    stands out by their number alone.
    """
    middle, spread = dealt.mean(axis=0), np.maximum(dealt.std(axis=0), 1e-12)
    most = ((dealt - middle) / spread).max(axis=1)
    above: Bools = (raw - middle) / spread > np.percentile(most, CHANCE)
    return above


def reading(found: Sequence[GemmImportance]) -> str:
    """One sentence: which axes matter in at least half of the GEMMs, at few tokens and at many.

    The token counts are split once, where the mean shares of the axes differ most between the two sides.
    """
    known = [item for item in found if not item.reason]
    if not known:
        return f"no GEMM has the {LEAST_STAGES} different times that importances need"
    ranges = [(side, _standing_out(side)) for side in _split(known)]
    if len(ranges) == 2 and [axis for axis, _ in ranges[0][1]] == [axis for axis, _ in ranges[1][1]]:
        ranges = [(known, _standing_out(known))]
    if not any(axes for _, axes in ranges):
        return (
            f"no axis surely matters in half of the GEMMs ({len(known)}): their stages are too few or too alike to tell"
        )
    said = []
    for number, (side, axes) in enumerate(ranges):
        words = ", ".join(f"{axis} ({100 * share:.0f} %)" for axis, share in axes[:MOST_NAMED])
        said.append(f"{_range_words(side, last=number == len(ranges) - 1 > 0)} {words or 'none'}")
    return f"in at least half of the GEMMs these axes matter: {'; '.join(said)}"


def _split(known: Sequence[GemmImportance]) -> list[list[GemmImportance]]:
    """GEMMs by token count in one range or two: cut where the sum of squares between the two sides is largest."""
    names = sorted({axis.axis for item in known for axis in item.axes})
    rows = np.array([[_share(item, name) for name in names] for item in known]).reshape(len(known), len(names))
    counts = np.array([item.key.num_tokens for item in known])
    points = sorted(set(counts.tolist()))
    gains = []
    for low in points[:-1]:
        sides = rows[counts <= low], rows[counts > low]
        gains.append(sum(len(side) * float(((side.mean(axis=0) - rows.mean(axis=0)) ** 2).sum()) for side in sides))
    if not gains:
        return [list(known)]
    at = points[int(np.argmax(gains))]
    few, many = [[item for item in known if (item.key.num_tokens > at) == above] for above in (False, True)]
    return [few, many]


def _share(item: GemmImportance, name: str) -> float:
    return next((axis.share or 0.0 for axis in item.axes if axis.axis == name), 0.0)


def _standing_out(side: Sequence[GemmImportance]) -> list[tuple[str, float]]:
    """Axes that matter in at least half of the GEMMs, with their mean share over those, the largest first."""
    shares: dict[str, list[float]] = {}
    for item in side:
        for axis in item.axes:
            if axis.matters and axis.share is not None:
                shares.setdefault(axis.axis, []).append(axis.share)
    means = [(name, float(np.mean(values))) for name, values in shares.items() if 2 * len(values) >= len(side)]
    return sorted(means, key=lambda item: -item[1])


def _range_words(side: Sequence[GemmImportance], *, last: bool) -> str:
    counts = sorted({item.key.num_tokens for item in side})
    if len(counts) == 1:
        return f"at {counts[0]:,} token{'s' if counts[0] > 1 else ''}"
    return f"from {counts[0]:,} tokens on" if last else f"at {counts[0]:,} to {counts[-1]:,} tokens"
