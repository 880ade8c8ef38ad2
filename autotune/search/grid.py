"""Which token points to tune: those whose tactics cost least over all counts of a range.

A point's tactic costs its transfer regret at every count that the point serves. A recording that holds the times of
both tactics gives it as measured; elsewhere it is predicted: the cost model's ratio of the two, set right by what the
model was off by where both were recorded. Who serves whom cannot be chosen: that is `fitune.bucket`'s rule. Between
two neighbouring points it depends on those two alone, so dynamic programming over the points in order is exact.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fitune import space
from fitune.bucket import Bucket, buckets, find_bucket
from fitune.cost import predict_many_us, predict_us
from fitune.errors import InputError
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Problem, key_of
from fitune.record import Record
from fitune.search.pool import Head, head_of
from fitune.tactic import STAGES, Stage, StageName, Tactic
from fitune.target import Target

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Cost = tuple[int, int, float]
"""Unserved share, mean regret, worst regret: what comes first counts first. The shares in whole EXACT-ths."""

EXACT: Final = 10**12
"""Shares are added as whole numbers, so that equal grids are equal in whatever order they are added."""
POINTS_PER_DOUBLING: Final = (1.0, 1.5)
COUNTS_PER_DOUBLING: Final = (1.0, 1.25, 1.5, 1.75)


# ---- what a tactic costs where it was not tuned


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the tactic of each point costs at each count, for one layer or several that shall share a grid.

    `weights` [counts] are the shares of a log-uniform token count that each count stands for. `regret` [layers, points,
    counts] is 0 or more; `measured`, of the same shape, says which of it a recording knows. `missed` and
    `missed_measured` [layers, counts] are the same of the default, which runs where no point serves.
    """

    points: tuple[int, ...]
    counts: tuple[int, ...]
    weights: Floats
    regret: Floats
    measured: Bools
    missed: Floats
    missed_measured: Bools

    def __post_init__(self) -> None:
        size = (len(self.regret), len(self.points), len(self.counts))
        assert list(self.points) == sorted(set(self.points)) and list(self.counts) == sorted(set(self.counts))
        assert self.regret.shape == self.measured.shape == size and self.weights.shape == size[2:]
        assert self.missed.shape == self.missed_measured.shape == (size[0], size[2])


def candidate_points(low: int, high: int) -> tuple[int, ...]:
    """The points to choose from: the powers of two of a range, one and a half times each, and both ends."""
    return _dyadic(low, high, POINTS_PER_DOUBLING)


def recorded_points(player: RecordingMeasurer, layers: Sequence[Problem], low: int, high: int) -> tuple[int, ...]:
    """The token counts of a range that a recording holds for each of the layers."""
    held = [{problem.num_tokens for problem in player.problems() if _same_layer(problem, layer)} for layer in layers]
    return tuple(sorted(count for count in set.intersection(*held) if low <= count <= high))


def transfer_of(
    layers: Sequence[Problem],
    points: Sequence[int],
    low: int,
    high: int,
    target: Target,
    player: RecordingMeasurer | None = None,
) -> Transfer:
    """What the tactics of `points` cost over the counts `low..high`. The layers' own token counts do not matter.

    Looked at are a few counts of each doubling, the points and the recorded counts. A recording of another device
    knows nothing here.
    """
    if player is not None and player.target.device != target.device:
        player = None
    ordered = tuple(sorted(set(points)))
    assert layers and ordered and low <= ordered[0] and ordered[-1] <= high
    recorded = {count for layer in layers if player for count in recorded_points(player, [layer], low, high)}
    counts = tuple(sorted({*_dyadic(low, high, COUNTS_PER_DOUBLING), *ordered, *recorded}))
    rows = [_Layer(layer, ordered, counts, target, player) for layer in layers]
    taken = [[[row.regret(point, count) for count in counts] for point in ordered] for row in rows]
    missed = [[row.missed(count) for count in counts] for row in rows]
    return Transfer(
        ordered,
        counts,
        log_uniform(counts),
        np.array([[[value for value, _ in line] for line in table] for table in taken], np.float64),
        np.array([[[known for _, known in line] for line in table] for table in taken], np.bool_),
        np.array([[value for value, _ in line] for line in missed], np.float64),
        np.array([[known for _, known in line] for line in missed], np.bool_),
    )


def log_uniform(counts: Sequence[int]) -> Floats:
    """The share of a log-uniform token count between the first and last of `counts` that is nearest each, [counts]."""
    spans = [math.log((bucket.high + 0.5) / (bucket.low - 0.5)) for bucket in buckets(counts)]
    return np.array(spans, np.float64) / math.fsum(spans)


