"""Intervals hold what they promise, and nothing is ever certain."""

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitune.measure.stats import interval_rank, measurement_of, median_interval, noise_band
from fitune.record import Regime


@pytest.mark.parametrize("count", range(1, 200))
def test_rank_is_the_largest_that_still_covers(count: int) -> None:
    def coverage(rank: int) -> float:
        return 1.0 - 2.0 * sum(comb(count, k) for k in range(rank + 1)) / 2.0**count

    rank = interval_rank(count)
    assert 2 * rank < count
    if rank > 0:
        assert coverage(rank) >= 0.95
    if count >= 6:
        assert coverage(rank) >= 0.95
        assert coverage(rank + 1) < 0.95


def test_interval_holds_the_true_median_as_often_as_promised() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        low, _, high = median_interval(list(rng.lognormal(0.0, 1.0, size=11)), 1e-9)
        hits += low <= 1.0 <= high
    assert 0.95 <= hits / 2000 <= 0.995


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40), st.floats(1e-3, 10.0))
def test_measurement_is_always_well_formed(samples: list[float], resolution_us: float) -> None:
    measurement = measurement_of(samples, Regime(), resolution_us)
    assert measurement.ci_low_us < measurement.ci_high_us
    assert measurement.samples == len(samples)


def test_equal_samples_keep_the_resolution_as_width() -> None:
    low, median, high = median_interval([10.0] * 15, 0.25)
    assert (low, median, high) == (9.75, 10.0, 10.25)


def test_noise_of_identical_series_is_what_the_timer_resolves() -> None:
    assert noise_band([100.0] * 8, [100.0] * 8, 0.5) == pytest.approx(0.005)


def test_noise_sees_a_shift_and_a_spread() -> None:
    rng = np.random.default_rng(3)
    steady = list(rng.normal(100.0, 0.1, 24))
    wild = list(rng.normal(100.0, 8.0, 24))
    assert noise_band(steady, [us * 1.03 for us in steady], 0.01) == pytest.approx(0.03, rel=0.1)
    assert noise_band(steady, wild, 0.01) > 3 * noise_band(steady, list(rng.normal(100.0, 0.1, 24)), 0.01)
