"""The text form of tactics and stages, and the padding rule."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitune.errors import TacticSyntaxError
from fitune.tactic import GemmTactic, LibraryGemm, Stage, Tactic, max_tiles, num_tiles, parse_stage, parse_tactic

SIZES = st.integers(1, 1024)
WORDS = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,12}", fullmatch=True)
OPTIONS = st.dictionaries(
    st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True), st.integers(-(10**17), 10**17) | WORDS, max_size=12
)


@st.composite
def library_gemms(draw: st.DrawFn) -> LibraryGemm:
    return LibraryGemm(tuple(draw(OPTIONS).items()))


@st.composite
def gemms(draw: st.DrawFn) -> GemmTactic:
    persistent = draw(st.booleans())
    return GemmTactic(
        block_n=draw(SIZES),
        block_k=draw(SIZES),
        group_m=draw(SIZES),
        num_warps=draw(st.sampled_from([1, 2, 4, 8, 16])),
        num_stages=draw(st.integers(1, 9)),
        schedule="persistent" if persistent else "grid",
        programs_per_sm=draw(st.integers(1, 8)) if persistent else 1,
        flatten=draw(st.booleans()) if persistent else False,
        loads=draw(st.sampled_from(["tma", "pointer"])),
        swap_ab=draw(st.booleans()),
    )


@st.composite
def tactics(draw: st.DrawFn) -> Tactic:
    return Tactic(
        family=draw(st.sampled_from(["tile", "gemv", "torch_grouped", "plugin2"])),
        tile_size=draw(st.integers(1, 512)),
        gemm1=draw(gemms() | library_gemms()),
        gemm2=draw(gemms() | library_gemms()),
        gather=draw(st.sampled_from(["fused", "permute"])),
        activation=draw(st.sampled_from(["fused", "separate"])),
        finalize=draw(st.sampled_from(["fused", "reduce"])),
    )


@given(tactics())
def test_a_tactic_reads_back_from_its_text(tactic: Tactic) -> None:
    assert parse_tactic(str(tactic)) == tactic


@given(tactics())
def test_stages_read_back_and_join_to_the_tactic(tactic: Tactic) -> None:
    first, second = tactic.stage("gemm1"), tactic.stage("gemm2")
    assert parse_stage(str(first)) == first
    assert parse_stage(str(second)) == second
    assert Tactic.of(first, second) == tactic


@given(tactics(), tactics())
def test_different_tactics_have_different_texts(one: Tactic, other: Tactic) -> None:
    assert (str(one) == str(other)) is (one == other)


@given(st.lists(library_gemms()))
def test_library_gemms_sort_and_do_not_mind_the_order_of_options(found: list[LibraryGemm]) -> None:
    backwards = found[::-1]
    assert sorted(found) == sorted(backwards)
    for gemm in found:
        assert LibraryGemm(gemm.options[::-1]) == gemm
        assert list(gemm.options) == sorted(gemm.options, key=lambda option: option[0])


def test_a_library_gemm_is_written_with_its_options() -> None:
    assert str(LibraryGemm()) == "auto"
    assert str(LibraryGemm((("heuristic", 2), ("align", 128), ("mode", "fast")))) == "align=128,heuristic=2,mode=fast"
    stage = parse_stage("grouped_mm t128 g2:align=128 fin:reduce")
    assert stage.gemm == LibraryGemm((("align", 128),))


@pytest.mark.parametrize(
    "options",
    [(("a", 1), ("a", 2)), (("A", 1),), (("", 1),), (("a", ""),), (("a", "1"),), (("a", "x,y"),), (("a", True),)],
)
def test_options_that_could_not_be_read_back_are_refused(options: tuple[tuple[str, str | int], ...]) -> None:
    with pytest.raises(TacticSyntaxError):
        LibraryGemm(options)


@pytest.mark.parametrize("text", ["auto,", "a=", "=1", "a=1,a=2", "a=1,,b=2", "a=b=c", "Auto", "a= 1"])
def test_a_text_that_is_no_library_gemm_is_refused(text: str) -> None:
    with pytest.raises(TacticSyntaxError, match=r"is no GEMM|is not a field|missing"):
        parse_stage(f"vendor t1 g2:{text} fin:reduce")


def test_fields_may_come_in_any_order() -> None:
    text = "t64 gather:permute act:fused g1:128x64/g8/w4/s3/p2f/tma g2:256x32/g1/w8/s4/grid/ptr/swap fin:fused"
    head, *words = text.split()
    assert parse_tactic(" ".join([head, *reversed(words)])) == parse_tactic(text)
    assert str(parse_tactic(text)) == text


GOOD = "t64 gather:fused act:fused g1:128x64/g8/w4/s3/grid/ptr g2:128x64/g8/w4/s3/grid/ptr fin:reduce"


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "64",
        "tile",
        "Tile t64",
        GOOD.removeprefix("t64 "),
        GOOD.replace("t64", "t-64"),
        GOOD.replace("t64", "t6.4"),
        GOOD.replace(" fin:reduce", ""),
        GOOD + " fin:reduce",
        GOOD + " extra",
        GOOD + " depth:3",
        GOOD.replace("fin:reduce", "fin:atomic"),
        GOOD.replace("gather:fused", "gather:"),
        GOOD.replace("128x64", "128x"),
        GOOD.replace("grid", "loop"),
        GOOD.replace("ptr", "dma"),
        GOOD.replace("/w4", ""),
        GOOD.replace("grid", "p"),
        GOOD.replace("g1:128x64/g8/w4/s3/grid/ptr", "g1:128x64/g8/w4/s3/grid/ptr/swap/swap"),
    ],
)
@pytest.mark.parametrize("parse", [parse_tactic, parse_stage])
def test_broken_texts_are_one_line_errors(parse: Callable[[str], object], broken: str) -> None:
    with pytest.raises(TacticSyntaxError) as caught:
        parse(broken)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60))
def test_no_text_does_worse_than_a_syntax_error(text: str) -> None:
    for parse in (parse_tactic, parse_stage):
        try:
            parse(text)
        except TacticSyntaxError:
            pass


def test_a_whole_tactic_is_no_stage_and_a_stage_no_tactic() -> None:
    tactic = parse_tactic(GOOD)
    with pytest.raises(TacticSyntaxError):
        parse_stage(GOOD)
    for name in ("gemm1", "gemm2"):
        with pytest.raises(TacticSyntaxError):
            parse_tactic(str(tactic.stage(name)))  # type: ignore[arg-type]


def test_a_stage_holds_only_its_own_choices() -> None:
    gemm = GemmTactic(128, 64)
    with pytest.raises(AssertionError):
        Stage("gemm1", "tile", 64, gemm, finalize="fused")
    with pytest.raises(AssertionError):
        Stage("gemm2", "tile", 64, gemm, gather="fused", activation="fused")
    with pytest.raises(AssertionError):
        Tactic.of(
            Stage("gemm1", "tile", 64, gemm, "fused", "fused"), Stage("gemm2", "tile", 32, gemm, finalize="fused")
        )


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 256))
def test_the_tile_bound_holds_for_every_split_of_the_rows(rows: list[int], tile_size: int) -> None:
    total = sum(rows)
    needed = sum(num_tiles(count, tile_size) for count in rows)
    assert needed * tile_size >= total
    assert needed <= max_tiles(total, len(rows), tile_size)


@given(st.integers(0, 2000), st.integers(1, 40), st.integers(1, 256))
def test_the_tile_bound_is_reached(max_rows: int, experts: int, tile_size: int) -> None:
    active = min(experts, max_rows)
    worst = [1] * active + [0] * (experts - active)
    if active:
        worst[0] += max_rows - active
    assert sum(num_tiles(count, tile_size) for count in worst) == max_tiles(max_rows, experts, tile_size)
