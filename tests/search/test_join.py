"""Finalists from ranked stages: the default, the best pair, and the best pair launched otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fitune.search.join import Finalist, finalists
from fitune.search.pool import Head, head_of
from fitune.tactic import Stage, Tactic, parse_tactic

DEFAULT = parse_tactic("t16 gather:fused act:fused g1:128x64/g8/w4/s3/grid/ptr g2:64x64/g8/w4/s3/grid/ptr fin:reduce")
TILE = parse_tactic("t32 gather:fused act:fused g1:128x64/g8/w4/s4/grid/tma g2:64x64/g8/w4/s4/grid/tma fin:reduce")
GEMV = parse_tactic("gemv t1 gather:fused act:fused g1:8x512/g1/w4/s1/grid/ptr g2:4x512/g1/w4/s1/grid/ptr fin:fused")
TWIN = replace(GEMV, gemm1=replace(GEMV.gemm1, pdl=True), gemm2=replace(GEMV.gemm2, pdl=True))
HALF = replace(GEMV, gemm1=replace(GEMV.gemm1, pdl=True))

Ranks = dict[Head, list[tuple[float, Stage]]]


def ranked(times: dict[Tactic, tuple[float, float]]) -> tuple[Ranks, Ranks]:
    """Both sides' stages from tactics with the µs of their GEMMs."""
    sides: tuple[Ranks, Ranks] = ({}, {})
    for tactic, both in times.items():
        for side, name, time_us in zip(sides, ("gemm1", "gemm2"), both, strict=True):
            stage = tactic.stage(name)  # type: ignore[arg-type]
            side.setdefault(head_of(stage), []).append((time_us, stage))
    for side in sides:
        for members in side.values():
            members.sort(key=lambda item: (item[0], str(item[1])))
    return sides


def found(times: dict[Tactic, tuple[float, float]], count: int = 5) -> list[Finalist]:
    return finalists(DEFAULT, *ranked(times), {}, count)


@pytest.mark.parametrize("best", [GEMV, TWIN])
def test_the_best_gemv_pair_comes_with_its_twin(best: Tactic) -> None:
    """Whether kernels overlap does not show in a stage's own time: the twin is raced however much slower it seems."""
    other = TWIN if best == GEMV else GEMV
    times = {DEFAULT: (40.0, 40.0), best: (10.0, 10.0), other: (15.0, 15.0)}
    names = [item.tactic for item in found(times)]
    assert names[:3] == [DEFAULT, best, other]
    assert [item.sum_us for item in found(times)][:3] == [80.0, 20.0, 30.0]
    assert [item.tactic for item in found(times, 2)] == [DEFAULT, best]


def test_the_twin_of_a_mixed_pair_has_pdl_on_both() -> None:
    times = {GEMV: (12.0, 10.0), TWIN: (10.0, 11.5)}
    assert [item.tactic for item in found(times)][1:3] == [HALF, TWIN]


def test_no_twin_that_was_not_measured_and_none_of_tiles() -> None:
    assert [item.tactic for item in found({DEFAULT: (40.0, 40.0), GEMV: (10.0, 10.0)})] == [DEFAULT, GEMV]
    slow_streams = {TILE: (10.0, 10.0), GEMV: (30.0, 30.0), TWIN: (31.0, 31.0)}
    assert [item.tactic for item in found(slow_streams)] == [DEFAULT, TILE]


def test_a_twin_that_is_the_default_stands_once() -> None:
    sides = ranked({GEMV: (10.0, 10.0), TWIN: (15.0, 15.0)})
    names = [item.tactic for item in finalists(TWIN, *sides, {}, 5)]
    assert names[:2] == [TWIN, GEMV] and names.count(TWIN) == 1


def test_of_pairs_tied_with_the_best_the_first_in_order_is_raced_too() -> None:
    """Two searches see another fastest of many equal pairs; what both race is the one that comes first by order."""
    heads = [replace(TILE, gemm1=replace(TILE.gemm1, num_stages=stages)) for stages in (3, 4, 5, 6)]
    for times in ((10.03, 10.0, 10.02, 10.01), (10.01, 10.02, 10.0, 10.03)):
        sides = ranked({tactic: (time_us, 10.0) for tactic, time_us in zip(heads, times, strict=True)})
        by_text = lambda tactic: (0, 0, 0, str(tactic))  # noqa: E731
        assert heads[0] in [item.tactic for item in finalists(DEFAULT, *sides, {}, 3, by_text)]
    far = ranked({heads[0]: (10.3, 10.0), heads[1]: (10.0, 10.0)})
    assert [item.tactic for item in finalists(DEFAULT, *far, {}, 2, by_text)] == [DEFAULT, heads[1]]
