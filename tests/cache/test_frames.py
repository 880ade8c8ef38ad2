"""Frames: whole ones come back, cut and hostile ones are told apart, nothing crashes."""

import struct
import time
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune.cache.frames import (
    FORMAT,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    Damage,
    Frame,
    Kind,
    frame,
    header_frame,
    migrated,
    read_header,
    scan,
)
from fitune.errors import CorruptStoreError, NewerStoreError, StoreError

PAYLOADS = [b"", b"a", b"payload " * 10, MAGIC * 3, bytes(range(256))]
WHOLE = b"".join(frame(Kind.RECORD, payload) for payload in PAYLOADS)


def payloads(data: bytes) -> list[bytes]:
    return [found.payload for found in scan(data) if isinstance(found, Frame)]


def test_frames_come_back() -> None:
    assert payloads(WHOLE) == PAYLOADS


def test_layout_is_fixed() -> None:
    """Files on users' disks depend on these bytes."""
    head = struct.pack("<B3xI", 3, 3)
    crc = zlib.crc32(b"abc", zlib.crc32(head))
    assert frame(Kind.RECORD, b"abc") == b"\xf1FT\n" + head + struct.pack("<I", crc) + b"abc"


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_cut_costs_only_the_frame_it_hits(length: int) -> None:
    found = list(scan(WHOLE[:length]))
    whole = [item for item in found if isinstance(item, Frame)]
    ends, end = [], 0
    for payload in PAYLOADS:
        end += HEADER_BYTES + len(payload)
        ends.append(end)
    assert len(whole) == sum(end <= length for end in ends)
    assert all(isinstance(item, Frame) or item.torn for item in found)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_flipped_byte_costs_one_frame_and_is_seen(position: int, flip: int) -> None:
    data = bytearray(WHOLE)
    data[position] ^= flip
    found = list(scan(bytes(data)))
    whole = [item.payload for item in found if isinstance(item, Frame)]
    assert len(whole) == len(PAYLOADS) - 1
    assert [payload for payload in PAYLOADS if payload in whole] == whole
    assert sum(isinstance(item, Damage) for item in found) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.just(MAGIC), st.just(WHOLE[:60])), max_size=8))
def test_any_bytes_are_covered_once(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    offset = 0
    for item in scan(data):
        assert item.offset == offset
        offset += item.length if isinstance(item, Damage) else HEADER_BYTES + len(item.payload)
    assert offset == len(data)


def test_lying_length_does_not_hide_what_follows() -> None:
    liar = bytearray(frame(Kind.RECORD, b"x"))
    liar[8:12] = struct.pack("<I", 0xFFFFFFFF)
    first, second = scan(bytes(liar) + frame(Kind.RECORD, b"y"))
    assert isinstance(first, Damage)
    assert not first.torn
    assert "4294967295" in first.what
    assert isinstance(second, Frame)
    assert second.payload == b"y"


def test_thousands_of_false_frames_take_no_hours() -> None:
    false = MAGIC + struct.pack("<B3xII", 3, MAX_FRAME_BYTES, 0)
    started = time.monotonic()
    found = list(scan(false * (4 * MAX_FRAME_BYTES // len(false))))
    assert time.monotonic() - started < 10.0
    assert all(isinstance(item, Damage) for item in found)


def test_a_payload_that_readers_refuse_is_not_written() -> None:
    with pytest.raises(StoreError, match="too large"):
        frame(Kind.RECORD, bytes(MAX_FRAME_BYTES + 1))


def header_of(**changes: object) -> Frame:
    values = {"role": "segment", "format": FORMAT, "fitune": "0.1.0", "needs": "0.1.0", **changes}
    return Frame(0, Kind.HEADER, msgpack.packb({name: value for name, value in values.items() if value is not None}))


def test_header_comes_back() -> None:
    first = next(scan(header_frame("table")))
    assert isinstance(first, Frame)
    assert read_header(Path("f"), first, "table").format == FORMAT


def test_newer_format_names_the_version_needed() -> None:
    newer = header_of(format=FORMAT + 1, needs="3.2", fitune="3.5", role="something new", extra=1)
    with pytest.raises(NewerStoreError, match=r"f: format 2, written by fitune 3\.5; .*install fitune 3\.2 or newer"):
        read_header(Path("f"), newer, "segment")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"format": 0}, "header.format"),
        ({"format": True}, "header.format"),
        ({"format": "1"}, "header.format"),
        ({"format": None}, "header.format"),
        ({"role": "elsewhat"}, "header.role"),
        ({"fitune": "a\x1b[31m"}, "header.fitune"),
        ({"needs": None}, "header"),
        ({"more": 1}, "header"),
        ({"format": 9, "needs": 3}, "header.needs"),
    ],
)
def test_bad_header_names_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(CorruptStoreError, match=f"field {field}:"):
        read_header(Path("f"), header_of(**changes), "segment")


def test_header_of_another_role_is_refused() -> None:
    with pytest.raises(StoreError, match="f is a fitune table, not a segment"):
        read_header(Path("f"), header_of(role="table"), "segment")


def test_older_payloads_are_migrated_step_by_step() -> None:
    steps = {
        1: lambda kind, payload: [*payload, "from 1", kind],
        2: lambda kind, payload: [*payload, "from 2"],
    }
    assert migrated(Kind.RECORD, ["a"], 1, steps, 3) == ["a", "from 1", Kind.RECORD, "from 2"]
    assert migrated(Kind.RECORD, ["a"], 3, steps, 3) == ["a"]
