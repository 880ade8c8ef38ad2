"""Numbers, compact texts and pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitune.cache import open_store
from fitune.cells import Cell, cells_of
from fitune.cli.inputs import MAX_TOKENS, seconds_of, whole_numbers
from fitune.cli.progress import SearchProgress, clock
from fitune.errors import InputError
from fitune.models import preset
from fitune.plot import floor_us, plot_layer_times
from fitune.problem import Problem
from fitune.render import compact_gemm, fused_letters, microseconds, picture, plain_text, print_cells, signed_percent
from fitune.space import candidates
from fitune.tactic import STAGES, parse_tactic
from fitune.target import KNOWN_TARGETS, kernel_source_hash

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def cells(tuned: Path) -> list[Cell]:
    store = open_store(tuned)
    return cells_of(store.decisions().values(), store.environments(), kernel_source_hash())


def test_numbers() -> None:
    assert [microseconds(value) for value in (9.876, 45.314, 512.34, 1180.4, 19606.2, None)] == [
        "9.88", "45.31", "512.3", "1180", "19606", "-",
    ]  # fmt: skip
    assert signed_percent(-0.187) == "-18.7%"
    assert signed_percent(None) == "-"
    assert clock(75) == "1:15"
    assert clock(3725) == "1:02:05"


def test_compact_texts_tell_every_two_candidates_apart_and_fit() -> None:
    problem = Problem(preset("deepseek-v3").shape, 16, 8192)
    for stage in STAGES:
        gemms = {item.stage.gemm for item in candidates(problem, KNOWN_TARGETS["sm_90"], stage)}
        texts = {compact_gemm(gemm) for gemm in gemms}
        assert len(texts) == len(gemms)
        assert max(map(len, texts)) <= 24


def test_fused_letters() -> None:
    text = "t64 gather:permute act:fused g1:256x64/g8/w4/s5/p1f/tma g2:256x64/g8/w4/s5/grid/ptr fin:reduce"
    assert fused_letters(parse_tactic(text)) == "-a-"
    assert compact_gemm(parse_tactic(text).gemm1) == "256x64/g8/w4/s5/p1f/t"


def test_lists_of_numbers() -> None:
    assert whole_numbers("1,2,4", "--tokens") == (1, 2, 4)
    assert whole_numbers("64:1024", "--tokens") == (64, 128, 256, 512, 1024)
    assert whole_numbers("3:20, 1", "--tokens") == (1, 3, 6, 12, 20)
    assert whole_numbers("8:8", "--tokens") == (8,)


@given(st.text(max_size=12))
def test_any_list_is_read_or_refused(text: str) -> None:
    try:
        numbers = whole_numbers(text, "--tokens")
    except InputError:
        return
    assert numbers
    assert list(numbers) == sorted(set(numbers))
    assert 1 <= numbers[0] <= numbers[-1] <= MAX_TOKENS


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("45", 45), ("0.5m", 30)])
def test_times(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@given(st.text(alphabet="0123456789hms. -", max_size=8))
def test_any_time_is_read_or_refused(text: str) -> None:
    try:
        seconds = seconds_of(text)
    except InputError:
        return
    assert seconds > 0


def test_time_left_follows_the_work_and_never_passes_the_budget() -> None:
    progress = SearchProgress(total=4, budget_s=None)
    started_s = progress._started_s
    assert progress.left_s(started_s + 10) is None
    progress._done = 1
    assert progress.left_s(started_s + 10) == pytest.approx(30)
    progress._shares = {"gemm1": 1.0, "gemm2": 1.0}
    assert progress.left_s(started_s + 10) == pytest.approx(10)
    capped = SearchProgress(total=4, budget_s=12.0)
    assert capped.left_s(started_s + 10) == pytest.approx(2, abs=0.5)


def test_pictures_hold_what_the_terminal_shows(cells: list[Cell]) -> None:
    text = plain_text(lambda console: print_cells(cells, console))
    assert len(text.splitlines()) >= len(cells) + 2
    svg = picture(lambda console: print_cells(cells, console), "fitune show")
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    shown = "".join(root.itertext()).replace("\xa0", " ")
    for cell in cells:
        assert compact_gemm(cell.decision.chosen.gemm1) in shown


def test_the_plot_is_drawn_and_the_same_each_time(cells: list[Cell], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg", "c.png"):
        plot_layer_times(cells, tmp_path / name, title="DeepSeek-V3", others={"a peer": {cells[0].key: 900.0}})
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == (tmp_path / "b.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(PNG)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for word in ("tuned", "default", "floor", "a peer", "EP 8, 32 local experts"):
        assert f"<!-- {word} -->" in drawn


def test_plots_that_cannot_be(cells: list[Cell], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match=r"\.gif"):
        plot_layer_times(cells, tmp_path / "x.gif")
    with pytest.raises(InputError, match="0 layers"):
        plot_layer_times([], tmp_path / "x.svg")
    other = replace(cells[0].decision, key=replace(cells[0].key, layer=replace(cells[0].key.layer, dtype="fp16")))
    with pytest.raises(InputError, match="2 layers"):
        plot_layer_times([cells[0], replace(cells[0], decision=other)], tmp_path / "x.svg")
    with pytest.raises(InputError, match="sm_12"):
        floor_us(cells[0].key.problem(), "sm_12")


def test_the_floor_is_the_slower_of_arithmetic_and_memory() -> None:
    shape = preset("deepseek-v3").shape
    large = Problem(shape, 256, 16384)
    flops = 2.0 * 3 * 16384 * 8 * 7168 * 2048
    assert floor_us(large, "sm_90") == pytest.approx(flops / 790e6)
    one = Problem(shape, 256, 1)
    assert floor_us(one, "sm_90") == pytest.approx(8 * 3 * 7168 * 2048 * 2 / 4.7e6, rel=1e-3)
