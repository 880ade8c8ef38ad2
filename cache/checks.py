"""Checks of single values read from a file: type, range and length first, objects after.

Every function takes the value as msgpack gave it and the name of the field it stands in, returns it with its proper
type, or raises FieldError. Whoever knows the file and the offset turns that into a CorruptStoreError.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

import msgpack

from fitune.errors import CorruptStoreError

MAX_TEXT: Final = 400
MAX_PROSE: Final = 4000
MAX_COUNT: Final = 2**31 - 1
MAX_ITEMS: Final = 512


class FieldError(Exception):
    """A value that does not belong where it stands; `field` is its dotted name, `what` says why, in words."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"field {field}: {what}")
        self.field = field
        self.what = what


def shown(value: object) -> str:
    """A value in an error message: short, printable, and safe for values of any depth or size."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else "a huge number"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else f"{value[:60]!r}..."
    return f"a {type(value).__name__}"


def text(value: object, field: str, *, empty: bool = False) -> str:
    """A printable text of one line, at most MAX_TEXT characters."""
    if type(value) is not str:
        raise FieldError(field, f"{shown(value)} is no text")
    if not value and not empty:
        raise FieldError(field, "the text is empty")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise FieldError(field, f"{shown(value)} is too long or holds control characters")
    return value


def prose(value: object, field: str) -> str:
    """A text of any number of lines, at most MAX_PROSE characters, with no control characters but newline and tab."""
    if type(value) is not str:
        raise FieldError(field, f"{shown(value)} is no text")
    if value and (len(value) > MAX_PROSE or not _is_prose(value)):
        raise FieldError(field, f"{shown(value)} is too long or holds control characters")
    return value


def _is_prose(value: str) -> bool:
    return value.isprintable() or value.replace("\n", "").replace("\t", "").isprintable()


def cleaned_prose(value: str) -> str:
    """`value` made fit to be stored as prose: control characters replaced, the middle of a long text cut out."""
    if len(value) > MAX_PROSE:
        half = MAX_PROSE // 2 - 8
        value = f"{value[:half]}\n[...]\n{value[-half:]}"
    if not _is_prose(value):
        value = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in value)
    return value


def number(value: object, field: str, *, positive: bool = False) -> float:
    """A finite number of 0 or more; above 0 where `positive`."""
    if type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not float:
        raise FieldError(field, f"{shown(value)} is no number")
    if not 0.0 <= value < math.inf or (positive and value == 0.0):
        raise FieldError(field, f"{value!r} is not a finite number {'above 0' if positive else 'of 0 or more'}")
    return value


def whole(value: object, field: str, low: int = 0, high: int = MAX_COUNT) -> int:
    """A whole number in `low..high`."""
    if type(value) is not int or not low <= value <= high:
        raise FieldError(field, f"{shown(value)} is not a whole number from {low} to {high}")
    return value


def truth(value: object, field: str) -> bool:
    """True or False."""
    if type(value) is not bool:
        raise FieldError(field, f"{shown(value)} is neither true nor false")
    return value


def array(value: object, field: str, length: int | None = None) -> tuple[object, ...]:
    """An array, of exactly `length` values where that is given."""
    if type(value) is not tuple:
        raise FieldError(field, f"{shown(value)} is no array")
    if length is not None and len(value) != length:
        raise FieldError(field, f"an array of {len(value)} values stands where {length} belong")
    return value


def one_of(value: object, field: str, allowed: Collection[str]) -> str:
    """One of a set of texts."""
    if type(value) is not str or value not in allowed:
        raise FieldError(field, f"{shown(value)} is not one of {', '.join(allowed)}")
    return value


def mapping(value: object, field: str) -> dict[str, object]:
    """A map whose keys are texts."""
    if type(value) is not dict:
        raise FieldError(field, f"{shown(value)} is no map")
    return value


def binary(value: object, field: str) -> bytes:
    """Bytes."""
    if type(value) is not bytes:
        raise FieldError(field, f"{shown(value)} are no bytes")
    return value


def unique_pairs(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """A map of pairs. Raises ValueError where a key stands there twice."""
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"map key {shown(name)} stands there twice")
        result[name] = value
    return result


def unpack(payload: bytes, field: str) -> object:
    """The msgpack value in `payload`: arrays as tuples, maps as dicts with unique text keys, no extension types.

    Arrays and maps of more than MAX_ITEMS are refused before they are allocated. Raises FieldError.
    """
    try:
        return msgpack.unpackb(
            payload,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=unique_pairs,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        what = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise FieldError(field, f"no valid msgpack: {what}") from error


def pack(value: object) -> bytes:
    """`value` as msgpack. Raises FieldError for what msgpack cannot hold (lone surrogates, huge numbers)."""
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise FieldError("value", f"cannot be stored: {str(error)[:120]}") from error
    return packed


def corrupt(path: object, offset: int, error: FieldError) -> CorruptStoreError:
    """The user's error for a bad field of the frame at byte `offset` of file `path`."""
    return CorruptStoreError(f"{path}: frame at byte {offset}: field {error.field}: {error.what}")