def _dyadic(low: int, high: int, steps: Sequence[float]) -> tuple[int, ...]:
    scaled = (step * 2.0**power for power in range(high.bit_length()) for step in steps)
    return tuple(sorted({low, high, *(int(value) for value in scaled if value.is_integer() and low <= value <= high)}))


def _same_layer(a: Problem, b: Problem) -> bool:
    return replace(a, num_tokens=1) == replace(b, num_tokens=1, local_expert_offset=a.local_expert_offset)


class _Layer:
    """The tactics known for one layer, and their regret by the best evidence there is.

    Known is the best recorded tactic of each recorded count; of a layer that was not recorded, the cost model's own
    choice at each point. At a count between two of those, the better of their two tactics counts as the best: the
    model's favourite of many would look faster than it is.
    """

    def __init__(
        self,
        layer: Problem,
        points: Sequence[int],
        counts: Sequence[int],
        target: Target,
        player: RecordingMeasurer | None,
    ) -> None:
        self._layer, self._target, self._player = layer, target, player
        self._recorded = {} if player is None else _best_recorded(layer, counts, player)
        self._known = self._recorded or {point: _likely(self._at(point), target) for point in points}
        self._homes = sorted(self._known)
        self._best: dict[int, Tactic] = dict(self._known)
        self._estimates: dict[tuple[Tactic, int], float] = {}
        self._offsets: dict[Tactic, tuple[list[float], list[float]]] = {}
        self._offsets = self._calibrated()

    def tactic(self, count: int) -> Tactic:
        """What tuning at `count` is expected to choose."""
        if count not in self._best:
            place = bisect_left(self._homes, count)
            near = {self._known[home] for home in self._homes[max(0, place - 1) : place + 1]}
            self._best[count] = min(near, key=lambda tactic: (self._estimate(tactic, count), str(tactic)))
        return self._best[count]

    def regret(self, point: int, count: int) -> tuple[float, bool]:
        """time(the point's tactic) / time(the count's best) - 1 at `count`, and whether both ends were recorded."""
        value, known = self._regret(self.tactic(point), count)
        return value, known and point in self._recorded

    def missed(self, count: int) -> tuple[float, bool]:
        """The regret of the default."""
        return self._regret(space.default_tactic(self._at(count), self._target), count)

    def _regret(self, tactic: Tactic, count: int) -> tuple[float, bool]:
        best = self.tactic(count)
        if tactic == best:
            return 0.0, count in self._recorded
        ratio = self._recorded_ratio(tactic, best, count) if count in self._recorded else None
        if ratio is not None:
            return max(0.0, ratio - 1.0), True
        return max(0.0, math.exp(self._estimate(tactic, count) - self._estimate(best, count)) - 1.0), False

    def _recorded_ratio(self, tactic: Tactic, best: Tactic, count: int) -> float | None:
        """Of two whole layers where both were recorded, else of both composed: the two kinds of time do not compare to
        the percent."""
        assert self._player is not None
        layers = self._player.recorded_layers(self._at(count))
        pair = _recorded_us(layers.get(tactic)), _recorded_us(layers.get(best))
        if None in pair:
            pair = self._composed_us(tactic, count), self._composed_us(best, count)
        time_us, best_us = pair
        return None if time_us is None or best_us is None else time_us / best_us

    def _composed_us(self, tactic: Tactic, count: int) -> float | None:
        assert self._player is not None
        measurement = self._player.composed(self._at(count), tactic).measurement
        return None if measurement is None else measurement.median_us

    def _calibrated(self) -> dict[Tactic, tuple[list[float], list[float]]]:
        """By tactic the logarithms of the recorded counts, and how much slower the tactic is there than the cost model
        says: as log(recorded / estimated), beyond what all known tactics have in common at that count."""
        found: dict[Tactic, tuple[list[float], list[float]]] = {}
        for count in sorted(self._recorded):
            errors = {
                tactic: math.log(time_us) - self._estimate(tactic, count)
                for tactic in dict.fromkeys(self._known.values())
                if (time_us := self._composed_us(tactic, count)) is not None
            }
            common = statistics.median(errors.values()) if errors else 0.0
            for tactic, error in errors.items():
                places, offsets = found.setdefault(tactic, ([], []))
                places.append(math.log(count))
                offsets.append(error - common)
        self._estimates.clear()
        return found

    def _estimate(self, tactic: Tactic, count: int) -> float:
        """log of the time, up to what is common to all tactics at the count: the cost model's, set right by what it
        was off by at the recorded counts on both sides."""
        if (tactic, count) not in self._estimates:
            problem = self._at(count)
            estimate = math.log(sum(predict_us(tactic.stage(name), problem, self._target) for name in STAGES))
            if tactic in self._offsets:
                estimate += float(np.interp(math.log(count), *self._offsets[tactic]))
            self._estimates[tactic, count] = estimate
        return self._estimates[tactic, count]

    def _at(self, count: int) -> Problem:
        return replace(self._layer, num_tokens=count, local_expert_offset=0)


