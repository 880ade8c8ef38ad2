"""Recordings: small, exact once rounded, and refused in one line when broken."""

import math
import random
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune.cache import Recording, embedded_recordings, load_recording, recording, save_recording
from fitune.cache.columns import from_planes, planes
from fitune.cache.frames import MAX_FILE_BYTES, Frame, Kind, frame, header_frame, scan
from fitune.errors import CorruptStoreError, NewerStoreError, StoreError
from fitune.record import Accuracy, Measurement, Record, Regime, Status
from fitune.tactic import GemmTactic, Tactic
from fitune.target import KNOWN_TARGETS


def small(world: Any) -> Recording:
    records = [*(world.record(number) for number in range(6)), world.failure(), replace(world.record(9), accuracy=None)]
    wrong = replace(
        world.failure(1), status=Status.WRONG_RESULT, accuracy=Accuracy(math.inf, 0.5), error="off\nby much"
    )
    environments = {found.id: found for found in (world.environment, world.old_environment)}
    return Recording(
        KNOWN_TARGETS["sm_90"], "h200", "made up\nfor tests", environments, (*records, wrong), (world.decision(),)
    )


def test_recordings_come_back(tmp_path: Path, world: Any) -> None:
    path = tmp_path / "a.fitrec"
    save_recording(path, small(world))
    assert load_recording(path) == small(world)
    empty = replace(small(world), records=(), decisions=(), environments={})
    save_recording(path, empty)
    assert load_recording(path) == empty


def test_times_are_rounded_to_a_nanosecond_once(tmp_path: Path, world: Any) -> None:
    rng = random.Random(3)
    records = []
    for number in range(300):
        low, mid, high = sorted(rng.uniform(1e-4, 3.0) * 10 ** rng.randint(0, 5) for _ in range(3))
        measurement = Measurement(mid, low, high, 3, Regime(), (), rng.uniform(0, 2000), rng.uniform(0, 700))
        records.append(replace(world.record(number), measurement=measurement, time_s=rng.uniform(0, 2e9)))
    path = tmp_path / "a.fitrec"
    save_recording(path, replace(small(world), records=tuple(records)))
    again = load_recording(path)
    for before, after in zip(records, again.records, strict=True):
        one, two = before.measurement, after.measurement
        assert one is not None
        assert two is not None
        for name in ("median_us", "ci_low_us", "ci_high_us"):
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-12, abs=0.00101)
        assert after.time_s == pytest.approx(before.time_s, abs=0.000501)
        assert (two.sm_mhz, two.power_w) == (pytest.approx(one.sm_mhz), pytest.approx(one.power_w))
        assert replace(after, time_s=0, measurement=None, status=Status.CRASHED) == replace(
            before, time_s=0, measurement=None, status=Status.CRASHED
        )
    save_recording(tmp_path / "b.fitrec", again)
    assert load_recording(tmp_path / "b.fitrec") == again
    assert (tmp_path / "b.fitrec").read_bytes() == path.read_bytes()


