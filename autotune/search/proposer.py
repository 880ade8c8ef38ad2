"""Which unmeasured stages to measure next: expected improvement of a Gaussian process over the whole pool."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fitune.search.gp import Hyper, Points, Posterior, fit
from fitune.search.pool import Floats, Head, Ints, StagePool, stage_features
from fitune.tactic import Stage

FAILED_PENALTY: Final = 1.0
FAILED_SPREAD: Final = 0.3
"""To the time model a failed stage is slower than its estimate by e to the penalty, give or take the spread."""
WORKING_PRIOR: Final = 0.5
"""How many working stages an untried corner of the pool counts for, against failures at distance 0."""
FAILURE_REACH: Final = 2.0
RESIDUAL_LIMIT: Final = 1.5
MAX_OWN_POINTS: Final = 160
MAX_NEIGHBOUR_POINTS: Final = 50
NOISE_FLOOR: Final = 0.003
FIRST_OPTIMISM: Final = 0.7


@dataclass(frozen=True, slots=True)
class Observation:
    """A measured member: position, µs (None: it failed), relative half-width of its confidence interval."""

    index: int
    time_us: float | None
    halfwidth: float = 0.005


@dataclass(frozen=True, slots=True)
class NeighbourTask:
    """What another key's search measured: stages, their µs and estimated µs, the key's place among the keys, and the
    stages that failed there."""

    stages: tuple[Stage, ...]
    time_us: tuple[float, ...]
    predicted_us: tuple[float, ...]
    coordinates: tuple[float, ...]
    failed: tuple[Stage, ...] = ()

    def thinned(self, most: int = MAX_NEIGHBOUR_POINTS) -> NeighbourTask:
        """At most `most` of them: the faster half of that number, and the rest evenly over the others."""
        order = sorted(range(len(self.stages)), key=lambda row: (self.time_us[row], str(self.stages[row])))
        if len(order) > most:
            rest = order[most // 2 :]
            picked = np.linspace(0, len(rest) - 1, most - most // 2).astype(int)
            order = order[: most // 2] + [rest[row] for row in picked]
        return NeighbourTask(
            tuple(self.stages[row] for row in order),
            tuple(self.time_us[row] for row in order),
            tuple(self.predicted_us[row] for row in order),
            self.coordinates,
            self.failed[:most],
        )


class Proposer:
    """Ranks a pool. Stateless but for the fitted parameters, which start the next fit."""

    def __init__(
        self,
        pool: StagePool,
        predicted_us: Floats,
        *,
        seed: int = 0,
        neighbours: Sequence[NeighbourTask] = (),
        coordinates: Sequence[float] = (),
    ) -> None:
        self.pool = pool
        self.others_us: dict[Head, float] = {}
        self.likely: list[int] = []
        self.expected_gain = math.inf
        self._log_predicted = np.log(np.maximum(predicted_us, 1e-3))
        self._jitter = np.random.default_rng(seed).uniform(0.0, 1e-6, len(pool))
        self._hyper = Hyper.prior(pool.features.shape[1])
        self._fitted_at = 0
        self._latest: tuple[tuple[Observation, ...], Posterior, float] | None = None
        self._neighbours = [task.thinned() for task in neighbours if task.stages]
        places = [tuple(coordinates), *(task.coordinates for task in self._neighbours)]
        assert len({len(place) for place in places}) == 1, "coordinates of all keys have one length"
        grid = np.array(places, dtype=np.float64).reshape(len(places), -1)
        self._distance: Floats = np.abs(grid[:, None, :] - grid[None, :, :]).sum(-1)
        failed = dict.fromkeys(stage for task in neighbours for stage in task.failed)
        self._failed_elsewhere = np.array([stage_features(stage) for stage in failed]).reshape(
            len(failed), pool.features.shape[1]
        )
        self._shared = [self._neighbour_points(task, row + 1) for row, task in enumerate(self._neighbours)]

    def propose(self, observed: Sequence[Observation], pending: Sequence[int], free: Ints, count: int) -> list[int]:
        """Up to `count` of the `free` positions, best first. `likely` then holds as many that would follow."""
        posterior, centre = self._posterior(observed)
        for index in pending:
            posterior.believe(index)
        log_mean = self._log_predicted + centre + posterior.mean
        threshold = self._thresholds(observed)
        works = self._chance_to_work(observed)
        left, chosen = free, []
        self.expected_gain = 0.0
        for turn in range(min(2 * count, len(free))):
            deviation = np.sqrt(posterior.variance[left])
            if threshold is None:
                score = np.log(works[left]) - log_mean[left] - self._log_share(left) + FIRST_OPTIMISM * deviation
            else:
                score = _gain(log_mean[left], deviation, threshold[left]) * works[left]
                if turn == 0:
                    self.expected_gain = float(score.max()) / float(np.exp(log_mean[left[np.argmax(score)]]))
                # Where nothing promises a gain, the order of the optimistic bound decides.
                score = np.log(score + 1e-12 * float(np.exp(log_mean.min()))) - 1e-3 * (log_mean[left] - deviation)
            pick = int(left[np.argmax(score - self._jitter[left])])
            chosen.append(pick)
            posterior.believe(pick)
            left = left[left != pick]
        self.likely = chosen[count:]
        return chosen[:count]

    def expected_us(self, observed: Sequence[Observation]) -> Floats:
        """Expected µs of every member, float64 [len(pool)]; the measured time where there is one."""
        posterior, centre = self._posterior(observed)
        expected: Floats = np.exp(self._log_predicted + centre + posterior.mean)
        for item in observed:
            expected[item.index] = math.inf if item.time_us is None else item.time_us
        return expected

    def _chance_to_work(self, observed: Sequence[Observation]) -> Floats:
        """How likely each member is to run, from the failures and successes around it, float64 [len(pool)].

        The time model's penalty alone does not do where everything failed so far: this tells corners apart then.
        """
        failed = [item.index for item in observed if item.time_us is None]
        worked = [item.index for item in observed if item.time_us is not None]
        if not failed and not len(self._failed_elsewhere):
            return np.ones(len(self.pool))
        x = self.pool.features
        against = _closeness(x, x[failed])
        if len(self._failed_elsewhere):
            against = against + _closeness(x, self._failed_elsewhere)
        in_favour = WORKING_PRIOR + _closeness(x, x[worked])
        return in_favour / (in_favour + against)

    def _thresholds(self, observed: Sequence[Observation]) -> Floats | None:
        """The µs below which a member would improve the best pair (or, with no other side, the best stage)."""
        others_us = self._others()
        sums = [item.time_us + float(others_us[item.index]) for item in observed if item.time_us is not None]
        best = min(sums, default=math.inf)
        return best - others_us if math.isfinite(best) else None

    def _others(self) -> Floats:
        """µs of the other side's best partner of every member, float64 [len(pool)]; 0 without another side."""
        if not self.others_us:
            return np.zeros(len(self.pool))
        by_head = np.array([self.others_us.get(head, math.inf) for head in self.pool.heads], dtype=np.float64)
        return np.asarray(by_head[self.pool.head_index])

    def _log_share(self, rows: Ints) -> Floats:
        """Without own times: a penalty on heads whose other side is slow, in the scale of the estimates."""
        if not self.others_us:
            return np.zeros(len(rows))
        best = min(self.others_us.values())
        return np.asarray(np.log(np.minimum(self._others()[rows] / best, 1e3)))

    def _neighbour_points(self, task: NeighbourTask, row: int) -> Points:
        log_predicted = np.log(np.maximum(np.array(task.predicted_us), 1e-3))
        residual = np.log(np.array(task.time_us)) - log_predicted
        centre = float(np.median(residual))
        count = len(task.stages)
        return Points(
            np.array([stage_features(stage) for stage in task.stages]).reshape(count, -1),
            np.full(count, row, dtype=np.int64),
            log_predicted - float(log_predicted.mean()),
            np.clip(residual - centre, -RESIDUAL_LIMIT, RESIDUAL_LIMIT),
            np.full(count, 0.005**2),
        )

    def _own_points(self, observed: Sequence[Observation]) -> tuple[Points, float]:
        worked = [item for item in observed if item.time_us is not None]
        # Before anything worked, failures would only lift the level of the whole pool: the model must not see them.
        kept = _thin(observed) if worked else []
        rows = np.array([item.index for item in kept], dtype=np.int64)
        times = np.array([math.nan if item.time_us is None else item.time_us for item in kept], dtype=np.float64)
        residual = np.log(times) - self._log_predicted[rows]
        ran = ~np.isnan(residual)
        centre = float(np.median(residual[ran])) if worked else 0.0
        y = np.clip(np.where(ran, residual - centre, FAILED_PENALTY), -RESIDUAL_LIMIT, RESIDUAL_LIMIT)
        own = np.array([max(item.halfwidth / 1.96, NOISE_FLOOR) for item in kept])
        noise = np.where(ran, own, FAILED_SPREAD) ** 2
        z = self._log_predicted - float(self._log_predicted.mean())
        return Points(self.pool.features[rows], np.zeros(len(kept), dtype=np.int64), z[rows], y, noise), centre

    def _posterior(self, observed: Sequence[Observation]) -> tuple[Posterior, float]:
        """The posterior over the pool and the shift of its mean; the last one is kept, and handed out as a copy."""
        seen = tuple(observed)
        if self._latest is None or self._latest[0] != seen:
            self._latest = (seen, *self._compute(observed))
        return copy.copy(self._latest[1]), self._latest[2]

    def _compute(self, observed: Sequence[Observation]) -> tuple[Posterior, float]:
        own, centre = self._own_points(observed)
        parts = [own, *self._shared]
        points = Points(
            np.concatenate([part.x for part in parts]),
            np.concatenate([part.task for part in parts]),
            np.concatenate([part.z for part in parts]),
            np.concatenate([part.y for part in parts]),
            np.concatenate([part.noise for part in parts]),
        )
        if len(points) >= 4 and (len(own) >= 1.6 * self._fitted_at or not self._fitted_at):
            self._hyper = fit(points, self._distance, self._hyper)
            self._fitted_at = max(len(own), 3)
        z = self._log_predicted - float(self._log_predicted.mean())
        count = len(self.pool)
        query = Points(self.pool.features, np.zeros(count, dtype=np.int64), z, np.zeros(count), np.zeros(count))
        return Posterior(self._hyper, points, query, self._distance), centre


