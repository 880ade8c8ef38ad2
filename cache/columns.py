"""Columns: many values of one kind as bytes, for the table and recordings.

Numbers stand as little-endian arrays, pools of distinct values as their lengths and their bytes one after another.
A reader allocates no more than the bytes it was given, whatever they say.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Final, Generic, Literal, TypeVar

from fitune.cache.checks import FieldError, binary
from fitune.cache.checks import array as values_of

T = TypeVar("T", bound=Hashable)
Code = Literal["I", "q", "d", "f"]
_BIG_ENDIAN: Final = sys.byteorder == "big"


class Pool(Generic[T]):
    """Distinct values in the order of their first use, each with its number."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """The number of `value`, a new one at first sight."""
        return self._numbers.setdefault(value, len(self._numbers))

    def values(self) -> list[T]:
        """All values, by number."""
        return list(self._numbers)


def pack_numbers(code: Code, values: Iterable[float]) -> bytes:
    """Numbers as bytes: `I` unsigned 32 bit, `q` signed 64 bit, `d` and `f` floats of 64 and 32 bit."""
    numbers = array(code, values)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def unpack_numbers(code: Code, value: object, field: str, count: int | None = None) -> Sequence[int]:
    """The inverse of pack_numbers (typed for the integer codes). Raises FieldError, also for another
    number of values than `count`.
    """
    data = binary(value, field)
    numbers = array(code)
    if len(data) % numbers.itemsize:
        raise FieldError(field, f"{len(data)} bytes are no whole number of values")
    numbers.frombytes(data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    if count is not None and len(numbers) != count:
        raise FieldError(field, f"{len(numbers)} values stand where {count} belong")
    return numbers


def unpack_numbered(value: object, field: str, count: int, pool: int) -> Sequence[int]:
    """A column of numbers of a pool's members. Raises FieldError, also where one is `pool` or more."""
    numbers = unpack_numbers("I", value, field, count)
    if count and max(numbers) >= pool:
        raise FieldError(field, f"member {max(numbers)} is named of a pool of {pool}")
    return numbers


def pack_blobs(blobs: Sequence[bytes]) -> list[bytes]:
    """[lengths, all bytes]"""
    return [pack_numbers("I", map(len, blobs)), b"".join(blobs)]


def unpack_blobs(value: object, field: str) -> list[bytes]:
    """The inverse of pack_blobs. Raises FieldError."""
    first, second = values_of(value, field, 2)
    lengths = unpack_numbers("I", first, f"{field}.lengths")
    data = binary(second, f"{field}.bytes")
    ends = list(accumulate(lengths))
    if (ends[-1] if ends else 0) != len(data):
        raise FieldError(field, f"the lengths add up to {ends[-1] if ends else 0} bytes, there are {len(data)}")
    return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def pack_texts(texts: Sequence[str]) -> list[bytes]:
    """Texts as blobs."""
    return pack_blobs([text.encode() for text in texts])


def unpack_texts(value: object, field: str) -> list[str]:
    """The inverse of pack_texts. Raises FieldError."""
    try:
        return [blob.decode() for blob in unpack_blobs(value, field)]
    except UnicodeDecodeError as error:
        raise FieldError(field, "its text is no UTF-8") from error


def planes(data: bytes, width: int) -> bytes:
    """The first bytes of all values of `width` bytes, then the second ones, and so on: compresses far better."""
    return b"".join(data[i::width] for i in range(width))


def from_planes(value: object, width: int, field: str) -> bytes:
    """The inverse of planes. Raises FieldError."""
    data = binary(value, field)
    if len(data) % width:
        raise FieldError(field, f"{len(data)} bytes are no whole number of values")
    result = bytearray(len(data))
    count = len(data) // width
    for i in range(width):
        result[i::width] = data[i * count : (i + 1) * count]
    return bytes(result)
