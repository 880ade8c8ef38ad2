"""The plot of a tune: layer time against tokens, tuned, default and the physical floor, one column per EP size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fitune.cells import Cell, grid_of
from fitune.cost import CHIPS
from fitune.errors import InputError
from fitune.problem import Key, Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS: Final = (".png", ".svg")
TUNED: Final = "#1b6ca8"
DEFAULT: Final = "#c8553d"
FLOOR: Final = "#8d8d8d"
OTHERS: Final = ("#6a994e", "#8e6bbf", "#c98b1b", "#3a3a3a")
PANEL_INCHES: Final = (3.4, 4.6)
MAX_RATIO_SHOWN: Final = 3.0
STYLE: Final[Any] = {  # matplotlib's own type lists every setting there is
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "svg.hashsalt": "fitune",
}

Times = Sequence[float]


def floor_us(problem: Problem, arch: str) -> float:
    """The least time the chip's rates allow: useful FLOPs at the tensor rate, or each active expert's weights and the
    tokens in and out once over DRAM, whichever takes longer. Raises InputError for a chip without known rates."""
    if arch not in CHIPS:
        raise InputError(f"no rates are known of {arch!r}; a floor is known for {', '.join(CHIPS)}")
    shape, chip = problem.shape, CHIPS[arch]
    flops = 6.0 * problem.expected_routed_rows * shape.hidden_size * shape.intermediate_size
    tokens_bytes = 2.0 * problem.num_tokens * shape.hidden_size * shape.item_bytes
    moved_bytes = problem.expected_active_experts * shape.expert_bytes + tokens_bytes
    return max(flops / chip.tensor_flops_per_us, moved_bytes / chip.dram_bytes_per_us)


def plot_layer_times(
    cells: Sequence[Cell],
    path: Path,
    *,
    others: Mapping[str, Mapping[Key, float]] | None = None,
    floor: Callable[[Problem], float] | None = None,
    title: str = "",
) -> None:
    """Draw a tune into a PNG or SVG file: above, µs of the layer; below, the same over the floor.

    `cells` are those of one grid (`fitune.cells.grid_of`). `others` adds named series of µs by key. `floor` gives µs
    of a problem; by default the chip's rates do. Raises InputError, and OSError where the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if path.suffix.lower() not in FORMATS:
        raise InputError(f"plot {path}: {path.suffix or 'no suffix'!r} is no picture format; use .png or .svg")
    timed = [cell for cell in cells if cell.measurement is not None]
    grids = {grid_of(cell.key.layer) for cell in timed}
    if len(grids) != 1:
        raise InputError(f"plot {path}: the cells are of {len(grids)} layers; a plot shows one")
    panels = [(ep, list(group)) for ep, group in groupby(timed, key=lambda cell: cell.key.layer.ep_label)]
    with rc_context(STYLE):
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * len(panels) + 0.6, height + (0.3 if title else 0.0)), layout="constrained")
        axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 2])
        ratios: list[float] = []
        for column, (ep, members) in enumerate(panels):
            floors = [(floor or _chip_floor(cell))(cell.key.problem()) for cell in members]
            ratios += _draw_column(axes[0][column], axes[1][column], members, floors, others or {})
            axes[0][column].set_title(f"{ep}, {members[0].key.layer.local_experts} local experts", loc="left")
        axes[1][0].set_ylim(min(0.9, 0.95 * min(ratios)), min(MAX_RATIO_SHOWN, 1.05 * max(ratios)))
        axes[0][0].set_ylabel("layer time, µs")
        axes[1][0].set_ylabel("time / floor")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _chip_floor(cell: Cell) -> Callable[[Problem], float]:
    arch = cell.environment.arch if cell.environment is not None else ""
    return lambda problem: floor_us(problem, arch)


def _draw_column(
    above: Axes, below: Axes, cells: Sequence[Cell], floors: Times, others: Mapping[str, Mapping[Key, float]]
) -> list[float]:
    """Draw one EP size; gives back the ratios to the floor that were drawn."""
    tokens = [cell.tokens for cell in cells]
    tuned = [cell.measurement.median_us for cell in cells if cell.measurement is not None]
    default = [cell.decision.default_us for cell in cells]
    above.fill_between(tokens, tuned, default, color=DEFAULT, alpha=0.10, linewidth=0)
    series: list[tuple[str, Sequence[int], Times, str, dict[str, Any]]] = [
        ("default", tokens, default, DEFAULT, {"linewidth": 1.2}),
        ("tuned", tokens, tuned, TUNED, {"linewidth": 1.8, "marker": "o", "markersize": 3.5}),
    ]
    for (name, times_us), color in zip(others.items(), OTHERS, strict=False):
        known = [cell for cell in cells if cell.key in times_us]
        points = [times_us[cell.key] for cell in known]
        series.append((name, [cell.tokens for cell in known], points, color, {"linewidth": 1.0}))
    floor_of = dict(zip(tokens, floors, strict=True))
    drawn = [1.0]
    for name, at, times, color, style in series:
        above.plot(at, times, label=name, color=color, **style)
        ratios = [time / floor_of[count] for count, time in zip(at, times, strict=True)]
        below.plot(at, ratios, color=color, **style)
        drawn += ratios
    above.plot(tokens, floors, label="floor", color=FLOOR, linewidth=1.0, linestyle=(0, (4, 3)))
    below.axhline(1.0, color=FLOOR, linewidth=1.0, linestyle=(0, (4, 3)))
    _scales(above, below, tokens)
    return drawn


def _scales(above: Axes, below: Axes, tokens: Sequence[int]) -> None:
    above.set_xscale("log", base=2)
    above.set_yscale("log")
    ticks = [count for count in sorted(tokens) if count.bit_length() % 2 == 1] or sorted(tokens)
    for axis in (above, below):
        axis.set_xticks(ticks, [_short(count) for count in ticks])
        axis.minorticks_off()
    above.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    below.set_xlabel("tokens")


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else str(count)