def _closeness(x: Floats, others: Floats) -> Floats:
    """Sum over `others` of a kernel that is 1 at the same stage and falls with the steps between, float64 [len(x)]."""
    steps = np.abs(x[:, None, :] - others[None, :, :]).sum(-1)
    return np.asarray(np.exp(-steps / FAILURE_REACH).sum(1))


def _thin(observed: Sequence[Observation]) -> list[Observation]:
    """At most MAX_OWN_POINTS observations: the fast ones, and every so many of the rest."""
    if len(observed) <= MAX_OWN_POINTS:
        return list(observed)
    order = sorted(observed, key=lambda item: (item.time_us or math.inf, item.index))
    half = MAX_OWN_POINTS // 2
    rest = order[half:]
    picked = np.linspace(0, len(rest) - 1, MAX_OWN_POINTS - half).astype(int)
    return order[:half] + [rest[row] for row in picked]


def _gain(log_mean: Floats, deviation: Floats, threshold: Floats) -> Floats:
    """Expected µs below `threshold` of a log-normal time; 0 where the threshold is not positive."""
    gain = np.zeros(len(log_mean))
    rows = threshold > 0.0
    mean, sd, limit = log_mean[rows], deviation[rows], threshold[rows]
    z = (np.log(limit) - mean) / sd
    gain[rows] = limit * _normal_cdf(z) - np.exp(mean + sd**2 / 2.0) * _normal_cdf(z - sd)
    return np.maximum(gain, 0.0)


def _normal_cdf(z: Floats) -> Floats:
    """The normal distribution function, to a relative 2e-7 in both tails (a Chebyshev fit of erfc)."""
    x = np.abs(z) / math.sqrt(2.0)
    t = 1.0 / (1.0 + 0.5 * x)
    series = np.full_like(t, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        series = series * t + coefficient
    tail = 0.5 * t * np.exp(-x * x + series)
    return np.where(z > 0.0, 1.0 - tail, tail)


_ERFC: Final = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)
