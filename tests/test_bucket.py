"""The rounding rule: nothing is clamped, no count has two buckets, borders are geometric."""

from itertools import pairwise
from math import sqrt

from hypothesis import given
from hypothesis import strategies as st

from fitune.bucket import MAX_RATIO, buckets, find_bucket
from fitune.problem import DEFAULT_TOKENS

POINTS = st.lists(st.integers(1, 40_000), min_size=1, max_size=20)


def test_no_points_no_buckets() -> None:
    assert buckets([]) == ()
    assert find_bucket((), 7) is None


@given(POINTS)
def test_every_point_finds_itself(points: list[int]) -> None:
    table = buckets(points)
    assert [bucket.point for bucket in table] == sorted(set(points))
    for index, bucket in enumerate(table):
        assert bucket.low <= bucket.point <= bucket.high
        assert find_bucket(table, bucket.point) == index


@given(POINTS, st.integers(0, 100_000))
def test_a_count_is_found_exactly_where_a_bucket_holds_it(points: list[int], num_tokens: int) -> None:
    table = buckets(points)
    holding = [index for index, bucket in enumerate(table) if bucket.low <= num_tokens <= bucket.high]
    assert len(holding) <= 1
    assert find_bucket(table, num_tokens) == (holding[0] if holding else None)


@given(POINTS, st.integers(1, 100_000))
def test_no_point_speaks_for_far_counts_and_the_nearest_in_ratio_speaks(points: list[int], num_tokens: int) -> None:
    table = buckets(points)
    index = find_bucket(table, num_tokens)
    if index is None:
        return
    point = table[index].point
    ratio = max(point / num_tokens, num_tokens / point)
    assert ratio <= MAX_RATIO
    nearest = min(max(other / num_tokens, num_tokens / other) for other in points)
    assert ratio <= nearest * (1 + 1e-12)


def test_below_the_first_and_above_the_last_there_is_nothing() -> None:
    table = buckets([8, 16])
    assert find_bucket(table, 7) is None
    assert find_bucket(table, 16) == 1
    assert find_bucket(table, 17) is None
    assert find_bucket(table, 0) is None


def test_a_gap_between_far_points_belongs_to_none() -> None:
    table = buckets([1, 1024])
    assert find_bucket(table, 2) == 0
    assert find_bucket(table, 3) is None
    assert find_bucket(table, 511) is None
    assert find_bucket(table, 512) == 1
    assert find_bucket(table, 1024) == 1


def test_the_default_grid_covers_every_count_without_a_gap() -> None:
    table = buckets(DEFAULT_TOKENS)
    assert table[0].low == 1
    assert table[-1].high == 16384
    assert all(following.low == bucket.high + 1 for bucket, following in pairwise(table))
    for bucket, following in pairwise(table):
        assert bucket.high <= sqrt(bucket.point * following.point) < bucket.high + 1
