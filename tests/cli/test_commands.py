"""Every command on a store tuned on a recording: what it prints, where, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.cache import Store, load_recording, open_store
from fitune.misses import Miss, MissLog
from fitune.problem import LayerKey
from fitune.space import candidates
from fitune.tactic import parse_tactic
from fitune.target import KNOWN_TARGETS, Environment

COMMAND = [sys.executable, "-c", "import sys; from fitune.cli import main; sys.exit(main())"]
ANSI = "\x1b["


def document(result: Any) -> Any:
    """The one JSON document on stdout of a command that went well."""
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; started = time.perf_counter()\n"
        "from fitune.cli import main\n"
        "assert main(['--help']) == 0\n"
        "print(time.perf_counter() - started, *sorted(sys.modules), sep='\\n')"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    loaded = set(lines)
    assert not loaded & {"torch", "triton", "optuna", "numpy", "matplotlib", "rich", "fitune.search", "fitune.diff"}
    seconds = float(next(line for line in lines if re.fullmatch(r"\d+\.\d+(e-\d+)?", line)))
    assert seconds < 1.5  # 0.1 s on an idle machine


@pytest.mark.parametrize("command", ["search", "show", "diff", "space", "record", "verify", "env", "cache"])
def test_every_help_has_examples(run: Callable[..., Any], command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"  fitune {command}" in result.out
    assert result.err == ""


@pytest.mark.parametrize("command", ["dir", "list", "check", "merge", "prune"])
def test_every_cache_help_has_an_example(run: Callable[..., Any], command: str) -> None:
    assert f"  fitune cache {command}" in run("cache", command, "--help").out


def test_version_and_nothing(run: Callable[..., Any]) -> None:
    assert re.fullmatch(r"fitune \d+\.\d+.*\n", run("--version").out)
    bare = run()
    assert bare.code == 2
    assert "search" in bare.err


def test_search_prints_cells_on_stdout_and_talk_on_stderr(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tmp_path: Path
) -> None:
    result = run(*search_line(recording_file, tmp_path / "store"))
    assert result.code == 0
    assert [line.split()[0] for line in result.out.splitlines()[2:]] == ["16", "512", "16", "512"]
    assert "true for NVIDIA H200" in result.err
    assert "[4/4]" in result.err
    assert "4 of 4 cells decided" in result.err
    assert (tmp_path / "store" / "table.fitable").exists()
    again = run(*search_line(recording_file, tmp_path / "store"))
    assert again.out == result.out
    assert "4 kept from before" in again.err


def test_search_json_holds_legal_tactics_faster_than_the_default(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tmp_path: Path
) -> None:
    found = document(run(*search_line(recording_file, tmp_path / "store"), "--json", "--trials", 30))
    assert found["device"] == "NVIDIA H200"
    assert found["skipped"] == []
    assert 0 < found["measured"] <= 4 * 2 * 30
    for cell in found["cells"]:
        assert str(parse_tactic(cell["tactic"])) == cell["tactic"]
        assert cell["against_default"] <= cell["noise"]
        assert cell["ci_low_us"] <= cell["median_us"] <= cell["ci_high_us"]


def test_search_stopped_by_its_budget_says_so_and_goes_on(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tmp_path: Path
) -> None:
    line = search_line(recording_file, tmp_path / "store")
    short = run(*line, "--budget", "0.001s")
    assert short.code == 0
    assert "left out" in short.err
    assert "give the same command again" in short.err
    whole = document(run(*line, "--json"))
    assert len(whole["cells"]) == 4


def test_an_interrupted_search_resumes_without_measuring_twice(
    run: Callable[..., Any],
    search_line: Callable[..., Any],
    recording_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fitune.measure.recording import RecordingMeasurer

    store, original, asked = tmp_path / "store", RecordingMeasurer.stages, []

    def stages(self: Any, problem: Any, members: Any, hopeless_us: Any) -> Any:
        for outcome in original(self, problem, members, hopeless_us):
            asked.append((problem, outcome.tactic))
            if len(asked) == 50:
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(RecordingMeasurer, "stages", stages)
    stopped = run(*search_line(recording_file, store))
    assert stopped.code == 130
    assert "resume by the same command" in stopped.err
    assert "Traceback" not in stopped.err
    kept = open_store(store).records()
    assert len(kept) == 49
    resumed = document(run(*search_line(recording_file, store), "--json"))
    assert resumed["reused"] == 49
    assert len(set(asked)) == len(asked) - 1  # the one that was being measured
    assert len(resumed["cells"]) == 4


def test_sigint_ends_a_search_quietly(search_line: Callable[..., Any], recording_file: Path, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's children ignore it
        "from fitune.measure import recording\n"
        "original = recording.RecordingMeasurer.stages\n"
        "def slow(self, problem, members, hopeless_us):\n"
        "    for outcome in original(self, problem, members, hopeless_us):\n"
        "        time.sleep(0.1)\n"
        "        yield outcome\n"
        "recording.RecordingMeasurer.stages = slow\n"
        "from fitune.cli import main\n"
        "sys.exit(main())"
    )
    line = [sys.executable, "-c", code, *map(str, search_line(recording_file, tmp_path / "store"))]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    segments = tmp_path / "store" / "segments"
    while sum(path.stat().st_size for path in segments.glob("*.seg")) < 2000 and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, talk = child.communicate(timeout=60)
    assert child.returncode == 130, talk
    assert "Traceback" not in talk
    assert open_store(tmp_path / "store").records()


def test_misses_are_tuned_and_foreign_ones_told(run: Callable[..., Any], recording_file: Path, tmp_path: Path) -> None:
    layer = LayerKey(7168, 2048, 256, 8, "bf16", "swiglu", 32, "all_gather", "random", "NVIDIA H200")
    log = MissLog(tmp_path / "misses.jsonl")
    log.append(Miss(layer, 500, "no bucket"))
    log.append(Miss(layer, 505, "no bucket"))
    log.append(Miss(layer, 3, "no bucket"))
    log.append(Miss(LayerKey(**{**{name: getattr(layer, name) for name in layer.__slots__}, "device": "TPU"}), 16, "x"))
    with log.path.open("a") as stream:
        stream.write("no line of ours\n")
    line = ("search", "--misses", log.path, "--store", tmp_path / "store", "--measurer", f"recording:{recording_file}")
    result = run(*line, "--json")
    cells = document(result)["cells"]
    assert [(cell["tokens"], cell["ep"]) for cell in cells] == [(512, "EP 8")]
    assert "line 5 is passed over" in result.err
    assert "missed on TPU" in result.err
    assert "4 tokens, EP 8: left out, it was not recorded" in result.err


def test_show_fits_100_columns_and_a_pipe_gets_the_whole_tactic(
    run: Callable[..., Any], tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = document(run("show", "--store", tuned, "--json"))["cells"]
    wide = run("show", "--store", tuned).out
    for cell in cells:
        assert any(line.endswith(cell["tactic"]) for line in wide.splitlines())
    monkeypatch.setenv("COLUMNS", "100")
    narrow = run("show", "--store", tuned)
    lines = narrow.out.splitlines()
    assert all(len(line) <= 100 for line in lines[1:])
    assert lines[1].split()[:2] == ["tokens", "EP"]
    assert not [line for line in lines if line != line.rstrip()]
    for line, cell in zip(lines[2:], cells, strict=False):
        first = parse_tactic(cell["tactic"]).gemm1
        assert f"{first.block_n}x{first.block_k}/g{first.group_m}" in line
        assert cell["state"] in line
    only = run("show", "--store", tuned, "--ep", "8", "--tokens", "16").out
    assert len([line for line in only.splitlines() if " EP 8 " in line]) == 1
    assert " EP 1 " not in only


def test_stale_cells_are_told_from_fresh_ones(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    store = Store.open(tmp_path / "old", create=True)
    decision = next(iter(open_store(tuned).decisions().values()))
    chip = KNOWN_TARGETS["sm_90"]
    old = Environment(chip.device, chip.arch, chip.num_sms, "0.0.1", "0123456789abcdef")
    with store.writer() as writer:
        writer.append(old)
        writer.append(replace(decision, environment_id=old.id))
    result = run("show", "--store", store.path)
    assert " stale " in result.out
    assert "0123456789abcdef" in result.out
    assert document(run("show", "--store", store.path, "--json"))["cells"][0]["state"] == "stale"


def test_show_of_an_empty_store(run: Callable[..., Any], tmp_path: Path) -> None:
    Store.open(tmp_path / "empty", create=True)
    result = run("show", "--store", tmp_path / "empty")
    assert (result.code, result.out) == (0, "")
    assert "fitune search" in result.err
    assert document(run("show", "--store", tmp_path / "empty", "--json"))["cells"] == []


def test_diff_between_ep_sizes(run: Callable[..., Any], tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = run("diff", "--store", tuned, "--ep", "1,8", "--all")
    found = document(run("diff", "--store", tuned, "--ep", "1,8", "--json"))["diffs"]
    assert len(found) == 1
    assert (found[0]["a"], found[0]["b"]) == ("EP 1", "EP 8")
    assert [row["num_tokens"] for row in found[0]["rows"]] == [16, 512]
    for row in found[0]["rows"]:
        assert any(line.split()[:2] == [str(row["num_tokens"]), row["verdict"]] for line in result.out.splitlines())
    assert found[0]["sentence"] in result.out
    assert all(len(line) <= 100 for line in result.out.splitlines() if not line.startswith("EP 1 and EP 8"))
    assert len(document(run("diff", "--store", tuned, "--ep", "8,1,8", "--json"))["diffs"]) == 1
    real = "real" in found[0]["counts"]
    assert run("diff", "--store", tuned, "--ep", "1,8", "--exit-code").code == int(real)


def test_diff_between_stores(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tuned, other)
    same = run("diff", tuned, other, "--exit-code")
    assert same.code == 0
    assert "in 0 of 4 rows" in same.out
    assert "same" not in same.out.splitlines()[1]
    everything = run("diff", tuned, other, "--all").out
    assert everything.count(" same ") == 4
    assert "\nEP 8\n" in everything
    narrowed = document(run("diff", tuned, other, "--ep", "8", "--json"))["diffs"][0]
    assert len(narrowed["rows"]) == 2
    assert narrowed["a"] == "tuned EP 8"


def test_space_counts_what_the_enumeration_holds(run: Callable[..., Any]) -> None:
    from fitune.models import preset
    from fitune.problem import Problem

    line = ("space", "--model", "deepseek-v3", "--ep", "16", "--tokens", "8192", "--target", "sm_90")
    found = document(run(*line, "--json"))["spaces"]
    assert [item["stage"] for item in found] == ["gemm1", "gemm2"]
    for item in found:
        problem = Problem(preset("deepseek-v3").shape, 16, 8192)
        members = candidates(problem, KNOWN_TARGETS["sm_90"], item["stage"])
        assert item["candidates"] == len(members)
        assert item["legal"] == sum(not member.reason for member in members)
        assert item["legal"] == sum(item["legal_per_tile_size"].values())
        assert item["candidates"] - item["legal"] == sum(rule["count"] for rule in item["rejected"])
    text = run(*line, "--stage", "gemm2").out
    assert f"{found[1]['candidates']} candidates, {found[1]['legal']} legal" in text
    assert "gemm1" not in text


def test_record_packs_a_store_and_says_how_exhaustive(
    run: Callable[..., Any], search_line: Callable[..., Any], tuned: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again.fitrec"
    told = document(run("record", "--from-store", tuned, "--out", out, "--name", "mine", "--json"))
    packed = load_recording(out)
    assert packed.name == "mine"
    assert told["records"] == len(packed.records) == len(open_store(tuned).records())
    assert 0 < told["tried"] < told["legal"]
    assert f"{told['tried']} of {told['legal']} legal candidates tried" in packed.note
    replayed = document(run(*search_line(out, tmp_path / "replayed"), "--json"))
    original = document(run("show", "--store", tuned, "--json"))
    assert [cell["tokens"] for cell in replayed["cells"]] == [cell["tokens"] for cell in original["cells"]]


def test_record_sweeps_everything_there_is(run: Callable[..., Any], recording_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "swept.fitrec"
    line = ("record", "--model", "deepseek-v3", "--ep", "8", "--tokens", "16", "--store", tmp_path / "sweep")
    told = document(run(*line, "--out", out, "--measurer", f"recording:{recording_file}", "--json"))
    stages = [record for record in load_recording(recording_file).records if record.key.num_tokens == 16]
    swept = [record for record in load_recording(out).records if record.part != "layer"]
    assert len(swept) == told["tried"] == sum(record.key.layer.local_experts == 32 for record in stages)


def test_merge_is_a_union_and_prune_keeps_what_is_in_use(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tuned: Path, tmp_path: Path
) -> None:
    part = tmp_path / "part"
    line = search_line(recording_file, part)
    assert run(*line[:3], "--ep", "8", "--tokens", "16", *line[7:]).code == 0
    merged = tmp_path / "merged"
    first = document(run("cache", "merge", part, tuned, "--store", merged, "--json"))["merged"]
    assert first[0]["records"] == len(open_store(part).records())
    again = document(run("cache", "merge", tuned, "--store", merged, "--json"))["merged"]
    assert again[0]["records"] == again[0]["decisions"] == 0
    before = open_store(merged).decisions()
    assert run(*search_line(recording_file, merged), "--force").code == 0
    dry = run("cache", "prune", "--store", merged, "--dry-run")
    assert dry.out.startswith("would drop")
    pruned = document(run("cache", "prune", "--store", merged, "--json"))
    assert pruned["decisions_dropped"] > 0
    assert open_store(merged).decisions().keys() == before.keys()
    assert run("show", "--store", merged).code == 0


def test_cache_dir_and_list(run: Callable[..., Any], tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITUNE_HOME", "/some/where")
    assert run("cache", "dir").out == "/some/where\n"
    assert document(run("cache", "dir", "--json")) == {"store": "/some/where", "exists": False}
    rows = document(run("cache", "list", "--store", tuned, "--json"))["layers"]
    assert [(row["layer"]["local_experts"], row["cells"]) for row in rows] == [(256, 2), (32, 2)]
    assert "EP 8" in run("cache", "list", "--store", tuned).out


def test_the_default_store_is_found(run: Callable[..., Any], tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITUNE_HOME", str(tuned))
    assert run("show").out == run("show", "--store", tuned).out


def test_env_tells_versions_and_store(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITUNE_HOME", "/some/where")
    facts = document(run("env", "--json"))
    assert facts["store"] == "/some/where"
    assert facts["packages"]["msgpack"]
    assert re.fullmatch("[0-9a-f]{16}", facts["kernels"])
    assert facts["kernels"] in run("env").out


def test_colour_only_where_it_is_wanted(tuned: Path) -> None:
    line = [*COMMAND, "show", "--store", str(tuned)]
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    piped = subprocess.run(line, capture_output=True, text=True, check=True, env=plain).stdout
    assert ANSI not in piped
    forced = {**plain, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert ANSI in subprocess.run(line, capture_output=True, text=True, check=True, env=forced).stdout
    refused = subprocess.run(line, capture_output=True, text=True, check=True, env={**forced, "NO_COLOR": "1"}).stdout
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", refused)


def test_a_broken_pipe_is_quiet(tuned: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    line = [*COMMAND, "show", "--store", str(tuned), "--json"]
    result = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert result.stderr == ""
    assert result.returncode == 141


def test_an_ascii_terminal_is_no_trouble(tuned: Path) -> None:
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    line = [*COMMAND, "show", "--store", str(tuned)]
    result = subprocess.run(line, capture_output=True, text=True, check=False, env=plain)
    assert result.returncode == 0, result.stderr
    assert "512" in result.stdout


def test_a_terminal_sees_a_bar_with_best_so_far_and_time_left(
    search_line: Callable[..., Any], recording_file: Path, tmp_path: Path
) -> None:
    main_end, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    line = [*COMMAND, *map(str, search_line(recording_file, tmp_path / "store"))]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=other_end, env=environment)
    os.close(other_end)
    seen = bytearray()
    with contextlib.suppress(OSError):  # the other end is closed when the child ends
        while chunk := os.read(main_end, 65536):
            seen += chunk
    os.close(main_end)
    out, _ = child.communicate(timeout=60)
    talk = seen.decode()
    assert child.returncode == 0, talk
    assert "/4 cells" in talk
    assert re.search(r"\d+:\d\d left", talk)
    assert re.search(r"tokens EP [18]: best gemm1 [0-9.]+", talk)
    assert "[4/4]" not in talk
    assert ANSI.encode() not in out


def test_diff_is_readable_on_80_columns(run: Callable[..., Any], tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = run("diff", "--store", tuned, "--ep", "1,8")
    assert all(len(line) <= 80 for line in result.out.splitlines() if not line.startswith("EP 1 and EP 8"))
    cells = document(run("show", "--store", tuned, "--json"))["cells"]
    for cell in cells:
        first = parse_tactic(cell["tactic"]).gemm1
        assert f" {first.block_n}x{first.block_k}/g{first.group_m}" in result.out


def test_space_compiles_ahead_of_time(run: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    line = (
        "space",
        "--shape",
        "H=256,I=128,E=8,K=2",
        "--tokens",
        "64",
        "--stage",
        "gemm2",
        "--compile",
        "--limit",
        "1",
    )
    compiled = document(run(*line, "--json"))["spaces"][0]["compiled"]
    assert len(compiled) == 1
    assert compiled[0]["status"] == "ok", compiled[0]["error"]
    assert 0 < compiled[0]["shared_bytes"] < KNOWN_TARGETS["sm_90"].shared_bytes
    assert 16 < compiled[0]["registers"] <= 255


def test_record_of_other_kernels_is_packed_and_told(
    run: Callable[..., Any], tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fitune.target.kernel_source_hash", lambda: "fedcba9876543210")
    result = run("record", "--from-store", tuned, "--out", tmp_path / "x.fitrec")
    assert result.code == 0
    assert "this fitune has fedcba9876543210" in result.err
    assert load_recording(tmp_path / "x.fitrec").records


def test_record_of_nothing(run: Callable[..., Any], tmp_path: Path) -> None:
    Store.open(tmp_path / "empty", create=True)
    result = run("record", "--from-store", tmp_path / "empty", "--out", tmp_path / "x.fitrec")
    assert result.code == 2
    assert "holds no measurements" in result.err