def measured_space(world: Any, num_records: int) -> Recording:
    """As a sweep leaves it: every time, clock, power, error and many binaries different."""
    rng = random.Random(0)

    def gemm() -> GemmTactic:
        n, k = rng.choice((64, 128, 256)), rng.choice((32, 64, 128))
        return GemmTactic(n, k, rng.choice((1, 4, 8, 16)), rng.choice((4, 8)), rng.choice((3, 4, 5)), "persistent")

    stages = [
        Tactic("tile", rng.choice((16, 32, 64, 128)), gemm(), gemm()).stage(rng.choice(("gemm1", "gemm2")))
        for _ in range(1000)
    ]
    records, time_s = [], 1.75e9
    for number in range(num_records):
        stage = rng.choice(stages)
        time_s += rng.random()
        median_us = rng.lognormvariate(5.0, 1.5)
        low_us, high_us = median_us * (1 - rng.random() * 0.01), median_us * (1 + rng.random() * 0.01)
        records.append(
            Record(
                world.key(2 ** (number * 15 // num_records)),
                stage.stage,
                stage,
                Status.OK,
                world.environment.id,
                "run",
                time_s,
                measurement=Measurement(
                    median_us, low_us, high_us, rng.randint(5, 30), Regime(), (), 1980.0, rng.uniform(200.0, 700.0)
                ),
                accuracy=Accuracy(rng.random() * 0.05, rng.random() * 0.005),
                binary=f"{rng.randrange(3000) * 0x9E3779B97F4A7C15 % 2**64:016x}",
            )
        )
    return replace(small(world), records=tuple(records))


def test_a_large_recording_is_small_and_quick(tmp_path: Path, world: Any) -> None:
    path = tmp_path / "a.fitrec"
    save_recording(path, measured_space(world, 30_000))
    assert path.stat().st_size <= 1_000_000
    started_s = time.process_time()
    found = load_recording(path)
    assert time.process_time() - started_s < 1.5  # some 0.3 s on an idle core
    assert len(found.records) == 30_000


def test_what_would_not_read_back_is_not_written(tmp_path: Path, world: Any) -> None:
    path = tmp_path / "a.fitrec"
    save_recording(path, small(world))
    before = path.read_bytes()
    for change in ({"time_s": math.nan}, {"time_s": -5.0}, {"origin": ""}, {"run_id": "a\nb"}):
        with pytest.raises(StoreError, match=r"cannot write .*a\.fitrec: the recording holds a value"):
            save_recording(path, replace(small(world), records=(replace(world.record(), **change),)))
    with pytest.raises(StoreError, match="there is no such file or folder"):
        save_recording(tmp_path / "none" / "a.fitrec", small(world))
    with pytest.raises(AssertionError, match="not in the recording"):
        save_recording(path, replace(small(world), environments={}))
    assert path.read_bytes() == before


def test_what_is_no_recording_is_refused(tmp_path: Path, world: Any) -> None:
    path = tmp_path / "a.fitrec"
    with pytest.raises(StoreError, match=r"no recording at .*check the path"):
        load_recording(path)
    for content, what in [
        (b"", "at byte 0: the file is empty"),
        (b"\x1f\x8b gzip", "is not a fitune recording: .* at byte 0; name another file"),
        (header_frame("table"), "is a fitune table, not a recording"),
        (header_frame("recording") + frame(Kind.RECORDING, b"no zlib"), "field recording: it cannot be unpacked"),
        (header_frame("recording") + frame(Kind.RECORDING, zlib.compress(b"\x90")), "field recording: an array of 0"),
        (
            header_frame("recording") + frame(Kind.RECORDING, zlib.compress(b"\x90")[:-2]),
            "does not unpack to one value",
        ),
    ]:
        path.write_bytes(content)
        with pytest.raises(CorruptStoreError if "table" not in what else StoreError, match=what) as error:
            load_recording(path)
        assert "a.fitrec" in str(error.value)
        assert "\n" not in str(error.value)
    path.write_bytes(frame(Kind.HEADER, msgpack.packb({"role": "x", "format": 2, "fitune": "2", "needs": "1.5"})))
    with pytest.raises(NewerStoreError, match=r"install fitune 1\.5"):
        load_recording(path)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_PLAIN_BYTES", 1 << 20)
    path = tmp_path / "a.fitrec"
    path.write_bytes(header_frame("recording") + frame(Kind.RECORDING, zlib.compress(bytes(1 << 24))))
    with pytest.raises(CorruptStoreError, match="at most 1048576 bytes"):
        load_recording(path)


def test_every_cut_and_flip_is_noticed(tmp_path: Path, world: Any) -> None:
    path = tmp_path / "a.fitrec"
    save_recording(path, small(world))
    data = path.read_bytes()
    for position in range(0, len(data), 23):
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        for broken in (data[:position], bytes(flipped)):
            path.write_bytes(broken)
            with pytest.raises(StoreError):
                load_recording(path)


def plain_value(path: Path) -> Any:
    _, found = scan(path.read_bytes(), MAX_FILE_BYTES)
    assert isinstance(found, Frame)
    return msgpack.unpackb(zlib.decompress(found.payload), use_list=True)


def put(path: Path, value: Any) -> None:
    path.write_bytes(header_frame("recording") + frame(Kind.RECORDING, zlib.compress(msgpack.packb(value))))


ODD = st.none() | st.booleans() | st.integers(-9, 2**40) | st.binary(max_size=80) | st.text(max_size=5) | st.just([])


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), ODD, st.booleans())
def test_changed_recordings_are_sound_or_refused(
    tmp_path_factory: pytest.TempPathFactory, world: Any, rng: random.Random, odd: Any, in_bytes: bool
) -> None:
    path = tmp_path_factory.mktemp("recording") / "a.fitrec"
    save_recording(path, small(world))
    value = plain_value(path)
    place: Any = value
    while True:
        position = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        inner = place[position]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.1:
            break
        place = inner
    if in_bytes and isinstance(inner, bytes) and inner:
        at = rng.randrange(len(inner))
        odd = inner[:at] + bytes([rng.randrange(256)]) + inner[at + 1 :]
    place[position] = odd
    put(path, value)
    try:
        found = load_recording(path)
    except CorruptStoreError as error:
        refusal = str(error)
    else:
        save_recording(path, found)
        assert load_recording(path) == found
        return
    assert "field " in refusal
    assert "a.fitrec" in refusal


def test_planes_come_back() -> None:
    assert planes(bytes(range(8)), 4) == bytes([0, 4, 1, 5, 2, 6, 3, 7])
    assert from_planes(planes(bytes(range(8)), 4), 4, "field") == bytes(range(8))


def test_embedded_recordings_are_files_of_the_package() -> None:
    for path in embedded_recordings():
        assert path.suffix == ".fitrec"
        assert load_recording(path).records
