"""`fitune verify` end to end: the measuring child runs the kernels in Triton's interpreter instead of on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

LAYER = ("verify", "--shape", "H=64,I=32,E=8,K=2", "--dtype", "fp16", "--ep", "2", "--tokens", "1,5")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fitune.measure.choose import Choice
    from fitune.measure.gpu import GpuMeasurer

    def choose(text: str, problems: Any, *, compile_workers: int | None = None, **options: Any) -> Choice:
        assert text == "gpu"
        return Choice(GpuMeasurer(problems=problems, device="cpu", **options), "")

    monkeypatch.setattr("fitune.measure.choose.choose_measurer", choose)
    monkeypatch.setattr("fitune.measure.choose.why_no_gpu", lambda: "")


def test_right_tactics_are_told_with_their_errors(run: Callable[..., Any]) -> None:
    result = run(*LAYER, "--seed", "3", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["seed"], found["right"]) == (3, 2)
    assert [cell["tokens"] for cell in found["cells"]] == [1, 5]
    for cell in found["cells"]:
        assert 0.0 < cell["max_abs"] < 0.0625
        assert 0.0 < cell["rms_relative"] < 0.01


def test_a_cell_beyond_the_bound_is_wrong_and_exits_1(run: Callable[..., Any]) -> None:
    result = run(*LAYER, "--seed", "3", "--bound", "0")
    assert result.code == 1
    assert result.out.count("WRONG") == 2
    assert "0 of 2 cells right" in result.err


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 0.0625), ("fp8", 0.25)])
def test_the_bound_follows_the_precision(dtype: str, bound: float, run: Callable[..., Any]) -> None:
    result = run("verify", "--shape", "H=128,I=64,E=4,K=2", "--dtype", dtype, "--ep", "1", "--tokens", "3", "--json")
    assert result.code == 0, result.err
    assert [cell["bound"] for cell in json.loads(result.out)["cells"]] == [bound]
