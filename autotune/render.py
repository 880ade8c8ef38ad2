"""Tables for the terminal, from plain data to rich renderables."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from fitune.cells import Cell, grid_of
from fitune.tactic import Gemm, GemmTactic, LibraryGemm, Tactic

if TYPE_CHECKING:
    from fitune.diff import DiffReport, DiffRow, Regret

FULL_TEXT_WIDTH: Final = 165
BESIDE_TACTIC: Final = 58
COMPACT_WIDTH: Final = 99
STATE_STYLES: Final[dict[str, str]] = {"tuned": "green", "tie": "cyan", "default": "dim", "stale": "yellow"}
COMPACT_LEGEND: Final = (
    "gemm: block_n x block_k / group_m / warps / stages / loop, t: TMA loads, x: operands swapped{gemm}. "
    "fused: gather, activation, finalize{fused}."
)
PDL_LEGEND: Final = ", d: starts before its forerunner ends"
TAIL_LEGEND: Final = ", 2 or 4: last round cut"
QUANTIZE_LEGEND: Final = ", +q: hidden rows quantised by a kernel of its own"


def microseconds(value_us: float | None) -> str:
    """Four significant digits: 45.31, 512.3, 1180."""
    if value_us is None:
        return "-"
    decimals = 2 if value_us < 100 else 1 if value_us < 1000 else 0
    return f"{value_us:.{decimals}f}"


def signed_percent(ratio: float | None) -> str:
    """A share as signed percent: -0.187 -> -18.7%."""
    return "-" if ratio is None else f"{100.0 * ratio:+.1f}%"


def compact_gemm(gemm: Gemm) -> str:
    """A GEMM tactic in at most 23 columns, 24 where none is legal: `256x64/g8/w4/s5/p1f/t2`; a library's as it is."""
    if isinstance(gemm, LibraryGemm):
        return str(gemm)
    sizes = f"{gemm.block_n}x{gemm.block_k}/g{gemm.group_m}/w{gemm.num_warps}/s{gemm.num_stages}"
    loop = "grid" if gemm.schedule == "grid" else f"p{gemm.programs_per_sm}{'f' if gemm.flatten else ''}"
    flags = f"{'t' if gemm.loads == 'tma' else ''}{'x' if gemm.swap_ab else ''}{'d' if gemm.pdl else ''}"
    flags += str(gemm.tail) if gemm.tail > 1 else ""
    return f"{sizes}/{loop}{'/' + flags if flags else ''}"


def tile_label(tactic: Tactic) -> str:
    """The tile size, `lib` where a library runs the GEMMs, else the family where it is another than `tile`."""
    if isinstance(tactic.gemm1, LibraryGemm):
        return "lib"
    return str(tactic.tile_size) if tactic.family == "tile" else tactic.family


def gemm_cells(tactic: Tactic) -> tuple[str, str]:
    """Both GEMMs as tables show them: a library's by the name of its family, with its options where it has any."""
    first, second = (
        f"{tactic.family} {gemm if gemm.options else ''}".rstrip()
        if isinstance(gemm, LibraryGemm)
        else compact_gemm(gemm)
        for gemm in (tactic.gemm1, tactic.gemm2)
    )
    return first, second


def fused_letters(tactic: Tactic) -> str:
    """Which of gather, activation and finalize are fused into a GEMM: `ga-`; `+q` where a kernel only quantises."""
    places = (("g", tactic.gather), ("a", tactic.activation), ("f", tactic.finalize))
    letters = "".join(letter if place == "fused" else "-" for letter, place in places)
    return letters if tactic.quantize == "fused" else f"{letters}+q"


def compact_legend(tactics: Iterable[Tactic]) -> str:
    """What the columns of compact tables mean, as far as these tactics have it in them."""
    shown = list(tactics)
    gemms = [gemm for one in shown for gemm in (one.gemm1, one.gemm2) if isinstance(gemm, GemmTactic)]
    rarer = (PDL_LEGEND if any(gemm.pdl for gemm in gemms) else "") + (
        TAIL_LEGEND if any(gemm.tail > 1 for gemm in gemms) else ""
    )
    quantised = QUANTIZE_LEGEND if any(one.quantize != "fused" for one in shown) else ""
    return COMPACT_LEGEND.format(gemm=rarer, fused=quantised)


