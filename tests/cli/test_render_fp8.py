"""Tables of fp8 layers and of tactics with the rarer pieces, at the width of a usual terminal."""

from __future__ import annotations

from fitune.cells import cells_of
from fitune.diff import Side, diff_sides
from fitune.models import preset
from fitune.problem import Key, Problem, key_of
from fitune.record import Decision, Measurement, Member, Regime
from fitune.render import (
    PDL_LEGEND,
    QUANTIZE_LEGEND,
    TAIL_LEGEND,
    compact_gemm,
    compact_legend,
    compact_tactic,
    fused_letters,
    gemm_cells,
    plain_text,
    print_cells,
    print_diff,
)
from fitune.tactic import parse_tactic
from fitune.target import KNOWN_TARGETS, Environment

WIDTH = 100
TARGET = KNOWN_TARGETS["sm_90"]
HERE = Environment(TARGET.device, TARGET.arch, TARGET.num_sms, "0.1.0", "k", triton="3.6.0")
TACTICS = {
    1: "gemv t1 gather:fused act:fused g1:16x2048/g1/w4/s1/p16/ptr/pdl g2:8x2048/g1/w4/s1/grid/ptr/pdl fin:fused",
    64: "t16 gather:fused act:fused quant:separate g1:128x128/g8/w4/s5/grid/tma/swap "
    "g2:128x128/g8/w8/s3/grid/ptr/swap fin:reduce",
    4096: "t128 gather:permute act:separate g1:256x128/g8/w8/s3/p1f/tma/tail4 "
    "g2:256x128/g8/w8/s3/p1f/tma/tail2 fin:reduce",
    8192: "grouped_mm t128 gather:permute act:separate g1:auto g2:auto fin:reduce",
}


def decided(key: Key, text: str, time_us: float) -> Decision:
    chosen = parse_tactic(text)
    times = Measurement(time_us, 0.999 * time_us, 1.001 * time_us, 10, Regime())
    return Decision(key, chosen, (Member(chosen, times, True),), chosen, time_us, 0.01, "", HERE.id, "run", 0.0)


def decisions(texts: dict[int, str]) -> list[Decision]:
    shape = preset("deepseek-v3", "fp8_block128").shape
    keys = {count: key_of(Problem(shape, 16, count), TARGET.device) for count in texts}
    return [decided(keys[count], text, 10.0 * count + 0.5) for count, text in texts.items()]


def shown(width: int, texts: dict[int, str] = TACTICS) -> list[str]:
    cells = cells_of(decisions(texts), {HERE.id: HERE}, HERE.kernels)
    return plain_text(lambda console: print_cells(cells, console), width).splitlines()


def side(label: str, texts: dict[int, str]) -> Side:
    return Side(label, {decision.key: decision for decision in decisions(texts)}, (), {HERE.id: HERE})


def test_pieces_have_letters() -> None:
    first, swapped, large, library = map(parse_tactic, TACTICS.values())
    assert compact_gemm(first.gemm1) == "16x2048/g1/w4/s1/p16/d"
    assert compact_gemm(large.gemm1) == "256x128/g8/w8/s3/p1f/t4"
    assert compact_gemm(swapped.gemm2) == "128x128/g8/w8/s3/grid/x"
    assert [fused_letters(tactic) for tactic in (swapped, large, library)] == ["ga-+q", "---", "---"]


def test_the_legend_tells_what_is_there() -> None:
    first, swapped, large, library = map(parse_tactic, TACTICS.values())
    plain = compact_legend([library])
    assert plain.endswith("x: operands swapped. fused: gather, activation, finalize.")
    assert compact_legend([first]) == plain.replace("swapped", f"swapped{PDL_LEGEND}")
    assert compact_legend([large]) == plain.replace("swapped", f"swapped{TAIL_LEGEND}")
    assert compact_legend([swapped]) == plain.replace("finalize", f"finalize{QUANTIZE_LEGEND}")


def test_cells_line_up() -> None:
    head, columns, *rows = shown(WIDTH)
    assert "fp8_block128" in head
    first, second, fused = (columns.index(name) for name in ("gemm1", "gemm2", "fused"))
    for row, text in zip(rows[: len(TACTICS)], TACTICS.values(), strict=True):
        assert len(row) <= WIDTH
        tactic = parse_tactic(text)
        assert (row[first:second].strip(), row[second:fused].strip()) == gemm_cells(tactic)
        assert row[fused:].strip() == fused_letters(tactic)


def test_whole_tactics_are_shown_where_they_fit() -> None:
    for width in (165, 190, 240):
        lines = shown(width)
        whole = [str(parse_tactic(text)) for text in TACTICS.values()]
        assert all(any(text in line for line in lines) for text in whole) == (width == 240 or "tactic" in lines[1])
        assert "…" not in "".join(lines)


def test_a_diff_lines_up() -> None:
    others = dict(zip(TACTICS, reversed(TACTICS.values()), strict=True))
    report = diff_sides(side("EP 16", TACTICS), side("other", others))
    for width in (60, WIDTH, 120):
        lines = plain_text(lambda console: print_diff(report, console), width).splitlines()
        heading = next(line for line in lines if "gemm1" in line)
        first, second, fused = (heading.index(name) for name in ("gemm1", "gemm2", "fused"))
        cells = [(line[first:second].strip(), line[second:fused].strip(), line[fused:].strip()) for line in lines]
        for text in TACTICS.values():
            tactic = parse_tactic(text)
            assert cells.count((*gemm_cells(tactic), fused_letters(tactic))) == 2
        assert width < WIDTH or max(map(len, lines)) <= width
        assert QUANTIZE_LEGEND in " ".join(line.strip() for line in lines)


def test_long_options_of_a_library_are_cut() -> None:
    text = TACTICS[8192].replace("g1:auto", "g1:align=128,mode=fast,schedule=cooperative")
    assert compact_tactic(parse_tactic(text)) == f" lib {'grouped_mm align=128,mo…':<23} {'grouped_mm':<23} ---"
