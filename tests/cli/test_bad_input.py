"""Whatever a user gets wrong ends in one line that names it, exit code 2 or 3, no traceback, and nothing lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.cache import open_store, save_recording
from fitune.cache.checks import pack
from fitune.cache.frames import FORMAT, Kind, frame
from fitune.cli.inputs import ep_labels
from fitune.errors import StoreError
from fitune.models import preset
from fitune.problem import Problem, key_of

COMMAND = [sys.executable, "-c", "import sys; from fitune.cli import main; sys.exit(main())"]
LAYER = ("--model", "qwen3-30b-a3b")


def failed(result: Any, code: int, *words: str) -> None:
    """One line on stderr that holds the words; nothing on stdout."""
    assert result.code == code, result
    assert result.out == ""
    lines = result.err.splitlines()
    assert lines[-1].startswith("fitune: error: "), result.err
    assert "Traceback" not in result.err
    for word in words:
        assert word in lines[-1]


@pytest.mark.parametrize("command", ["search", "space", "record", "verify"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "deepsek-v3"), ("'deepsek-v3'", "deepseek-v3")),
        (("--model", "no such"), ("'no such'", "--shape")),
        (("--shape", "H=0,I=64,E=8,K=2"), ("hidden_size is 0", "1 or more")),
        (("--shape", "H=-64,I=64,E=8,K=2"), ("-64",)),
        (("--shape", "H=64,I=64,E=8,K=9"), ("top_k 9", "num_experts 8")),
        (("--shape", "H=64,I=64,E=8"), ("K is missing",)),
        (("--shape", "64x64"), ("64x64", "H=7168")),
        ((*LAYER, "--dtype", "int4"), ("--dtype 'int4'", "bf16", "fp8 is short for fp8_block128")),
        ((*LAYER, "--ep", "129"), ("129", "128 experts")),
        ((*LAYER, "--ep", "0"), ("--ep", "'0'")),
        ((*LAYER, "--ep", "8,-1"), ("--ep", "'-1'")),
        ((*LAYER, "--ep", "many"), ("--ep", "'many'")),
        ((*LAYER, "--local-experts", "129"), ("--local-experts 129", "128 experts")),
        ((*LAYER, "--ep", "1", "--local-experts", "8"), ("--ep 1", "--local-experts 8")),
        ((*LAYER, "--tokens", "0"), ("--tokens", "'0'")),
        ((*LAYER, "--tokens", "64:16"), ("64:16", "backwards")),
        ((*LAYER, "--tokens", "1,,2"), ("--tokens", "''")),
        ((*LAYER, "--tokens", "1e3"), ("--tokens", "'1e3'")),
        ((*LAYER, "--tokens", "99999999999"), ("--tokens", "99999999999")),
        ((*LAYER, "--dispatch", "pigeon"), ("'pigeon'", "all_gather")),
        ((*LAYER, "--shape", "H=64,I=64,E=8,K=2"), ("--model and --shape",)),
        ((), ("no layer is given", "--model")),
    ],
)
def test_impossible_layers(
    run: Callable[..., Any], tmp_path: Path, command: str, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    if command == "verify" and not arguments:
        pytest.skip("verify without a layer reads a store")
    out = ("--out", tmp_path / "x.fitrec") if command == "record" else ()
    failed(run(command, *arguments, *out), 2, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("config.json",)),
        ("[]", ("config.json",)),
        ('{"hidden_size": 64}', ("config.json",)),
        ('{"hidden_size": "big", "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}', ("'big'",)),
        ('{"hidden_size": 0, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}', ("0",)),
        ('{"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 9}', ("9", "8")),
    ],
)
def test_malformed_model_config(run: Callable[..., Any], tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    failed(run("space", "--model-config", path), 2, *words)


def test_missing_model_config(run: Callable[..., Any], tmp_path: Path) -> None:
    failed(run("space", "--model-config", tmp_path / "none.json"), 2, "none.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--budget", "soon"), ("--budget 'soon'", "10m")),
        (("--budget", "0"), ("--budget '0'", "above zero")),
        (("--trials", "0"), ("--trials", "'0'", "1 or more")),
        (("--trials", "few"), ("--trials", "'few'", "search --help")),
        (("--seed", "-1"), ("--seed", "'-1'")),
        (("--redundant", "x"), ("--redundant", "'x'")),
        (("--sampler", "oracle"), ("'oracle'", "tpe")),
        (("--measurer", "stopwatch"), ("'stopwatch'", "recording")),
        (("--routing", "chaos"), ("'chaos'", "zipf")),
        (("--routing", "zipf:-1"), ("zipf",)),
        (("--routing", "file:/no/such/file"), ("/no/such/file",)),
        (("--no-such-option",), ("--no-such-option", "search --help")),
    ],
)
def test_bad_search_options(
    run: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    store = tmp_path / "store"
    failed(run("search", *LAYER, "--store", store, *arguments), 2, *words)
    assert not store.exists()


def test_bad_targets_and_stages(run: Callable[..., Any]) -> None:
    failed(run("space", *LAYER, "--target", "sm_12"), 2, "'sm_12'", "sm_90")
    failed(run("space", *LAYER, "--stage", "gemm3"), 2, "'gemm3'", "gemm2")
    failed(run("diff", "--align", "colour", "--ep", "1,8"), 2, "'colour'", "rows")


def newer(role: str) -> bytes:
    body = {"role": role, "format": FORMAT + 1, "fitune": "9.1", "needs": "9.0"}
    return frame(Kind.HEADER, pack(body))


READERS = [
    ("show", "--store"), ("diff", "--ep", "1,8", "--store"), ("cache", "list", "--store"),
    ("cache", "check", "--store"), ("cache", "prune", "--store"), ("verify", "--store"),
    ("record", "--out", "x.fitrec", "--from-store"), ("cache", "merge"),
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: "-".join(reader[:2]))
def test_stores_that_cannot_be_read(
    run: Callable[..., Any], tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    failed(run(*reader, tmp_path / "nowhere"), 2, "nowhere", "no store")
    file = tmp_path / "file"
    file.write_text("not a store")
    failed(run(*reader, file), 2, "is a file")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("mine")
    failed(run(*reader, foreign), 2, "foreign", "not a fitune store")
    assert (foreign / "thesis.tex").read_text() == "mine"
    later = tmp_path / "later"
    shutil.copytree(tuned, later)
    (later / "segments" / "9.seg").write_bytes(newer("segment"))
    failed(run(*reader, later), 2, "9.seg", "install fitune 9.0 or newer")


def test_damage_is_named_found_and_survived(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tuned, broken)
    segment = next((broken / "segments").iterdir())
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    failed(run("show", "--store", broken), 2, segment.name, "at byte", "prune")
    found = run("cache", "check", "--store", broken)
    assert found.code == 1
    assert segment.name in found.out
    assert json.loads(run("cache", "check", "--store", broken, "--json").out)["findings"]
    mended = run("cache", "prune", "--store", broken)
    assert mended.code == 0
    assert "set aside" in mended.out
    assert run("show", "--store", broken).code == 0
    assert run("cache", "check", "--store", broken).code == 0


def test_a_torn_tail_costs_the_frame_being_written_only(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(tuned, torn)
    segment = next((torn / "segments").iterdir())
    os.truncate(segment, segment.stat().st_size - 7)
    shown = run("show", "--store", torn, "--json")
    assert shown.code == 0
    assert len(json.loads(shown.out)["cells"]) == len(open_store(tuned).decisions()) - 1
    checked = run("cache", "check", "--store", torn)
    assert checked.code == 0
    assert "harmless" in checked.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_store_without_permission(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    shutil.copytree(tuned, closed)
    closed.chmod(0)
    try:
        failed(run("show", "--store", closed), 2, "closed")
    finally:
        closed.chmod(0o700)


def test_cells_that_are_not_there(run: Callable[..., Any], tuned: Path) -> None:
    failed(run("show", "--store", tuned, "--ep", "4"), 2, "--ep 4", "EP 1, EP 8")
    failed(run("show", "--store", tuned, "--tokens", "7"), 2, "--tokens 7", "16,512")
    failed(run("diff", "--store", tuned, "--ep", "1,4"), 2, "--ep 4", "EP 1, EP 8")
    failed(run("diff", "--store", tuned, "--ep", "8"), 2, "--ep 8", "two or more")
    failed(run("diff", tuned), 2, "name two")
    failed(run("diff", tuned, tuned, tuned), 2, "3 stores")


def recordings_gone_wrong(good: Path, folder: Path) -> dict[str, bytes | None]:
    data = good.read_bytes()
    return {
        "missing": None,
        "foreign": b"PNG, really",
        "empty": b"",
        "truncated": data[: len(data) // 2],
        "flipped": data[:200] + bytes([data[200] ^ 0xFF]) + data[201:],
        "newer": newer("recording"),
    }


@pytest.mark.parametrize("kind", ["missing", "foreign", "empty", "truncated", "flipped", "newer"])
def test_recordings_that_cannot_be_played(
    run: Callable[..., Any], recording_file: Path, tmp_path: Path, kind: str
) -> None:
    path, store = tmp_path / f"{kind}.fitrec", tmp_path / "store"
    data = recordings_gone_wrong(recording_file, tmp_path)[kind]
    if data is not None:
        path.write_bytes(data)
    failed(run("search", *LAYER, "--store", store, "--measurer", f"recording:{path}"), 2, path.name)
    assert not store.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "qwen3-30b-a3b", "--ep", "1", "--tokens", "16"), ("hidden_size 2048", "7168")),
        (("--model", "deepseek-v3", "--ep", "2", "--tokens", "16"), ("local_experts 128", "32, 256")),
        (("--model", "deepseek-v3", "--ep", "1", "--tokens", "16,17"), ("num_tokens 17", "16, 512")),
        (("--model", "deepseek-v3", "--dtype", "fp16", "--tokens", "16"), ("dtype 'fp16'", "bf16")),
        (("--model", "deepseek-v3", "--dtype", "fp8", "--tokens", "16"), ("dtype 'fp8_block128'", "bf16")),
        (("--model", "deepseek-v3", "--routing", "balanced", "--tokens", "16"), ("routing 'balanced'", "random")),
    ],
)
def test_a_recording_of_something_else(
    run: Callable[..., Any], recording_file: Path, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = run("search", *arguments, "--store", tmp_path / "store", "--measurer", f"recording:{recording_file}")
    failed(result, 2, "'invented'", *words)


def test_a_recording_of_another_device_says_what_it_is_true_for(
    run: Callable[..., Any], search_line: Callable[..., Any], tmp_path: Path, other_device: Any
) -> None:
    path = tmp_path / "other.fitrec"
    save_recording(path, other_device)
    result = run(*search_line(path, tmp_path / "store"))
    assert result.code == 0
    assert "true for NVIDIA Other" in result.err
    assert "NVIDIA Other" in result.out
    assert "H200" not in result.out


def test_no_gpu_when_one_is_asked_for(run: Callable[..., Any], tuned: Path, tmp_path: Path, no_gpu: None) -> None:
    store = tmp_path / "store"
    failed(run("search", *LAYER, "--measurer", "gpu", "--store", store), 3, "no usable GPU", "--measurer recording")
    failed(run("verify", "--store", tuned), 3, "no usable GPU")
    failed(run("verify", *LAYER, "--tokens", "1"), 3, "no usable GPU")
    failed(run("record", *LAYER, "--tokens", "1", "--out", tmp_path / "x.fitrec", "--store", store), 3, "no usable GPU")
    assert not store.exists()


def test_record_checks_where_it_will_write_first(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    failed(run("record", "--from-store", tuned, "--out", tmp_path), 2, "is a folder")
    failed(run("record", "--from-store", tuned, "--out", tmp_path / "no" / "x"), 2, "there is no folder")
    failed(run("record", "--from-store", tuned, *LAYER, "--out", tmp_path / "x"), 2, "--from-store")
    failed(run("record", *LAYER), 2, "--out", "record --help")


def test_disk_full_on_stdout(tuned: Path) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "show", "--store", str(tuned)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("fitune: error: No space left on device")


def test_disk_full_in_the_store_loses_nothing(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tmp_path: Path
) -> None:
    """The file size limit stands in for a full disk: the store cannot grow beyond some records."""
    store = tmp_path / "store"
    line = [*COMMAND, *map(str, search_line(recording_file, store))]
    limit = 12_000

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = subprocess.run(line, capture_output=True, text=True, check=False, preexec_fn=small_disk)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("fitune: error: ")
    kept = open_store(store).records()
    assert kept
    again = run(*search_line(recording_file, store), "--json")
    assert again.code == 0
    assert json.loads(again.out)["reused"] == len([record for record in kept if record.part != "layer"])


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("optuna", "search", ("search", "--model", "deepseek-v3", "--measurer", "recording")),
        ("rich", "cli", ("cache", "list")),
        ("typer", "cli", ("env",)),
    ],
)
def test_missing_packages_name_the_extra(tuned: Path, package: str, extra: str, command: tuple[str, ...]) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from fitune.cli import main; sys.exit(main())"
    arguments = [*command, *(("--store", str(tuned)) if command[0] != "env" else ())]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("fitune: error: ")
    assert f"pip install 'fitune[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["--ep", "--local-experts", "--tokens", "--budget"])
def test_an_empty_value_is_not_the_same_as_none(run: Callable[..., Any], tmp_path: Path, option: str) -> None:
    """`--ep "$EP"` with EP unset must not quietly tune EP 1."""
    failed(run("search", *LAYER, option, "", "--store", tmp_path / "store"), 2, f"{option} ''")


def test_named_pipes_are_refused_and_not_waited_for(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    failed(run("space", "--model-config", pipe, "--target", "sm_90"), 2, "no regular file")
    failed(run("search", *LAYER, "--routing", f"file:{pipe}"), 2, "no regular file")
    store = tmp_path / "store"
    shutil.copytree(tuned, store)
    os.mkfifo(store / "segments" / "9.seg")
    failed(run("show", "--store", store), 2, "9.seg", "not a file")


def test_a_histogram_is_checked_before_anything_is_measured(run: Callable[..., Any], tmp_path: Path) -> None:
    short, hot = tmp_path / "short.json", tmp_path / "hot.json"
    short.write_text(json.dumps([1.0] * 127))
    hot.write_text(json.dumps([1.0] * 3 + [0.0] * 125))
    failed(run("search", *LAYER, "--routing", f"file:{short}"), 2, "127 numbers for 128 experts")
    failed(run("search", *LAYER, "--routing", f"file:{hot}"), 2, "recorded with another top_k")
    failed(run("search", *LAYER, "--routing", "file:"), 2, "names no file")
    nested, tiny = tmp_path / "nested.json", tmp_path / "tiny.json"
    nested.write_text(json.dumps([[1.0] * 128]))
    tiny.write_text(json.dumps([5e-324] * 128))
    result = run("search", *LAYER, "--routing", f"file:{nested}")
    failed(result, 2, "expert 0 has [1.0")
    assert len(result.err) < 400
    failed(run("search", *LAYER, "--routing", f"file:{tiny}", "--measurer", "recording"), 2, "has no hidden_size")


def test_verify_reads_a_histogram_for_a_store(
    run: Callable[..., Any], tuned: Path, tmp_path: Path, no_gpu: None
) -> None:
    whole, short = tmp_path / "whole.json", tmp_path / "short.json"
    whole.write_text(json.dumps([1.0] * 256))
    short.write_text(json.dumps([1.0] * 255))
    failed(run("verify", "--store", tuned, "--routing", f"file:{tmp_path / 'none'}"), 2, "cannot be read")
    failed(run("verify", "--store", tuned, "--routing", f"file:{short}"), 2, "255 numbers")
    failed(run("verify", "--store", tuned, "--routing", f"file:{whole}"), 3, "no usable GPU")


@pytest.mark.parametrize("bound", ["x", "-1", "nan", "inf"])
def test_a_bound_that_bounds_nothing(run: Callable[..., Any], tuned: Path, bound: str) -> None:
    failed(run("verify", "--store", tuned, "--bound", bound), 2, f"'{bound}'", "0 or more")


def test_a_recording_that_lacks_the_layer_is_not_announced(run: Callable[..., Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    line = ("search", *LAYER, "--tokens", "7", "--store", store, "--measurer", "recording")
    result = run(*line)
    failed(result, 2, "hidden_size 2048")
    assert len(result.err.splitlines()) == 1
    assert not store.exists()


def test_a_recording_is_named_before_the_sweep(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    for name in ("", "two\nlines", "n" * 300):
        failed(run("record", "--from-store", tuned, "--out", tmp_path / "x.fitrec", "--name", name), 2, "--name")
    assert not (tmp_path / "x.fitrec").exists()


def test_too_many_redundant_experts(run: Callable[..., Any]) -> None:
    failed(run("space", *LAYER, "--target", "sm_90", "--redundant", "999999999999"), 2, "999999999999", "at most")


def test_a_value_of_thousands_of_letters_does_not_flood_the_terminal(run: Callable[..., Any]) -> None:
    result = run("space", "--model", "x" * 5000, "--target", "sm_90")
    failed(result, 2, "is not known")
    assert len(result.err) < 1500


def test_ep_sizes_are_listed_in_their_order(run: Callable[..., Any], tuned: Path) -> None:
    shape = preset("deepseek-v3").shape
    layers = [key_of(Problem(shape, count, 1), "chip").layer for count in (16, 256, 32, 37)]
    assert ep_labels(layers) == "EP 1, L=37, EP 8, EP 16"
    failed(run("diff", tuned), 2, "1 store is given")


def test_a_store_without_its_segments_folder_is_mended(
    run: Callable[..., Any], search_line: Callable[..., Any], tuned: Path, recording_file: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(tuned, store)
    shutil.rmtree(store / "segments")
    assert run(*search_line(recording_file, store)).code == 0
    assert len(open_store(store).decisions()) == len(open_store(tuned).decisions())


def test_prune_writes_a_broken_table_anew(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(tuned, store)
    (store / "table.fitable").write_bytes(b"hello")
    assert run("cache", "check", "--store", store).code == 1
    assert run("cache", "prune", "--store", store).code == 0
    assert run("cache", "check", "--store", store).code == 0


def test_a_closed_stdout_is_no_traceback(tuned: Path) -> None:
    line = " ".join([f"'{sys.executable}' -c 'import sys; from fitune.cli import main; sys.exit(main())'", "show"])
    for ending in ("--json >&-", "--json 2>&- >&-", ">&-"):
        result = subprocess.run(
            f"{line} --store '{tuned}' {ending}", shell=True, capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")


def test_a_terminal_of_one_column_gets_lines(tuned: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "show", "--store", str(tuned)],
        env={**os.environ, "COLUMNS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(result.stdout.splitlines()) < 20


def test_the_first_failure_is_the_one_that_is_told(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Where the store cannot be written, the table cannot either; the user reads of the records."""

    def refuse(*_: object, **__: object) -> None:
        raise StoreError("records cannot be written")

    def refuse_table(*_: object) -> None:
        raise StoreError("the table cannot be written")

    monkeypatch.setattr("fitune.search.run_search", refuse)
    monkeypatch.setattr("fitune.cache.Store.write_table", refuse_table)
    failed(run(*search_line(recording_file, tmp_path / "store")), 2, "records cannot be written")
