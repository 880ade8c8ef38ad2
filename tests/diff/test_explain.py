"""The numbers behind a real difference, against counts made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fitune.explain import Place, mechanism, numbers, stage_numbers
from fitune.problem import Problem
from fitune.tactic import num_tiles


def test_counts_of_a_balanced_load(make: SimpleNamespace) -> None:
    problem = Problem(make.SHAPE, 16, 8192, "balanced")
    found = stage_numbers(make.LARGE.stage("gemm1"), problem, make.TARGET)
    rows = 8192 * 8 // 256
    assert found.tiles == 16 * num_tiles(rows, 128)
    assert found.useful_rows == 16 * rows
    assert found.padded_rows == 16 * num_tiles(rows, 128) * 128
    assert found.units == found.tiles * math.ceil(2 * 2048 / 128)
    assert found.rounds == math.ceil(found.units / found.resident)
    assert found.last_round_idle == pytest.approx(found.rounds - found.units / found.resident)
    assert found.weight_bytes == 16 * 2 * 2048 * 7168 * 2
    assert found.weight_bytes_read >= found.weight_bytes
    assert 0.0 <= found.idle_share < 1.0


def test_padding_of_rows_that_do_not_fill_a_tile(make: SimpleNamespace) -> None:
    problem = Problem(make.SHAPE, 32, 1280, "balanced")
    small = stage_numbers(make.SMALL.stage("gemm2"), problem, make.TARGET)
    large = stage_numbers(make.LARGE.stage("gemm2"), problem, make.TARGET)
    assert small.padding == pytest.approx(64 / 40)
    assert large.padding == pytest.approx(128 / 40)


def test_ep_changes_tiles_and_not_rows_per_expert(make: SimpleNamespace) -> None:
    one, sixteen = Problem(make.SHAPE, 256, 4096), Problem(make.SHAPE, 16, 4096)
    a, b = numbers(make.LARGE, one, make.TARGET), numbers(make.LARGE, sixteen, make.TARGET)
    assert b.gemm1.tiles == pytest.approx(a.gemm1.tiles / 16)
    assert b.gemm1.padding == pytest.approx(a.gemm1.padding)
    assert (a.ep, b.ep) == ("EP 1", "EP 16")


def test_the_sentence_names_padding_where_padding_is_the_cost(make: SimpleNamespace) -> None:
    shape = replace(make.SHAPE, num_experts=32, top_k=8)
    away = Place("here", make.LARGE, Problem(shape, 32, 8192, "balanced"), make.TARGET)
    here = Place("there", make.SMALL, Problem(shape, 32, 8192 + 200, "balanced"), make.TARGET)
    found = mechanism(away, here, 0.04)
    padding = [factor for factor in found.factors if factor.term == "padding"]
    rows = (8192 + 200) / 4
    expected = num_tiles(int(rows), 128) * 128 / (num_tiles(int(rows), 64) * 64)
    assert padding == [] if expected <= 1.02 else padding[0].ratio == pytest.approx(expected, rel=0.01)
    assert found.predicted + found.unexplained == pytest.approx(0.04)


def test_the_sentence_names_idle_programs(make: SimpleNamespace) -> None:
    """Big tiles on a small rank: the busiest SM has twice the work of the mean."""
    wide = replace(
        make.LARGE,
        gemm1=replace(make.LARGE.gemm1, block_n=256, schedule="persistent"),
        gemm2=replace(make.LARGE.gemm2, block_n=256, schedule="persistent"),
    )
    away = Place("EP 1", wide, Problem(make.SHAPE, 256, 4096, "balanced"), make.TARGET)
    here = Place("EP 16", make.SMALL, Problem(make.SHAPE, 16, 4096, "balanced"), make.TARGET)
    found = mechanism(away, here, 0.1)
    home, foreign = found.home_here.gemm1, found.foreign_here.gemm1
    assert foreign.units == 16 * num_tiles(128, 128) * math.ceil(4096 / 256)
    assert foreign.idle_share == pytest.approx(1 - foreign.units / (132 * math.ceil(foreign.units / 132)))
    assert found.sentence.startswith("EP 16 has 1/16 of the row tiles of EP 1 (256 -> 16)")
    terms = {(factor.stage, factor.term) for factor in found.factors}
    if foreign.bound != "memory" and foreign.idle_share > home.idle_share + 0.05:
        assert ("gemm1", "idle") in terms


def test_equal_tactics_on_one_problem_have_nothing_to_tell(make: SimpleNamespace) -> None:
    place = Place("A", make.LARGE, Problem(make.SHAPE, 16, 4096), make.TARGET)
    found = mechanism(place, place, 0.0)
    assert found.factors == ()
    assert found.predicted == 0.0
    assert "same row tiles" in found.sentence


def test_no_tokens_at_all(make: SimpleNamespace) -> None:
    found = numbers(make.SMALL, Problem(make.SHAPE, 16, 0), make.TARGET)
    assert found.gemm1.tiles == 0 and found.gemm1.idle_share == 0.0 and found.gemm1.last_round_idle == 0.0
