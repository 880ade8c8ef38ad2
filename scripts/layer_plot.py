"""The picture of the layer benchmark: a roofline, and under it how much of the floor each cell reaches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from layer_rows import Row
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from results_data import DRAM_BYTES_PER_US

from fitune.errors import InputError
from fitune.plot import STYLE

FORMATS: Final = (".png", ".svg")
COLORS: Final = ("#3a3a3a", "#1b6ca8", "#c8553d", "#6a994e", "#8e6bbf", "#c98b1b")
MARKERS: Final = ("o", "s", "D", "^", "v", "P")
PEER_ALPHA: Final = 0.45
TICKS: Final[dict[float, str]] = {
    2.0**power: f"1/{2**-power}" if power < 0 else str(2**power) for power in range(-7, 13)
}


def plot_roofline(rows: Sequence[Row], path: Path) -> None:
    """Draw rows of one layer into a PNG or SVG file. Raises InputError where they are not, or have no times."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: {path.suffix or 'no suffix'!r} is no picture format; use .png or .svg")
    layers = sorted({(row.model, row.dtype) for row in rows})
    if len(layers) != 1:
        raise InputError(f"--plot {path}: the rows are of {len(layers)} layers or dtypes; a plot shows one")
    timed = sorted((row for row in rows if row.us), key=lambda row: (row.ep, row.rows_per_expert))
    if not timed:
        raise InputError(f"--plot {path}: no row has a time of fitune's; measure some first")
    by_ep = {ep: [row for row in timed if row.ep == ep] for ep in sorted({row.ep for row in timed})}
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 7.4), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 3])
        for (ep, group), color, marker in zip(by_ep.items(), COLORS, MARKERS, strict=False):
            _draw_rates(above, group, color, marker, f"EP {ep}")
            _draw_shares(below, group, color, marker)
        _finish_rates(above, timed)
        _finish_shares(below, timed)
        model, dtype = layers[0]
        chips = ", ".join(sorted({row.device for row in timed}))
        title = f"{model} MoE layer, {dtype}, {chips}: fitune under the roofline"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        handles = _legend(above, any(row.peer_us for row in timed))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _draw_rates(axes: Axes, rows: Sequence[Row], color: str, marker: str, label: str) -> None:
    """One EP size: its memory roof, the peers' best, ours."""
    at = [row.rows_per_expert for row in rows]
    roof = [min(row.flops * DRAM_BYTES_PER_US / row.bytes, row.tensor_flops_per_us) / 1e6 for row in rows]
    axes.plot(at, roof, color=color, linewidth=0.9, linestyle=(0, (2, 2)), alpha=0.8)
    peered = [row for row in rows if row.peer_us]
    where = [row.peer_rows / row.local_experts for row in peered]
    axes.plot(where, [_peer_tflops(row) for row in peered], color=color, marker=marker, linestyle="none", **_faint())
    axes.plot(at, [row.tflops for row in rows], color=color, marker=marker, markersize=4.0, linewidth=1.6, label=label)


def _draw_shares(axes: Axes, rows: Sequence[Row], color: str, marker: str) -> None:
    """The floor over the time: 100 % is the roof."""
    peered = [row for row in rows if row.peer_us]
    where = [row.peer_rows / row.local_experts for row in peered]
    shares = [100.0 * row.peer_floor_us / row.peer_us for row in peered]
    axes.plot(where, shares, color=color, marker=marker, linestyle="none", **_faint())
    ours = [100.0 / row.over_floor for row in rows]
    axes.plot([row.rows_per_expert for row in rows], ours, color=color, marker=marker, markersize=4.0, linewidth=1.6)


def _peer_tflops(row: Row) -> float:
    """The best peer's rate on the rows of its own draw."""
    return row.flops / row.routed_rows * row.peer_rows / row.peer_us / 1e6


def _faint() -> dict[str, Any]:
    return {"markersize": 6.5, "markerfacecolor": "none", "markeredgewidth": 0.9, "alpha": PEER_ALPHA}


def _finish_rates(axes: Axes, rows: Sequence[Row]) -> None:
    peak = rows[0].tensor_flops_per_us / 1e6
    axes.axhline(peak, color="#555555", linewidth=1.0)
    axes.text(
        0.005, peak, f" dense tensor rate, {peak:,.0f} TFLOP/s", transform=axes.get_yaxis_transform(), va="bottom",
        color="#555555", fontsize=8.0,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    least = min([row.tflops for row in rows] + [_peer_tflops(row) for row in rows if row.peer_us])
    axes.set_ylim(0.8 * least, 1.6 * peak)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.minorticks_off()
    axes.set_ylabel("TFLOP/s, padding not counted")


def _finish_shares(axes: Axes, rows: Sequence[Row]) -> None:
    axes.axhline(100.0, color="#555555", linewidth=1.0)
    axes.set_ylabel("floor / time, %")
    axes.set_xlabel("rows per local expert")
    low = min(
        [100.0 / row.over_floor for row in rows]
        + [100 * row.peer_floor_us / row.peer_us for row in rows if row.peer_us]
    )
    axes.set_ylim(max(0.0, 10.0 * (low // 10.0)), 105.0)
    ends = min(row.rows_per_expert for row in rows), max(row.rows_per_expert for row in rows)
    ticks = {at: text for at, text in TICKS.items() if 0.7 * ends[0] <= at <= 1.4 * ends[1]}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()


def _legend(axes: Axes, peers: bool) -> list[Line2D]:
    """fitune's lines by EP, then what dots and rings are."""
    lines, _ = axes.get_legend_handles_labels()
    handles = [line for line in lines if isinstance(line, Line2D)]
    bandwidth = DRAM_BYTES_PER_US / 1e6
    handles.append(
        Line2D(
            [],
            [],
            color="#777777",
            linestyle=(0, (2, 2)),
            label=f"roof of each EP size ({bandwidth:.2f} TB/s)",
        )
    )
    if peers:
        handles.append(Line2D([], [], color="#777777", marker="o", linestyle="none", label="best peer", **_faint()))
    return handles
