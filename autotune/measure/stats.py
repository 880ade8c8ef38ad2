"""Medians with honest intervals: no assumption about the distribution of times, and never a width of zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fitune.record import Measurement, Regime

CONFIDENCE: Final = 0.95
NOISE_QUANTILE: Final = 0.95
BOOTSTRAP_DRAWS: Final = 400


@lru_cache(maxsize=1024)
def interval_rank(count: int, confidence: float = CONFIDENCE) -> int:
    """How many samples to drop at each end for the confidence interval of the median.

    The interval from the (rank+1)-th smallest to the (rank+1)-th largest of `count` samples holds the median with
    probability 1 - 2 P(Binomial(count, 1/2) <= rank). 0 (smallest to largest) where even that promises less than
    `confidence`, which is so for five samples or fewer.
    """
    assert count >= 1
    rank, tail = 0, 0.0
    for dropped in range(count // 2):
        tail += math.comb(count, dropped) / 2.0**count
        if 1.0 - 2.0 * tail < confidence:
            break
        rank = dropped
    return rank


def median_interval(samples_us: Sequence[float], resolution_us: float) -> tuple[float, float, float]:
    """(low, median, high) in µs: median and its 95 % interval, at least `resolution_us` to each side."""
    ordered = sorted(samples_us)
    count = len(ordered)
    middle = count // 2
    median = ordered[middle] if count % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])
    rank = interval_rank(count)
    low = min(ordered[rank], median - resolution_us)
    high = max(ordered[count - 1 - rank], median + resolution_us)
    return max(low, 0.01 * median), median, high


def measurement_of(
    samples_us: Sequence[float],
    regime: Regime,
    resolution_us: float,
    *,
    parts_us: tuple[tuple[str, float], ...] = (),
    sm_mhz: float = 0.0,
    power_w: float = 0.0,
) -> Measurement:
    """A measurement of samples in µs per call of what was timed."""
    low, median, high = median_interval(samples_us, resolution_us)
    return Measurement(median, low, high, len(samples_us), regime, parts_us, sm_mhz, power_w)


def noise_band(first_us: Sequence[float], second_us: Sequence[float], resolution_us: float, seed: int = 0) -> float:
    """How far two interleaved measurements of the same thing differ, relatively, at most times.

    `first_us` and `second_us` hold one sample a round. Rounds are drawn anew with replacement; the result is the 95 %
    quantile of |median(first) / median(second) - 1|, at least what the timer can resolve.
    """
    assert len(first_us) == len(second_us) >= 1
    pairs: NDArray[np.float64] = np.array([first_us, second_us], dtype=np.float64)
    count = pairs.shape[1]
    rounds = np.random.default_rng(seed).integers(0, count, size=(BOOTSTRAP_DRAWS, count))
    medians = np.median(pairs[:, rounds], axis=2)
    differences = np.abs(medians[0] / medians[1] - 1.0)
    floor = resolution_us / float(np.median(pairs))
    return max(float(np.quantile(differences, NOISE_QUANTILE)), floor)
