"""Pictures of the results page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results_data import ResultCell

from fitune.cells import cells_of
from fitune.plot import STYLE, plot_layer_times
from fitune.problem import Key, Problem
from fitune.target import Environment

FORMATS: Final = ("png", "svg")
EP_COLORS: Final[dict[int, str]] = {1: "#3a3a3a", 8: "#1b6ca8", 16: "#c8553d"}
MACHINES: Final = 0.04
"""How far H200s differ among themselves."""


def draw_layer_times(cells: Sequence[ResultCell], environments: Mapping[str, Environment], folder: Path) -> None:
    """layer-times: µs and time over floor, one column per EP size. Peers are scaled from their load to ours."""
    kernels = next(iter(environments.values())).kernels
    floors = {cell.decision.key: cell.floor_us for cell in cells}
    peers: dict[Key, float] = {cell.decision.key: cell.peer_over_floor * cell.floor_us for cell in cells}
    by_problem: dict[Problem, float] = {key.problem(): floor for key, floor in floors.items()}
    drawn = cells_of((cell.decision for cell in cells), environments, kernels)
    for suffix in FORMATS:
        plot_layer_times(
            drawn,
            folder / f"layer-times.{suffix}",
            others={"best peer": peers},
            floor=by_problem.__getitem__,
            title="DeepSeek-V3 MoE layer, bf16, one H200",
        )


def draw_ratios(cells: Sequence[ResultCell], folder: Path) -> None:
    """peer-ratio: fitune over the best peer of each cell, as timed and after division by each load's floor."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_ratio(left, cells, "ratio", "as timed (small loads differ)")
        _draw_ratio(right, cells, "ratio_over_floor", "each over the floor of its own load")
        left.set_ylabel("fitune / best peer")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        for suffix in FORMATS:
            metadata: dict[str, Any] | None = {"Date": None} if suffix == "svg" else None
            figure.savefig(folder / f"peer-ratio.{suffix}", dpi=160, metadata=metadata)


def _draw_ratio(axes: Axes, cells: Sequence[ResultCell], name: str, title: str) -> None:
    axes.axhspan(1.0 - MACHINES, 1.0 + MACHINES, color="#ececec", linewidth=0, label="difference between machines")
    axes.axhline(1.0, color="#8d8d8d", linewidth=1.0)
    for ep, color in EP_COLORS.items():
        mine = [cell for cell in cells if cell.ep == ep]
        values = [getattr(cell, name) for cell in mine]
        tokens = [cell.tokens for cell in mine]
        axes.plot(tokens, values, color=color, marker="o", markersize=3.5, linewidth=1.4, label=f"EP {ep}")
    axes.set_xscale("log", base=2)
    ticks = [2**power for power in range(0, 15, 2)]
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_title(title, loc="left")
