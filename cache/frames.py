"""Framing: every value in a fitune file stands in a frame that shows by itself whether it is whole.

    byte 0   magic, 4 bytes
    byte 4   kind, 1 byte, then 3 zero bytes
    byte 8   payload length, 4 bytes, little endian
    byte 12  CRC-32 of kind, zero bytes, length and payload, 4 bytes, little endian
    byte 16  payload

The first frame of every file is a HEADER: a map with the file's role, its format version, the fitune that wrote it and
the oldest fitune that reads it. The frame layout and that map stay the same in every version to come, so any fitune can
tell a newer file from a broken one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal

from fitune.cache.checks import FieldError, corrupt, mapping, one_of, pack, text, unpack, whole
from fitune.errors import CorruptStoreError, NewerStoreError, StoreError
from fitune.target import version_of

Role = Literal["store", "segment", "table", "recording"]

MAGIC: Final = b"\xf1FT\n"
FORMAT: Final = 1
NEEDS: Final = "0.1.0"
ROLES: Final[tuple[Role, ...]] = ("store", "segment", "table", "recording")
MAX_FRAME_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 1 << 28
HEADER_BYTES: Final = 16
_HEAD: Final = struct.Struct("<4sB3xII")
_MAX_SEARCHED: Final = 1024


class Kind(IntEnum):
    """What a frame's payload holds."""

    HEADER = 1
    DEFINE = 2
    RECORD = 3
    DECISION = 4
    TABLE = 5
    RECORDING = 6


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame whose checksum holds."""

    offset: int
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """`length` bytes at `offset` that are no frame. `torn`: the last frame of the file, never written to its end."""

    offset: int
    length: int
    what: str
    torn: bool


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself."""

    role: Role
    format: int
    fitune: str