def _best_recorded(layer: Problem, counts: Iterable[int], player: RecordingMeasurer) -> dict[int, Tactic]:
    """By recorded count the fastest whole layer that is legal, or the fastest pair of stages where none is."""
    found = {}
    keys = set(player.keys)
    for count in counts:
        problem = replace(layer, num_tokens=count, local_expert_offset=0)
        if key_of(problem, player.target.device) not in keys:
            continue
        whole = [
            (time_us, str(tactic), tactic)
            for tactic, record in player.recorded_layers(problem).items()
            if (time_us := _recorded_us(record)) is not None
            and not space.tactic_legality(tactic, problem, player.target)
        ]
        best = min(whole)[2] if whole else _best_pair(*(_recorded_times(problem, player, name) for name in STAGES))
        if best is not None:
            found[count] = best
    return found


def _recorded_times(problem: Problem, player: RecordingMeasurer, name: StageName) -> dict[Stage, float]:
    """µs of the legal stages of one GEMM that were recorded."""
    recorded = player.recorded_stages(problem, name)
    times = {stage: _recorded_us(recorded.get(stage)) for stage in space.pool(problem, player.target, name)}
    return {stage: time_us for stage, time_us in times.items() if time_us is not None}


def _recorded_us(record: Record | None) -> float | None:
    return None if record is None or record.measurement is None else record.measurement.median_us


def _likely(problem: Problem, target: Target) -> Tactic:
    """The legal tactic with the least estimate; the default where no pair is legal."""
    times = []
    for name in STAGES:
        legal = space.pool(problem, target, name)
        times.append(dict(zip(legal, predict_many_us(legal, problem, target).tolist(), strict=True)))
    return _best_pair(*times) or space.default_tactic(problem, target)


def _best_pair(first: dict[Stage, float], second: dict[Stage, float]) -> Tactic | None:
    """The fastest stages of both GEMMs that go together; None where none do."""
    heads: list[dict[Head, tuple[float, str, Stage]]] = []
    for times in (first, second):
        best: dict[Head, tuple[float, str, Stage]] = {}
        for stage, time_us in times.items():
            entry = (time_us, str(stage), stage)
            best[head_of(stage)] = min(best.get(head_of(stage), entry), entry, key=lambda item: item[:2])
        heads.append(best)
    a, b = heads
    pairs = [(a[head][0] + b[head][0], str(head), Tactic.of(a[head][2], b[head][2])) for head in a.keys() & b.keys()]
    return min(pairs, key=lambda item: item[:2])[2] if pairs else None


# ---- which points serve a range at the least regret


@dataclass(frozen=True, slots=True)
class Expected:
    """The regret of a log-uniform token count: its mean, the worst of the counts looked at, and how many those are.

    `share` is the part of the range it speaks for; mean and worst are 0 where that is none.
    """

    share: float
    mean: float
    worst: float
    num: int

    @classmethod
    def of(cls, values: Floats, weights: Floats) -> Expected:
        """`values` and `weights` [n]; the weights of a whole range add up to 1."""
        share = float(weights.sum())
        if not len(values):
            return cls(0.0, 0.0, 0.0, 0)
        return cls(share, float(values @ weights) / share, float(values.max()), len(values))


@dataclass(frozen=True, slots=True)
class Served:
    """A chosen point with the counts it serves, its regret there, and how many of the regrets were measured."""

    bucket: Bucket
    expected: Expected
    num_measured: int


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """Token points with what they are expected to cost over a range.

    `expected` is over the whole range, `measured` and `predicted` are its two halves by evidence, and `unserved` is
    the part, of either evidence, where no point serves and the default runs.
    """

    served: tuple[Served, ...]
    expected: Expected
    measured: Expected
    predicted: Expected
    unserved: Expected

    @property
    def points(self) -> tuple[int, ...]:
        return tuple(each.bucket.point for each in self.served)


