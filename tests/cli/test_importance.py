"""`fitune importance` as a user runs it: the table, JSON, charts, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fitune.cache import Store

AXIS_ROW = re.compile(r"^  (\w+) +(\d+)% +(\d+)-(\d+)  ?\+? +(\S.*)$", re.MULTILINE)


def test_a_line_per_gemm_its_axes_and_one_reading(run: Callable[..., Any], tuned: Path) -> None:
    result = run("importance", "--store", tuned, "--ep", 8)
    assert result.code == 0, result.err
    headings = re.findall(r"^(\d+) tokens EP 8 (gemm\d): (\d+) stages", result.out, re.MULTILINE)
    assert [heading[:2] for heading in headings] == [(n, part) for n in ("16", "512") for part in ("gemm1", "gemm2")]
    rows = AXIS_ROW.findall(result.out)
    assert rows
    for _, share, low, high, values in rows:
        assert 5 <= int(share) <= 100
        assert int(low) <= int(share) <= int(high)
        assert values.split(", ")[0].removesuffix("?").endswith(" best")
    assert len(re.findall(r"axes matter:|no axis surely matters", result.out)) == 1
    every = run("importance", "--store", tuned, "--ep", 8, "--tokens", 16, "--all").out
    shown = result.out[: result.out.index("\n512 tokens")]
    assert len(AXIS_ROW.findall(every)) > len(AXIS_ROW.findall(shown))


def test_lines_fit_a_narrow_terminal(run: Callable[..., Any], tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("importance", "--store", tuned, "--ep", 1, "--tokens", 16).out.splitlines()
    assert all(len(line) <= 80 for line in lines if line.startswith("  "))


def test_json_holds_every_gemm_and_a_reading_per_layer(run: Callable[..., Any], tuned: Path) -> None:
    result = run("importance", "--store", tuned, "--tokens", 512, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [(item["ep"], item["tokens"], item["gemm"]) for item in found["gemms"]] == [
        (ep, 512, part) for ep in ("EP 1", "EP 8") for part in ("gemm1", "gemm2")
    ]
    for item in found["gemms"]:
        assert item["best_us"] <= item["median_us"] <= item["worst_us"]
        assert sum(axis["importance"] for axis in item["axes"]) == pytest.approx(1.0)
        assert item["reason"] == ""
        for axis in item["axes"]:
            assert min(value["ratio"] for value in axis["values"]) == 1.0
            assert all(value["few_stages"] == (value["stages"] < 5) for value in axis["values"])
    assert len(found["readings"]) == 1


def test_few_stages_are_told_and_get_no_number(
    run: Callable[..., Any], search_line: Callable[..., Any], recording_file: Path, tmp_path: Path
) -> None:
    assert run(*search_line(recording_file, tmp_path / "s"), "--trials", 8).code == 0
    result = run("importance", "--store", tmp_path / "s")
    assert result.code == 0, result.err
    assert "importances need 12" in result.out
    assert not AXIS_ROW.findall(result.out)
    assert re.search(r"^  block_n +- +- ", result.out, re.MULTILINE)
    assert "no GEMM has the 12 different times" in result.out


def test_an_empty_store_and_cells_that_are_not_there(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    Store.open(tmp_path / "empty", create=True)
    empty = run("importance", "--store", tmp_path / "empty")
    assert (empty.code, empty.out) == (0, "")
    assert "no stages" in empty.err
    for option, value in (("--ep", 16), ("--tokens", 3)):
        missing = run("importance", "--store", tuned, option, value)
        assert missing.code == 2
        assert missing.err.startswith(f"fitune: error: {option} {value}: the store has no such cells")
    assert run("importance", "--store", tmp_path / "nowhere").code == 2


def test_help_has_examples(run: Callable[..., Any]) -> None:
    assert "  fitune importance --store" in run("importance", "--help").out


def test_charts_need_plotly_and_say_what_to_install(
    run: Callable[..., Any], tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = run("importance", "--store", tuned, "--html", tmp_path / "charts")
    assert result.code == 2
    assert "pip install 'fitune[html]'" in result.err
    assert not (tmp_path / "charts").exists()


def test_charts_are_pages_that_need_no_network(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    folder = tmp_path / "charts"
    result = run("importance", "--store", tuned, "--ep", 8, "--tokens", 16, "--html", folder)
    assert result.code == 0, result.err
    names = sorted(path.name for path in folder.iterdir())
    pages = [f"deepseek-v3-bf16-EP-8-16-{part}.html" for part in ("gemm1", "gemm2")]
    assert names == [*pages, "index.html", "plotly.min.js"]
    index = (folder / "index.html").read_text(encoding="utf-8")
    for name in pages:
        page = (folder / name).read_text(encoding="utf-8")
        assert f'href="{name}"' in index
        assert page.count("Plotly.newPlot(") == 4
        assert re.findall(r'<script[^>]* src="([^"]*)"', page) == ["plotly.min.js"]
        assert not re.search(r'(?:src|href)="https?:', page)


def test_charts_are_not_written_over_a_file(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    (tmp_path / "charts").write_text("mine")
    result = run("importance", "--store", tuned, "--html", tmp_path / "charts")
    assert result.code == 2
    assert "is a file; name a folder" in result.err
    assert (tmp_path / "charts").read_text() == "mine"