def frame(kind: Kind, payload: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame as bytes. Raises StoreError for a payload larger than readers accept."""
    if len(payload) > limit_bytes:
        raise StoreError(f"a {kind.name.lower()} of {len(payload)} bytes is too large to store; at most {limit_bytes}")
    head = _HEAD.pack(MAGIC, kind, len(payload), 0)
    crc = zlib.crc32(payload, zlib.crc32(head[4:12]))
    return head[:12] + crc.to_bytes(4, "little") + payload


def _frame_at(data: bytes, offset: int, limit_bytes: int) -> Frame | str:
    """The frame at `offset`, or what is wrong with the bytes there."""
    if len(data) - offset < HEADER_BYTES:
        return "the file ends inside a frame's head"
    magic, kind, length, crc = _HEAD.unpack_from(data, offset)
    if magic != MAGIC:
        return "these bytes do not begin a frame"
    if length > limit_bytes:
        return f"a frame of {length} bytes cannot be; at most {limit_bytes}"
    start = offset + HEADER_BYTES
    payload = data[start : start + length]
    if len(payload) < length:
        return f"the file ends after {len(payload)} of a frame's {length} bytes"
    if zlib.crc32(payload, zlib.crc32(data[offset + 4 : offset + 12])) != crc:
        return "a frame's checksum does not fit its bytes"
    return Frame(offset, kind, payload)


def _is_torn(data: bytes, offset: int, limit_bytes: int) -> bool:
    """Whether the bytes from `offset` to the end are what a killed writer or a power cut leaves: a frame's beginning
    cut short, or blocks of zeros that were never filled."""
    if not data[max(offset, len(data) - HEADER_BYTES) :].strip(b"\0"):
        return True
    head = data[offset : offset + HEADER_BYTES]
    if len(head) < HEADER_BYTES:
        return head[: len(MAGIC)] == MAGIC[: len(head)]
    magic, _, length, _ = _HEAD.unpack(head)
    return bool(magic == MAGIC and len(data) - offset - HEADER_BYTES < length <= limit_bytes)


def scan(data: bytes, limit_bytes: int = MAX_FRAME_BYTES) -> Iterator[Frame | Damage]:
    """Frames and damages of a file's bytes, in order, together covering all of them.

    Bytes made to look like thousands of frames would take hours to try: after _MAX_SEARCHED tries in one file the
    rest of it counts as one damage that is not a torn tail.
    """
    offset, searched = 0, 0
    while offset < len(data):
        found = _frame_at(data, offset, limit_bytes)
        if isinstance(found, Frame):
            yield found
            offset += HEADER_BYTES + len(found.payload)
            continue
        following = data.find(MAGIC, offset + 1)
        while following >= 0 and isinstance(_frame_at(data, following, limit_bytes), str):
            searched += 1
            if searched >= _MAX_SEARCHED:
                following = len(data)
                break
            following = data.find(MAGIC, following + 1)
        end = len(data) if following < 0 else following
        yield Damage(offset, end - offset, found, torn=following < 0 and _is_torn(data, offset, limit_bytes))
        offset = end


def header_frame(role: Role) -> bytes:
    """The first frame of a file."""
    values = {"role": role, "format": FORMAT, "fitune": version_of("fitune") or NEEDS, "needs": NEEDS}
    return frame(Kind.HEADER, pack(values))


def read_header(path: Path, first: Frame, role: Role) -> Header:
    """Check a file's first frame. Raises NewerStoreError, or CorruptStoreError for anything but a header of `role`."""
    if first.kind != Kind.HEADER:
        raise CorruptStoreError(f"{path}: frame at byte {first.offset}: a header belongs here, not kind {first.kind}")
    try:
        values = mapping(unpack(first.payload, "header"), "header")
        version = whole(values.get("format"), "header.format", low=1)
        if version > FORMAT:
            needs = values.get("needs")
            _refuse_newer(path, version, text(needs, "header.needs"), text(values.get("fitune"), "header.fitune"))
        if set(values) != {"role", "format", "fitune", "needs"}:
            raise FieldError("header", "a header's fields are role, format, fitune and needs")
        found = one_of(values["role"], "header.role", ROLES)
        writer = text(values["fitune"], "header.fitune")
        text(values["needs"], "header.needs")
    except FieldError as error:
        raise corrupt(path, first.offset, error) from error
    if found != role:
        raise StoreError(f"{path} is a fitune {found}, not a {role}; name a {role} instead")
    return Header(role, version, writer)


def _refuse_newer(path: Path, version: int, needs: str, writer: str) -> None:
    mine = version_of("fitune") or NEEDS
    raise NewerStoreError(
        f"{path}: format {version}, written by fitune {writer}; this fitune {mine} reads formats up to {FORMAT}: "
        f"install fitune {needs} or newer"
    )


Migration = Callable[[int, object], object]
MIGRATIONS: Final[Mapping[int, Migration]] = {}
"""For each older format, the step that turns a payload of it (frame kind, unpacked value) into the next format's."""


def migrated(
    kind: int, payload: object, version: int, steps: Mapping[int, Migration] = MIGRATIONS, target: int = FORMAT
) -> object:
    """A payload of format `version` as format `target` has it; files on disk stay as they are."""
    for old in range(version, target):
        payload = steps[old](kind, payload)
    return payload


def read_single(path: Path, data: bytes, role: Role, kind: Kind) -> tuple[Header, Frame]:
    """The header and the one other frame of a table or recording. Raises StoreError."""
    frames: list[Frame] = []
    for found in scan(data, MAX_FILE_BYTES):
        if isinstance(found, Damage):
            if not frames and found.offset == 0 and not data.startswith(MAGIC):
                raise CorruptStoreError(f"{path} is not a fitune {role}: {found.what} at byte 0; name another file")
            raise CorruptStoreError(f"{path}: at byte {found.offset}: {found.what}; get a fresh copy of the {role}")
        frames.append(found)
        if len(frames) == 1:
            header = read_header(path, found, role)
    if len(frames) != 2 or frames[1].kind != kind:
        what = f"a {role} has two frames, this has {len(frames)}" if frames else "the file is empty"
        raise CorruptStoreError(f"{path}: at byte {len(data)}: {what}; get a fresh copy of the {role}")
    return header, frames[1]
