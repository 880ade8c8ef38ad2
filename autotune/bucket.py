"""The one rounding rule between a token count and the tuned token points.

A count belongs to the point nearest in ratio: the border between two neighbouring points is their geometric mean, and
no point speaks for counts more than a factor of MAX_RATIO away. Counts below the first point, above the last, or in a
gap between far points belong to none: nothing is clamped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Final

BUCKET_RULE: Final = "geometric-midpoint"
MAX_RATIO: Final = 2


@dataclass(frozen=True, slots=True)
class Bucket:
    """A tuned token point and the counts `low..high` (inclusive) that use it."""

    point: int
    low: int
    high: int


def buckets(points: Sequence[int]) -> tuple[Bucket, ...]:
    """The buckets of a set of token points (any order, positive)."""
    ordered = sorted(set(points))
    assert all(point > 0 for point in ordered)
    if not ordered:
        return ()
    result = []
    low = ordered[0]
    for point, following in zip(ordered, [*ordered[1:], None], strict=True):
        high = point if following is None else min(isqrt(point * following), MAX_RATIO * point)
        result.append(Bucket(point, max(low, -(-point // MAX_RATIO)), high))
        low = high + 1
    return tuple(result)


def find_bucket(table: Sequence[Bucket], num_tokens: int) -> int | None:
    """Index of the bucket that holds `num_tokens`, or None outside the tuned bounds."""
    index = bisect_left(table, num_tokens, key=lambda bucket: bucket.high)
    if index == len(table) or num_tokens < table[index].low:
        return None
    return index
