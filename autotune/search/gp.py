"""A small Gaussian process over stages and neighbouring keys, in numpy.

It models y = log(time) - log(estimate) of stage x on key t with covariance

    offset^2 [t = t']  +  slope^2 z z'  +  T(t, t') * (signal * Matern52(x, x') + nugget [x = x'])

z is the centred log estimate (the estimate may be off by a power), T falls with the distance of two keys, and the
nugget is what is a stage's own: known once it was measured, here or on a near key. Length scales are fitted by a few
steps up the gradient of the posterior density of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OFFSET: Final = 1.0
SLOPE: Final = 0.25
FIT_POINTS: Final = 90
FIT_STEPS: Final = 14
PRIOR_LENGTH: Final = 2.0
PRIOR_SIGNAL: Final = 0.15
PRIOR_NUGGET: Final = 0.03
PRIOR_TASK_LENGTH: Final = 4.0


@dataclass(frozen=True, slots=True)
class Points:
    """n stages on keys: features [n, d], key index [n], z [n], residual y [n], variance of y's noise [n]."""

    x: Floats
    task: Ints
    z: Floats
    y: Floats
    noise: Floats

    def take(self, rows: Ints) -> Points:
        return Points(self.x[rows], self.task[rows], self.z[rows], self.y[rows], self.noise[rows])

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, slots=True)
class Hyper:
    """Logs of the parameters: inverse squared length scales [d], signal and nugget variance, key length."""

    weights: Floats
    signal: float = 2.0 * float(np.log(PRIOR_SIGNAL))
    nugget: float = 2.0 * float(np.log(PRIOR_NUGGET))
    task_length: float = float(np.log(PRIOR_TASK_LENGTH))

    @classmethod
    def prior(cls, dimensions: int) -> Hyper:
        return cls(np.full(dimensions, -2.0 * np.log(PRIOR_LENGTH)))

    def vector(self) -> Floats:
        return np.concatenate([self.weights, [self.signal, self.nugget, self.task_length]])

    @classmethod
    def of(cls, vector: Floats) -> Hyper:
        return cls(vector[:-3], float(vector[-3]), float(vector[-2]), float(vector[-1]))


def _matern(squared: Floats, signal: float) -> Floats:
    root = np.sqrt(5.0 * squared)
    return np.asarray(signal * (1.0 + root + 5.0 / 3.0 * squared) * np.exp(-root))


def _covariance(hyper: Hyper, a: Points, b: Points, distance: Floats) -> Floats:
    weights = np.exp(hyper.weights)
    ax, bx = a.x * np.sqrt(weights), b.x * np.sqrt(weights)
    squared = np.maximum((ax**2).sum(1)[:, None] + (bx**2).sum(1)[None, :] - 2.0 * ax @ bx.T, 0.0)
    same = squared < 1e-9
    squared[same] = 0.0
    near = np.exp(-distance[np.ix_(a.task, b.task)] * np.exp(-hyper.task_length))
    shared = _matern(squared, float(np.exp(hyper.signal))) + float(np.exp(hyper.nugget)) * same
    offset = OFFSET**2 * (a.task[:, None] == b.task[None, :])
    return np.asarray(offset + SLOPE**2 * np.outer(a.z, b.z) + near * shared)


def _variance(hyper: Hyper, a: Points) -> Floats:
    return np.asarray(OFFSET**2 + (SLOPE * a.z) ** 2 + np.exp(hyper.signal) + np.exp(hyper.nugget))


def fit(points: Points, distance: Floats, start: Hyper) -> Hyper:
    """Parameters near the mode of their posterior, from `start`. `distance` [t, t] holds the distances of the keys."""
    points = points.take(_fit_rows(points))
    center = Hyper.prior(points.x.shape[1]).vector()
    spread = np.concatenate([np.full(points.x.shape[1], 1.2), [0.8, 1.2, 0.7]])
    differences = (points.x[:, None, :] - points.x[None, :, :]) ** 2
    between = distance[np.ix_(points.task, points.task)]
    vector, rate = start.vector(), np.full(len(center), 0.25)
    best, best_value, previous = vector, -np.inf, np.zeros(len(center))
    for _ in range(FIT_STEPS):
        value, slope = _density(Hyper.of(vector), points, differences, between)
        value -= float((((vector - center) / spread) ** 2).sum()) / 2.0
        slope = slope - (vector - center) / spread**2
        if value > best_value:
            best, best_value = vector, value
        rate = np.clip(np.where(slope * previous > 0, rate * 1.25, rate * 0.5), 0.01, 0.6)
        previous = slope
        vector = vector + rate * np.sign(slope)
    return Hyper.of(best)


