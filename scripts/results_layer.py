"""Tables of the results page that come from scripts/bench_layer.py: every contender timed in turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layer_rows import Row
from results_data import geometric_mean

from fitune.render import compact_gemm, fused_letters, microseconds
from fitune.tactic import parse_tactic

Table = Callable[[str, Iterable[Sequence[object]]], str]
RANGES = ((1, 16), (32, 256), (512, 2048), (4096, 16384))
RIVALS = {"default": "the default tactic", "grouped_mm": "torch's grouped GEMMs", "cublas": "one dense pair of GEMMs"}


def layer_values(rows: Sequence[Row], name: str, table: Table) -> dict[str, Any]:
    """What the template asks for of one dtype, each name beginning with `name`."""
    timed = [row for row in rows if row.times["fitune"].status == "ok"]
    others = [row for row in rows if row.times["fitune"].status != "ok"]
    return {
        f"{name}_cells": _cells(rows, table),
        f"{name}_means": _means(timed, table),
        f"{name}_num": len(timed),
        f"{name}_left_out": ", ".join(f"EP {row.ep} at {row.tokens:,}" for row in others) or "none",
        f"{name}_ratio": f"{geometric_mean(row.ratio for row in timed):.3f}",
        f"{name}_at_floor": f"{geometric_mean(row.ratio_over_floor for row in timed):.3f}",
        f"{name}_over_floor": f"{geometric_mean(row.over_floor for row in timed):.3f}",
        f"{name}_default": f"{_against(timed, 'default'):.2f}",
        f"{name}_grouped": f"{_against(timed, 'grouped_mm'):.2f}",
        f"{name}_num_slower": sum(row.ratio_over_floor > 1.0 for row in timed),
        f"{name}_rms": f"{max(row.times['fitune'].rms for row in timed):.1e}",
        f"{name}_one_expert": " and ".join(
            f"{row.us:.1f} µs (EP {row.ep}, peers {row.peer_us:.1f})" for row in timed if row.active_experts == 1
        ),
        f"{name}_dense": _dense(timed, table),
    }


def _against(rows: Sequence[Row], rival: str) -> float:
    """Geometric mean of a rival's time over fitune's, where both ran right."""
    return geometric_mean(row.times[rival].us / row.us for row in rows if row.times[rival].us)


def _cells(rows: Sequence[Row], table: Table) -> str:
    heading = "tokens|rows / expert|fitune µs|±|default|grouped|dense| best peer|ratio|at floor|MHz| tactic"
    parts = []
    for ep in sorted({row.ep for row in rows}):
        lines = [_cell(row) for row in rows if row.ep == ep]
        parts.append(f"EP {ep}\n\n{table(heading, lines)}")
    return "\n\n".join(parts)


def _cell(row: Row) -> Sequence[object]:
    ours, same = row.times["fitune"], row.routed_rows == row.peer_rows
    spread = 50.0 * (ours.max_us - ours.min_us) / ours.us if ours.us else 0.0
    fair = f"{row.ratio_over_floor:.3f}" if ours.us else "-"
    tactic = parse_tactic(row.tactic)
    tile = f"t{tactic.tile_size}" if tactic.family == "tile" else tactic.family
    return (
        f"{row.tokens:,}",
        f"{row.rows_per_expert:.3g}",
        microseconds(ours.us) if ours.us else ours.status.replace("_", " "),
        f"{spread:.1f} %" if ours.us else "-",
        *(microseconds(row.times[name].us) if row.times[name].us else "-" for name in RIVALS),
        f"{microseconds(row.peer_us)} {row.peer}",
        f"{row.ratio:.3f}" if ours.us else "-",
        fair if same else f"**{fair}**",
        f"{row.sm_mhz:.0f}",
        f"`{tile} {compact_gemm(tactic.gemm1)} {compact_gemm(tactic.gemm2)} {fused_letters(tactic)}`",
    )


def _means(rows: Sequence[Row], table: Table) -> str:
    groups = [(f"EP {ep}", [row for row in rows if row.ep == ep]) for ep in sorted({row.ep for row in rows})]
    groups += [
        (f"{low:,} to {high:,} tokens", [row for row in rows if low <= row.tokens <= high]) for low, high in RANGES
    ]
    groups.append(("all", list(rows)))
    lines = [
        (
            name,
            len(group),
            *(
                f"{geometric_mean(map(value, group)):.3f}"
                for value in (
                    lambda row: row.ratio,
                    lambda row: row.ratio_over_floor,
                    lambda row: row.over_floor,
                    lambda row: row.peer_us / row.peer_floor_us,
                )
            ),
            *(f"{_against(group, rival):.2f}" for rival in ("default", "grouped_mm")),
        )
        for name, group in groups
        if group
    ]
    heading = " cells|number|ratio|at floor|fitune / floor|best peer / floor|default / fitune|grouped / fitune"
    return table(heading, lines)


def _dense(rows: Sequence[Row], table: Table) -> str:
    """fitune over dense GEMMs of the same FLOPs, where arithmetic decides."""
    lines = []
    for tokens in (8192, 16384):
        found = [row for row in rows if row.tokens == tokens and row.times["cublas"].us]
        if found:
            cells = [f"{row.us / row.times['cublas'].us:.2f} (EP {row.ep})" for row in found]
            lines.append((f"{tokens:,}", ", ".join(cells)))
    return table("tokens| fitune / dense", lines)
