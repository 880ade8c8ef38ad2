"""`fitune grid`, and `--tokens auto:B` of a search."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fitune.bucket import buckets
from fitune.cli.grid import Auto, choose_problems, read_auto, read_range
from fitune.errors import InputError
from fitune.models import preset
from fitune.problem import Problem
from fitune.target import KNOWN_TARGETS

LAYER = ("--model", "deepseek-v3", "--ep", "8")


def test_help_has_examples(run: Callable[..., Any]) -> None:
    result = run("grid", "--help")
    assert result.code == 0
    assert "  fitune grid --model" in result.out


def test_a_row_for_each_point(run: Callable[..., Any]) -> None:
    result = run("grid", *LAYER, "--buckets", "9")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("deepseek-v3 EP 8, 1..16384 tokens")
    assert lines[1].startswith("measured: recording 'deepseek-v3-bf16-h200'")
    rows = [line.split() for line in lines[3:12]]
    points = [int(row[0]) for row in rows]
    assert [row[1] for row in rows] == [f"{bucket.low}..{bucket.high}" for bucket in buckets(points)]
    assert points[0] == 1 and points[-1] == 16384
    assert lines[12].startswith("expected regret") and "measured" in lines[12] and "predicted" in lines[12]


def test_json_holds_what_the_table_says(run: Callable[..., Any], recording_file: Path) -> None:
    line = ("grid", "--model", "deepseek-v3", "--ep", "1,8", "--buckets", "3", "--range", "16-512")
    result = run(*line, "--recording", recording_file, "--json")
    assert result.code == 0, result.err
    grids = json.loads(result.out)["grids"]
    assert [grid["ep"] for grid in grids] == ["EP 1", "EP 8"]
    for grid in grids:
        assert grid.keys() == {
            "layer", "ep", "range", "recording", "kernels", "points", "buckets", "expected", "measured", "predicted",
            "unserved",
        }  # fmt: skip
        assert (grid["range"], grid["recording"]) == ([16, 512], "invented")
        assert [bucket["point"] for bucket in grid["buckets"]] == grid["points"]
        assert all(
            bucket.keys() == {"point", "low", "high", "share", "mean", "worst", "counts", "measured"}
            for bucket in grid["buckets"]
        )
        assert grid["expected"]["share"] == pytest.approx(1.0)
        assert grid["measured"]["counts"] + grid["predicted"]["counts"] == grid["expected"]["counts"]
    assert run(*line, "--recording", recording_file, "--json").out == result.out


def test_a_layer_that_was_not_recorded_is_predicted(run: Callable[..., Any]) -> None:
    line = ("grid", "--shape", "H=512,I=256,E=8,K=2", "--buckets", "2", "--range", "48-96", "--target", "sm_89")
    result = run(*line)
    assert result.code == 0, result.err
    assert result.out.splitlines()[1] == "not recorded: all is predicted"
    assert "0 of" in result.out and "1 of" not in result.out
    assert "(predicted" in result.out.splitlines()[-1]


def test_too_few_points_for_a_range_are_said(run: Callable[..., Any]) -> None:
    result = run("grid", *LAYER, "--buckets", "2", "--range", "16-4096")
    assert result.code == 0, result.err
    assert "no point serves" in result.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--buckets", "0"), ("0 buckets", "1 or more")),
        (("--buckets", "x"), ("'x'",)),
        (("--buckets", "4", "--range", "16-24"), ("4 buckets are more than the 2", "16, 24", "at most 2")),
        (("--range", "64"), ("--range", "'64'", "LOW-HIGH")),
        (("--range", "0-64"), ("'0-64'", "from 1")),
        (("--range", "64-1"), ("backwards", "1-64")),
        (("--target", "sm_12"), ("'sm_12'",)),
        (("--recording", "none.fitrec"), ("none.fitrec",)),
    ],
)
def test_mistakes(run: Callable[..., Any], options: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = run("grid", *LAYER, *options)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert all(word in result.err for word in words), result.err


def test_reading_auto() -> None:
    assert read_auto(None) is read_auto("1,2") is read_auto("1:64") is None
    found = read_auto("auto:12")
    assert found is not None and (found.num_buckets, found.low, found.high) == (12, 1, 16384)
    found = read_auto("auto:3:4-12")
    assert found is not None and (found.num_buckets, found.candidates) == (3, "4,6,8,12")
    assert read_range("7-7", "--range") == (7, 7)
    for text in ("auto", "auto:", "auto:0", "auto:x", "auto:3:", "auto:3:9", "auto:3:9-2", "auto:3:0-9"):
        with pytest.raises(InputError, match="--tokens"):
            read_auto(text)


@pytest.mark.usefixtures("no_gpu")
def test_search_takes_the_points_that_are_recorded(run: Callable[..., Any], tmp_path: Path) -> None:
    line = ("search", "--model", "deepseek-v3", "--ep", "8,16", "--tokens", "auto:3:1-16", "--trials", "4")
    result = run(*line, "--store", tmp_path / "store", "--json")
    assert result.code == 0, result.err
    said = next(text for text in result.err.splitlines() if text.startswith("tokens "))
    points = [int(point) for point in said.split()[1].rstrip(":").split(",")]
    assert len(points) == 3 and set(points) <= {1, 2, 4, 8, 16}
    assert "expected regret" in said and "measured" in said and "predicted" in said
    cells = json.loads(result.out)["cells"]
    assert sorted((cell["ep"], cell["tokens"]) for cell in cells) == sorted(
        (ep, point) for ep in ("EP 8", "EP 16") for point in points
    )
    again = run(*line, "--store", tmp_path / "store", "--json")
    assert said in again.err.splitlines()
    assert json.loads(again.out)["kept"] == 6


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA Other"])
def test_on_a_gpu_any_point_may_be_chosen(capsys: pytest.CaptureFixture[str], device: str) -> None:
    """The shipped recording is evidence there if it is of that device."""
    target = replace(KNOWN_TARGETS["sm_90"], device=device)
    shape = preset("deepseek-v3").shape
    auto = Auto(3, 16, 64)
    probes = [Problem(shape, count, int(point)) for count in (32, 16) for point in auto.candidates.split(",")]
    chosen = choose_problems(auto, probes, SimpleNamespace(target=target))  # type: ignore[arg-type]
    assert [problem.local_experts for problem in chosen] == [32, 32, 32, 16, 16, 16]
    points = [problem.num_tokens for problem in chosen[:3]]
    assert points == [problem.num_tokens for problem in chosen[3:]]
    said = capsys.readouterr().err
    assert said.startswith(f"tokens {','.join(map(str, points))}: expected regret")
    assert ("measured" in said) == (device == "NVIDIA H200")


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ("auto:0", ("auto:0", "1 or more")),
        ("auto:3:16-600", ("3 buckets are more than the 2", "16, 512")),
        ("auto:1:600-700", ("more than the 0 token counts from 600 to 700", "16, 512")),
    ],
)
def test_search_cannot_choose_what_there_is_not(
    run: Callable[..., Any], recording_file: Path, tmp_path: Path, tokens: str, words: tuple[str, ...]
) -> None:
    line = ("search", *LAYER, "--tokens", tokens, "--store", tmp_path / "store")
    result = run(*line, "--measurer", f"recording:{recording_file}")
    assert result.code == 2
    assert all(word in result.err for word in words), result.err