def choose_grid(transfer: Transfer, num_buckets: int) -> TokenGrid:
    """The `num_buckets` points that leave least of the range unserved, then have the least mean regret, then the least
    worst. Of grids that are equal in all three the same one is chosen each time. Raises InputError."""
    size = len(transfer.points)
    if num_buckets < 1:
        raise InputError(f"{num_buckets} buckets serve nothing; ask for 1 or more")
    if num_buckets > size:
        raise InputError(
            f"{num_buckets} buckets are more than the {size} token points there are to choose from "
            f"({', '.join(map(str, transfer.points))}); ask for at most {size}, or for a wider range"
        )
    costs = _Costs(transfer)
    best: dict[int, tuple[Cost, tuple[int, ...]]] = {last: (costs.before(last), (last,)) for last in range(size)}
    for length in range(2, num_buckets + 1):
        best = {
            last: min(
                (_plus(best[before][0], costs.between[before, last]), (*best[before][1], last))
                for before in range(length - 2, last)
            )
            for last in range(length - 1, size)
        }
    _, chosen = min((_plus(cost, costs.after(last)), points) for last, (cost, points) in best.items())
    return grid_of_points(transfer, [transfer.points[row] for row in chosen])


def grid_of_points(transfer: Transfer, points: Sequence[int]) -> TokenGrid:
    """What some of the points serve under the bucket rule and are expected to cost."""
    table = buckets(points)
    owners = [find_bucket(table, count) for count in transfer.counts]
    num_layers = len(transfer.regret)
    regret, measured = transfer.missed.copy(), transfer.missed_measured.copy()
    for column, owner in enumerate(owners):
        if owner is not None:
            row = transfer.points.index(table[owner].point)
            regret[:, column], measured[:, column] = transfer.regret[:, row, column], transfer.measured[:, row, column]
    weights = np.broadcast_to(transfer.weights / num_layers, regret.shape)
    owned = np.broadcast_to(np.array([-1 if owner is None else owner for owner in owners]), regret.shape)

    def over(where: Bools) -> Expected:
        return Expected.of(regret[where], weights[where])

    served = [Served(bucket, over(owned == row), int(measured[owned == row].sum())) for row, bucket in enumerate(table)]
    return TokenGrid(tuple(served), over(owned >= -1), over(measured), over(~measured), over(owned == -1))


class _Costs:
    """What it costs to have two points as neighbours: of the counts from the first to below the second."""

    def __init__(self, transfer: Transfer) -> None:
        self._points = transfer.points
        self._counts = np.array(transfer.counts, np.int64)
        self._shares = _whole(transfer.weights)
        self._regret = _whole(transfer.regret.mean(axis=0) * transfer.weights)
        self._worst = transfer.regret.max(axis=0)
        self._missed = _whole(transfer.missed.mean(axis=0) * transfer.weights)
        self._missed_worst = transfer.missed.max(axis=0)

    def before(self, first: int) -> Cost:
        """Of the counts below the first point: none serves them."""
        return self._default(self._counts < self._points[first])

    def after(self, last: int) -> Cost:
        """Of the last point's own count, and of those above it, which none serves."""
        point = self._points[last]
        return _plus(self._of(last, self._counts == point), self._default(self._counts > point))

    @cached_property
    def between(self) -> dict[tuple[int, int], Cost]:
        size = len(self._points)
        return {(row, other): self._pair(row, other) for other in range(size) for row in range(other)}

    def _pair(self, row: int, other: int) -> Cost:
        low, high = buckets((self._points[row], self._points[other]))
        inside = (self._counts >= low.low) & (self._counts < high.point)
        left, right = inside & (self._counts <= low.high), inside & (self._counts >= high.low)
        served = _plus(self._of(row, left), self._of(other, right))
        return _plus(served, self._default(inside & ~left & ~right))

    def _of(self, row: int, where: Bools) -> Cost:
        return 0, int(self._regret[row, where].sum()), float(self._worst[row, where].max(initial=0.0))

    def _default(self, where: Bools) -> Cost:
        worst = float(self._missed_worst[where].max(initial=0.0))
        return int(self._shares[where].sum()), int(self._missed[where].sum()), worst


def _whole(shares: Floats) -> Ints:
    return np.rint(shares * EXACT).astype(np.int64)


def _plus(a: Cost, b: Cost) -> Cost:
    return a[0] + b[0], a[1] + b[1], max(a[2], b[2])