def _fit_rows(points: Points) -> Ints:
    """At most FIT_POINTS rows: first those of key 0, the searched one, then the others evenly."""
    own, others = np.flatnonzero(points.task == 0), np.flatnonzero(points.task != 0)
    room = FIT_POINTS * 2 // 3 if len(others) else FIT_POINTS
    if len(own) > room:
        own = own[np.linspace(0, len(own) - 1, room).astype(np.int64)]
    room = FIT_POINTS - len(own)
    if len(others) > room:
        others = others[np.linspace(0, len(others) - 1, room).astype(np.int64)]
    return np.concatenate([own, others]).astype(np.int64)


def _density(hyper: Hyper, points: Points, differences: Floats, between: Floats) -> tuple[float, Floats]:
    """Log marginal likelihood and its gradient by the log parameters."""
    weights, signal, nugget = np.exp(hyper.weights), float(np.exp(hyper.signal)), float(np.exp(hyper.nugget))
    squared = differences @ weights
    same = squared < 1e-9
    scaled = between * float(np.exp(-hyper.task_length))
    near = np.exp(-scaled)
    smooth = _matern(squared, signal)
    offset = OFFSET**2 * (points.task[:, None] == points.task[None, :])
    covariance = offset + SLOPE**2 * np.outer(points.z, points.z) + near * (smooth + nugget * same)
    covariance[np.diag_indices_from(covariance)] += points.noise
    try:
        lower = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return -np.inf, np.zeros(len(weights) + 3)
    inverse_lower = np.linalg.inv(lower)
    inverse = inverse_lower.T @ inverse_lower
    alpha = inverse @ points.y
    value = -0.5 * float(points.y @ alpha) - float(np.log(np.diag(lower)).sum())
    pull = np.outer(alpha, alpha) - inverse
    root = np.sqrt(5.0 * squared)
    by_square = -signal * (5.0 / 6.0) * (1.0 + root) * np.exp(-root) * near
    slope_weights = 0.5 * np.tensordot(pull * by_square, differences, axes=([0, 1], [0, 1])) * weights
    slope_signal = 0.5 * float((pull * near * smooth).sum())
    slope_nugget = 0.5 * float((pull * near * same).sum()) * nugget
    slope_task = 0.5 * float((pull * near * (smooth + nugget * same) * scaled).sum())
    return value, np.concatenate([slope_weights, [slope_signal, slope_nugget, slope_task]])


@dataclass(slots=True)
class Posterior:
    """Mean and variance of y at `query`, given points; `believe` adds a query point at its own mean."""

    hyper: Hyper
    points: Points
    query: Points
    distance: Floats
    mean: Floats = field(init=False)
    variance: Floats = field(init=False)
    _projected: Floats = field(init=False)
    _scaled: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._scaled = self.query.x * np.exp(0.5 * self.hyper.weights)
        self.variance = _variance(self.hyper, self.query)
        if not len(self.points):
            self.mean = np.zeros(len(self.query))
            self._projected = np.zeros((0, len(self.query)))
            return
        covariance = _covariance(self.hyper, self.points, self.points, self.distance)
        covariance[np.diag_indices_from(covariance)] += self.points.noise + 1e-8
        inverse_lower = np.linalg.inv(np.linalg.cholesky(covariance))
        self._projected = inverse_lower @ _covariance(self.hyper, self.points, self.query, self.distance)
        self.mean = self._projected.T @ (inverse_lower @ self.points.y)
        self.variance = np.maximum(self.variance - (self._projected**2).sum(0), 1e-10)

    def believe(self, index: int) -> None:
        """Treat query point `index` as measured exactly at its mean: only variances change."""
        hyper, task = self.hyper, self.query.task
        squared = ((self._scaled - self._scaled[index]) ** 2).sum(1)
        same = squared < 1e-9
        near = np.exp(-self.distance[task[index], task] * np.exp(-hyper.task_length))
        shared = _matern(squared, float(np.exp(hyper.signal))) + float(np.exp(hyper.nugget)) * same
        toward = OFFSET**2 * (task == task[index]) + SLOPE**2 * self.query.z[index] * self.query.z + near * shared
        row = (toward - self._projected[:, index] @ self._projected) / np.sqrt(self.variance[index])
        self._projected = np.vstack([self._projected, row])
        self.variance = np.maximum(self.variance - row**2, 1e-10)