def plain_table(*columns: tuple[str, str], shrinking: Sequence[str] = ()) -> Table:
    """A table without lines. Columns are (heading, `left` or `right`); nothing wraps.

    Where a terminal is too narrow, columns named in `shrinking` give way; their cells are made by `cut`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading, side in columns:
        justify: JustifyMethod = "right" if side == "right" else "left"
        table.add_column(heading, justify=justify, no_wrap=heading not in shrinking)
    return table


def cut(text: str) -> Text:
    """A cell that ends in an ellipsis where its column has no room for it."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def print_table(table: Table, console: Console) -> None:
    """Print a table; where nobody sees the padding, without trailing spaces."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_cells(cells: Sequence[Cell], console: Console) -> None:
    """One line a cell, one table a layer; the full tactic text where the terminal has room for it."""
    longest = max((len(str(cell.decision.chosen)) for cell in cells), default=0)
    full = console.width >= max(FULL_TEXT_WIDTH, BESIDE_TACTIC + longest)
    for number, (grid, members) in enumerate(groupby(cells, key=lambda cell: grid_of(cell.key.layer))):
        if number:
            console.print()
        console.print(Text(f"{grid[0]}: {', '.join(grid[1:])}", style="bold"), soft_wrap=True)
        print_table(_full_table(list(members)) if full else _compact_table(list(members)), console)
    if cells and not full:
        more = "" if console.width >= COMPACT_WIDTH else f" {COMPACT_WIDTH} columns show whole tactics."
        legend = compact_legend(cell.decision.chosen for cell in cells)
        print_legend(f"{legend}{more}", console)
    reasons = {cell.stale_because: None for cell in cells if cell.stale_because}
    for reason in reasons:
        console.print(Text(f"stale: {reason}", style="yellow"))


def print_legend(text: str, console: Console) -> None:
    """Wrapped to the terminal without spaces at the ends of lines, which rich leaves where a line is just full."""
    for line in textwrap.wrap(text, console.width, break_on_hyphens=False):
        console.print(Text(line, style="dim"), soft_wrap=True)


def _time_cells(cell: Cell) -> tuple[str, str, Text, Text]:
    measurement = cell.measurement
    interval = f"{100.0 * measurement.relative_halfwidth:.1f}%" if measurement else "-"
    ratio = cell.against_default
    style = "green" if ratio is not None and ratio < -cell.decision.noise else ""
    return (
        microseconds(measurement.median_us if measurement else None),
        interval,
        Text(signed_percent(ratio), style=style),
        Text(cell.state, style=STATE_STYLES[cell.state]),
    )


def _compact_table(cells: Sequence[Cell]) -> Table:
    table = plain_table(
        ("tokens", "right"), ("EP", "left"), ("µs", "right"), ("±", "right"), ("vs def", "right"), ("state", "left"),
        ("tile", "right"), ("gemm1", "left"), ("gemm2", "left"), ("fused", "left"),
        shrinking=("gemm1", "gemm2"),
    )  # fmt: skip
    for cell in cells:
        tactic = cell.decision.chosen
        gemms = map(cut, gemm_cells(tactic))
        ep = cell.key.layer.ep_label
        table.add_row(str(cell.tokens), ep, *_time_cells(cell), tile_label(tactic), *gemms, fused_letters(tactic))
    return table


def _full_table(cells: Sequence[Cell]) -> Table:
    table = plain_table(
        ("tokens", "right"), ("EP", "left"), ("µs", "right"), ("±", "right"), ("default µs", "right"),
        ("vs def", "right"), ("state", "left"), ("tactic", "left"), shrinking=("tactic",),
    )  # fmt: skip
    for cell in cells:
        time, interval, ratio, state = _time_cells(cell)
        default = microseconds(cell.decision.default_us)
        ep = cell.key.layer.ep_label
        table.add_row(str(cell.tokens), ep, time, interval, default, ratio, state, cut(str(cell.decision.chosen)))
    return table


VERDICT_STYLES: Final[dict[str, str]] = {"real": "bold red", "tie": "cyan", "undecided": "yellow", "same": "dim"}
SOURCE_MARKS: Final[dict[str, str]] = {"composed": "~", "predicted": "?"}
SAME: Final = "same"
MAX_LABEL: Final = 8
MAX_PROSE_WIDTH: Final = 120
_INDENT: Final = 7
_LEAST_WIDTHS: Final = (4, 23, 23)
_MOST_GEMM: Final = 24
_VERDICT_HEADING: Final = f"{'tokens':>6} {'verdict':<14} "
_DIFFERENT: Final = "bold"


def print_diff(report: DiffReport, console: Console, *, all_rows: bool = False) -> None:
    """Rows that differ (or all): both tactics with their costs on the other side's problem, the cause in words.

    "on other" is what this line's tactic costs on the other side's problem against the choice made there.
    """
    names = report.label_a, report.label_b
    if max(map(len, names)) > MAX_LABEL:
        names = "A", "B"
    told = [label if label == name else f"{name} = {label}" for label, name in zip(_labels(report), names, strict=True)]
    console.print(Text(f"{' against '.join(told)}, aligned by {report.align}", style="bold"), soft_wrap=True)
    shown = [row for row in report.rows if all_rows or row.verdict != SAME]
    both = [tactic for row in shown for tactic in (row.tactic_a, row.tactic_b) if tactic is not None]
    widths = _widths(both)
    side_heading = f"{'on other':>8} {'side':<8} {_columns(('tile', 'gemm1', 'gemm2'), 'fused', widths)}"
    narrow = console.width < len(_VERDICT_HEADING) + len(side_heading)
    if shown:
        heading = f"tokens verdict\n{side_heading}" if narrow else f"{_VERDICT_HEADING}{side_heading}"
        console.print(Text(heading, style="bold"), soft_wrap=True)
    shown.sort(key=_local_experts, reverse=True)
    groups = [(ep, list(rows)) for ep, rows in groupby(shown, key=_row_ep)]
    for ep, rows in groups:
        if len(groups) > 1:
            console.print(Text(ep, style="bold"))
        for row in rows:
            _print_diff_row(row, names, console, widths, narrow=narrow)
    console.print(Text(f"{report.sentence()}.", style="bold"), soft_wrap=not console.is_terminal)
    if shown:
        print_legend(compact_legend(both), console)


def _local_experts(row: DiffRow) -> int:
    key = row.key_a or row.key_b
    return key.layer.local_experts if key is not None else 0


def _row_ep(row: DiffRow) -> str:
    """Which EP size a row is about; both where its sides differ in it."""
    labels = dict.fromkeys(key.layer.ep_label for key in (row.key_a, row.key_b) if key is not None)
    return " against ".join(labels)


def _labels(report: DiffReport) -> tuple[str, str]:
    return report.label_a, report.label_b


def _print_diff_row(
    row: DiffRow, names: tuple[str, str], console: Console, widths: tuple[int, ...], *, narrow: bool
) -> None:
    sides = [
        (name, tactic, regret)
        for name, tactic, regret in (
            (names[0], row.tactic_a, row.regret_a_on_b),
            (names[1], row.tactic_b, row.regret_b_on_a),
        )
        if tactic is not None
    ]
    if row.verdict == SAME:
        sides = [("both", sides[0][1], sides[0][2])]
    lines = [compact_tactic(tactic, widths) for _, tactic, _ in sides]
    text = Text()
    style = VERDICT_STYLES.get(row.verdict, "magenta")
    for number, (name, _, regret) in enumerate(sides):
        if number == 0:
            verdict = row.verdict if narrow else f"{row.verdict:<14}"
            text.append(f"{row.num_tokens:>6} ").append(verdict, style=style).append("\n" if narrow else " ")
        elif not narrow:
            text.append(" " * len(_VERDICT_HEADING))
        text.append(f"{regret_text(regret) if row.differs else '':>8} {name:<8} ")
        text.append(_highlighted(lines[number], lines[1 - number] if len(lines) == 2 else lines[number]))
        text.append("\n")
    if row.verdict != SAME:
        width = max(40, min(MAX_PROSE_WIDTH, console.width) - _INDENT)
        for part in textwrap.wrap(row.sentence, width, break_long_words=False, break_on_hyphens=False):
            text.append(f"{' ' * _INDENT}{part}\n", style="dim")
    text.rstrip()
    console.print(text, soft_wrap=True)


def compact_tactic(tactic: Tactic, widths: tuple[int, ...] = _LEAST_WIDTHS) -> str:
    """A tactic in columns of fixed width: tile, gemm1, gemm2, what is fused."""
    return _columns(_cells(tactic), fused_letters(tactic), widths)


def _cells(tactic: Tactic) -> tuple[str, ...]:
    """tile, gemm1 and gemm2, none too long for a diff."""
    gemms = (text if len(text) <= _MOST_GEMM else f"{text[: _MOST_GEMM - 1]}…" for text in gemm_cells(tactic))
    return tile_label(tactic), *gemms


def _widths(tactics: Sequence[Tactic]) -> tuple[int, ...]:
    """Widths of tile, gemm1 and gemm2 that fit all of them."""
    rows = [tuple(map(len, _cells(tactic))) for tactic in tactics]
    return tuple(max(column) for column in zip(_LEAST_WIDTHS, *rows, strict=True))


def _columns(cells: tuple[str, ...], fused: str, widths: tuple[int, ...]) -> str:
    tile, *gemms = cells
    padded = (f"{text:<{width}}" for text, width in zip(gemms, widths[1:], strict=True))
    return " ".join([f"{tile:>{widths[0]}}", *padded, fused])


def _highlighted(line: str, other: str) -> Text:
    """A compact tactic with the pieces that differ from the other one's standing out."""
    text = Text()
    theirs = re.split(r"([/ ]+)", other)
    for place, piece in enumerate(re.split(r"([/ ]+)", line)):
        same = place < len(theirs) and piece == theirs[place]
        text.append(piece, style="" if same or not piece.strip(" /") else _DIFFERENT)
    return text


def regret_text(regret: Regret) -> str:
    """A regret in at most 8 columns: `+3.1%`, with ~ where it is a sum of stages and ? where it is an estimate."""
    return f"{signed_percent(regret.ratio)}{SOURCE_MARKS.get(regret.source, '')}"


def picture(draw: Callable[[Console], None], title: str, width: int = 100) -> str:
    """What `draw` prints on a terminal of `width` columns, as an SVG document."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    draw(console)
    return console.export_svg(title=title)


def plain_text(draw: Callable[[Console], None], width: int = 100) -> str:
    """What `draw` prints on a terminal of `width` columns, without colour."""
    console = Console(width=width, file=io.StringIO(), color_system=None, highlight=False)
    draw(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
