"""`fitune export t4` and `fitune import t4`, as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.cache import Store, load_recording, open_store

Run = Callable[..., Any]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(result: Any, *words: str) -> None:
    """One line on stderr that holds the words; nothing on stdout."""
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    (line,) = result.err.splitlines()
    assert line.startswith("fitune: error: ")
    for word in words:
        assert word in line


def test_a_tuned_store_goes_out_and_comes_back(run: Run, tuned: Path, tmp_path: Path) -> None:
    result = run("export", "t4", "--store", tuned, "--out", tmp_path / "a")
    assert result.code == 0, result.err
    records, decisions = open_store(tuned).records(), open_store(tuned).decisions()
    assert result.out == f"{tmp_path / 'a'}: {len(records)} records and {len(decisions)} decisions in 12 files\n"
    result = run("import", "t4", *sorted((tmp_path / "a").iterdir()), "--store", tmp_path / "back")
    assert result.code == 0, result.err
    assert f"{len(records)} records and {len(decisions)} decisions added, 0 were there already" in result.out
    back = open_store(tmp_path / "back")
    assert set(back.records()) == set(records)
    assert back.decisions() == decisions
    assert back.build_table().hash == open_store(tuned).build_table().hash
    assert back.table_path.exists()
    assert run("export", "t4", "--store", tmp_path / "back", "--out", tmp_path / "b").code == 0
    assert files(tmp_path / "b") == files(tmp_path / "a")
    shown = [run("show", "--json", "--store", store).out for store in (tuned, tmp_path / "back")]
    assert json.loads(shown[0])["cells"] == json.loads(shown[1])["cells"]


def test_a_recording(run: Run, recording_file: Path, tmp_path: Path) -> None:
    line = ("export", "t4", "--recording", recording_file, "--out", tmp_path / "a")
    result = run(*line)
    assert result.code == 0, result.err
    assert result.err == "not in T4 files: the recording's name, note and target\n"
    result = run("import", "t4", *(tmp_path / "a").iterdir(), "--store", tmp_path / "s", "--json")
    recording = load_recording(recording_file)
    assert json.loads(result.out) == {
        "store": str(tmp_path / "s"),
        "files": 8,
        "records": len(recording.records),
        "decisions": 0,
        "duplicates": 0,
    }
    assert set(open_store(tmp_path / "s").records()) == set(recording.records)
    assert any(record.error for record in open_store(tmp_path / "s").records())
    result = run("import", "t4", *(tmp_path / "a").iterdir(), "--store", tmp_path / "s")
    assert f"0 records and 0 decisions added, {len(recording.records)} were there already" in result.out


def test_files_that_are_there_stay(run: Run, recording_file: Path, tmp_path: Path) -> None:
    line = ("export", "t4", "--recording", recording_file, "--out", tmp_path / "a")
    document = json.loads(run(*line, "--json").out)
    assert len(document["files"]) == 8
    before = files(tmp_path / "a")
    (first, *others) = document["files"]
    for name in others:
        (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / first).write_bytes(b"mine")
    refused(run(*line), first, "--force")
    assert files(tmp_path / "a") == {first: b"mine"}
    assert run(*line, "--force").code == 0
    assert files(tmp_path / "a") == before
    refused(run(*line), f"{first} already and 7 more")


def test_bad_lines(run: Run, recording_file: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "a")
    refused(run("export", "t4", "--store", tmp_path / "s", "--recording", recording_file, *out), "leave one out")
    refused(run("export", "t4", "--store", tmp_path / "none", *out), "no store at")
    refused(run("export", "t4", "--recording", tmp_path / "none", *out), "no recording at")
    Store.open(tmp_path / "empty", create=True)
    refused(run("export", "t4", "--store", tmp_path / "empty", *out), "empty holds no measurements")
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").write_text("mine")
    refused(run("export", "t4", "--recording", recording_file, *out), "is a file; name a folder")
    refused(run("export", "t4", "--store", tmp_path / "s"), "--out")
    refused(run("import", "t4", "--store", tmp_path / "s"), "PATH")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("field (whole file)", "no valid JSON")),
        ("[" * 100_000, ("field (whole file)", "no valid JSON")),
        ('{"schema_version": "1.0.0", "results": [{"configuration": {"bx": 1}}]}', ("another program's", "'bx'")),
        ('{"schema_version": "1.0.0", "results": [], "metadata": {"fitune": {"format": 9}}}', ("format 9",)),
    ],
)
def test_one_bad_file_keeps_all_out(
    run: Run, recording_file: Path, tmp_path: Path, content: str, words: tuple[str, ...]
) -> None:
    assert run("export", "t4", "--recording", recording_file, "--out", tmp_path / "a").code == 0
    bad = tmp_path / "bad.json"
    bad.write_text(content)
    refused(run("import", "t4", *(tmp_path / "a").iterdir(), bad, "--store", tmp_path / "s"), "bad.json", *words)
    assert not (tmp_path / "s").exists()


def test_a_folder_stands_for_its_files(run: Run, tuned: Path, tmp_path: Path) -> None:
    assert run("export", "t4", "--store", tuned, "--out", tmp_path / "a").code == 0
    result = run("import", "t4", tmp_path / "a", "--store", tmp_path / "back", "--json")
    assert json.loads(result.out)["files"] == 12
    (tmp_path / "none").mkdir()
    refused(run("import", "t4", tmp_path / "none", "--store", tmp_path / "x"), "without a .t4.json file")


def test_an_empty_out_is_not_the_current_folder(run: Run, tuned: Path) -> None:
    result = run("export", "t4", "--store", tuned, "--out", "")
    assert result.code == 2 and "it is empty; name a path" in result.err


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("default_us", 5e-324, "default_us"),
        ("default_us", 0.0, "where the members say"),
        ("noise", 1e308, "no share of a time"),
        ("members", [], "none of the members"),
    ],
)
def test_decisions_follow_from_their_members(
    field: str, value: object, words: str, run: Run, tuned: Path, tmp_path: Path
) -> None:
    assert run("export", "t4", "--store", tuned, "--out", tmp_path / "a").code == 0
    path = next(path for path in sorted((tmp_path / "a").iterdir()) if "layer" in path.name)
    content = json.loads(path.read_text())
    content["metadata"]["fitune"]["decisions"][0][field] = value
    path.write_text(json.dumps(content))
    refused(run("import", "t4", path, "--store", tmp_path / "s"), path.name, words)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("time_us", [1e308, 1e-300])
def test_times_that_no_kernel_takes(time_us: float, run: Run, tuned: Path, tmp_path: Path) -> None:
    assert run("export", "t4", "--store", tuned, "--out", tmp_path / "a").code == 0
    path = next(path for path in sorted((tmp_path / "a").iterdir()) if "gemm1" in path.name)
    content = json.loads(path.read_text())
    result = next(item for item in content["results"] if item["measurements"])
    for item in result["measurements"]:
        if item["name"].startswith("time"):
            item["value"] = time_us
    result["times"]["runtimes"] = [time_us / 1000]
    result["objectives"] = result.get("objectives", [])
    path.write_text(json.dumps(content))
    refused(run("import", "t4", path, "--store", tmp_path / "s"), path.name)
