"""The miss log: many writers, a bound, and a reader that trusts nothing."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitune.errors import StoreError
from fitune.misses import Miss, MissLog, power_of_two, read_misses, scan_misses
from fitune.problem import LayerKey, LayerShape, Problem

LAYER = LayerKey(64, 32, 8, 2, "bf16", "swiglu", 4, "all_gather", "random", "NVIDIA H200")


def write_many(path: Path, writer: int, count: int) -> None:
    log = MissLog(path, max_bytes=1 << 24)
    for index in range(count):
        assert log.append(Miss(LAYER, 1 + index, f"writer {writer} line {index} " + "x" * (index % 200)))


def test_lines_of_many_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, writer, 300)) for writer in range(6)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0] * 6
    scan = scan_misses(path)
    assert scan.broken == ()
    said = {tuple(miss.reason.split()[1:4:2]) for miss in scan.misses}
    assert len(scan.misses) == 1800
    assert said == {(str(writer), str(line)) for writer in range(6) for line in range(300)}


def test_the_file_is_bounded(tmp_path: Path) -> None:
    log = MissLog(tmp_path / "deep" / "misses.jsonl", max_bytes=2000)
    results = [log.append(Miss(LAYER, n, "why")) for n in range(1, 40)]
    assert results[0] and not results[-1]
    assert results == sorted(results, reverse=True)
    assert log.path.stat().st_size <= 2000
    assert len(scan_misses(log.path).misses) == sum(results)


def test_problems_come_back_once_rounded_up_to_powers_of_two(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    log = MissLog(path)
    other = replace(LAYER, local_experts=2, dispatch="all_to_all", routing="zipf:1.2")
    for layer, count in ((LAYER, 100), (LAYER, 128), (LAYER, 129), (other, 1), (LAYER, 65)):
        log.append(Miss(layer, count, "why"))
    shape = LayerShape(64, 32, 8, 2)
    assert read_misses(path) == [
        Problem(shape, 4, 128),
        Problem(shape, 4, 256),
        Problem(shape, 2, 1, "zipf:1.2", "all_to_all"),
    ]
    assert [miss.num_tokens for miss in scan_misses(path).misses] == [100, 128, 129, 1, 65]


@given(st.integers(1, 1 << 30))
def test_power_of_two_is_the_next_one(count: int) -> None:
    point = power_of_two(count)
    assert point & (point - 1) == 0
    assert point // 2 < count <= point


BROKEN = {
    "not JSON": b"{nonsense",
    "JSON object": b"[1]",
    "v is 99": {"v": 99},
    "top_k": {"top_k": "two"},
    "num_experts is True": {"num_experts": True},
    "num_tokens is 0": {"num_tokens": 0},
    "dtype": {"dtype": "int7"},
    "larger than num_experts": {"top_k": 9},
    "do not fit": {"local_experts": 9},
    "reason is None": {"reason": None},
    "time_s": {"time_s": "now"},
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_lines_are_named_and_passed_over(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "misses.jsonl"
    MissLog(path).append(Miss(LAYER, 7, "why"))
    good = path.read_bytes()
    change = BROKEN[what]
    bad = change if isinstance(change, bytes) else json.dumps(json.loads(good) | change).encode()
    path.write_bytes(good + bad + b"\n" + good)
    scan = scan_misses(path)
    assert [line.number for line in scan.broken] == [2]
    assert what in scan.broken[0].what
    assert len(read_misses(path)) == 1
    assert "line 2" in caplog.text


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    MissLog(path).append(Miss(LAYER, 7, "why"))
    path.write_bytes(path.read_bytes() * 2)
    whole = path.read_bytes()
    for length in range(len(whole) // 2, len(whole)):
        path.write_bytes(whole[:length])
        scan = scan_misses(path)
        assert (len(scan.misses), scan.broken) == (1, ())


def test_overlong_lines_cost_no_memory_and_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "misses.jsonl"
    MissLog(path).append(Miss(LAYER, 7, "why"))
    good = path.read_bytes()
    path.write_bytes(good + b"[" * 100_000 + b"\n" + good)
    scan = scan_misses(path)
    assert [line.number for line in scan.broken] == [2]
    assert len(scan.misses) == 2


def test_a_foreign_or_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(bytes(range(256)) * 8 + b"\n")
    with pytest.raises(StoreError, match=r"notes\.txt: line 1: it is not JSON"):
        read_misses(path)
    with pytest.raises(StoreError, match="absent"):
        read_misses(tmp_path / "absent")


def test_a_text_too_long_for_a_line_is_dropped_not_cut(tmp_path: Path) -> None:
    log = MissLog(tmp_path / "misses.jsonl")
    assert not log.append(Miss(replace(LAYER, routing="r" * 5000), 7, "why"))
    assert log.append(Miss(LAYER, 7, "ж" * 5000))
    assert len(scan_misses(log.path).misses) == 1
