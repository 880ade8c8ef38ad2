"""Layers in fp8 on the command line: the short name, the space of chips with and without it, searches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitune.cache import load_recording, open_store, save_recording
from fitune.cli.inputs import read_layer
from fitune.models import preset
from fitune.problem import DTYPES, Problem
from fitune.space import candidates
from fitune.target import KNOWN_TARGETS

LAYER = ("--model", "deepseek-v3", "--ep", "16")


def test_a_short_name_means_the_published_scheme() -> None:
    shapes = {name: read_layer("deepseek-v3", None, None, name, 0).shape.dtype for name in ("fp8", *DTYPES)}
    assert shapes == {"fp8": "fp8_block128", **{name: name for name in DTYPES}}
    assert read_layer(None, None, "H=64,I=32,E=8,K=2", "fp8", 1).shape.dtype == "fp8_block128"


@pytest.mark.parametrize("command", ["search", "space", "record", "verify"])
def test_help_lists_the_schemes(run: Callable[..., Any], command: str) -> None:
    text = " ".join(run(command, "--help").out.split())
    for name in (*DTYPES, "(or fp8:"):
        assert name in text


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "gfx942"])
def test_the_space_of_a_chip_with_fp8(run: Callable[..., Any], arch: str) -> None:
    line = ("space", *LAYER, "--dtype", "fp8", "--tokens", "128", "--target", arch)
    spaces = json.loads(run(*line, "--json").out)["spaces"]
    problem = Problem(preset("deepseek-v3", "fp8_block128").shape, 16, 128)
    for item in spaces:
        members = candidates(problem, KNOWN_TARGETS[arch], item["stage"])
        assert (item["candidates"], item["legal"]) == (len(members), sum(not each.reason for each in members))
        assert item["legal"] > 0 and "dtype" not in {rule["rule"] for rule in item["rejected"]}


def test_the_space_of_a_chip_without_fp8(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("space", *LAYER, "--dtype", "fp8_tensor", "--tokens", "1,128", "--target", "sm_80")
    for item in json.loads(run(*line, "--json").out)["spaces"]:
        (rule,) = item["rejected"]
        assert item["legal"] == 0 and item["legal_per_tile_size"] == {}
        assert rule == {
            "rule": "dtype", "count": item["candidates"], "example": "dtype: sm_80 does not multiply fp8",
        }  # fmt: skip
    monkeypatch.setenv("COLUMNS", "100")
    text = run(*line).out
    assert "0 legal" in text and "legal per tile_size  none" in text
    assert text.count("dtype sm_80 does not multiply fp8") == 4


@pytest.mark.usefixtures("no_gpu")
def test_a_search_on_a_chip_without_fp8_says_so(run: Callable[..., Any], recording_file: Path, tmp_path: Path) -> None:
    played = load_recording(recording_file)
    path = tmp_path / "a100.fitrec"
    save_recording(path, replace(played, target=replace(KNOWN_TARGETS["sm_80"], device=played.target.device)))
    line = ("search", *LAYER, "--tokens", "16", "--store", tmp_path / "st", "--measurer", f"recording:{path}")
    result = run(*line, "--dtype", "fp8")
    assert result.code == 2 and result.out == ""
    wanted = "--dtype fp8_block128: NVIDIA H200 (sm_80) does not multiply fp8; use bf16 there, or a chip that does"
    assert wanted in result.err.splitlines()[-1]
    assert not (tmp_path / "st").exists()


def test_show_and_diff_take_stores_of_fp8_layers(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    """The same decisions, said to be of the fp8 layer."""
    from fitune.cache import Store

    source = open_store(tuned)
    store = tmp_path / "fp8"
    with Store.open(store, create=True).writer() as writer:
        for environment in source.environments().values():
            writer.append(environment)
        for decision in source.decisions().values():
            layer = replace(decision.key.layer, dtype="fp8_block128")
            writer.append(replace(decision, key=replace(decision.key, layer=layer)))
    shown = run("show", "--store", store)
    assert shown.code == 0 and "top-8, fp8_block128, random" in shown.out
    assert {cell["layer"]["dtype"] for cell in json.loads(run("show", "--store", store, "--json").out)["cells"]} == {
        "fp8_block128"
    }
    assert run("diff", "--store", store, "--ep", "1,8").code == 0
    assert json.loads(run("diff", tuned, store, "--json").out)["diffs"]
