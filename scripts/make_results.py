"""Make docs/results.md, its pictures, and the table in docs/kernels.md from what was measured. No GPU, no torch.

    python scripts/make_results.py [--out docs] [--no-images]

The prose stands in results_template.md, the numbers come from here. The same data and fitune give the same page.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from results_axes import axis_tables, with_axes
from results_data import ResultCell, geometric_mean, read_cells, read_peers, side_of_ep
from results_diff import diff_values

from fitune.cache import Recording, load_recording
from fitune.cache.recording import embedded_recordings
from fitune.render import compact_gemm, fused_letters, microseconds
from fitune.tactic import Tactic

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "docs" / "data"
RANGES = ((1, 16), (32, 256), (512, 2048), (4096, 16384))
PARITY = 0.02
POWER_TOKENS = 4096
COOL_MHZ = 1965.0
PEERS = {
    "vllm_default": "vLLM's Triton kernel, its heuristic",
    "vllm_tuned": "vLLM's, its space searched for the cell",
    "vllm_tuned_sep": "the same, one config per GEMM",
    "sgl_tma_tuned": "SGLang's Triton kernel, TMA weights, tuned for the cell",
    "tk_fused": "triton_kernels, gather and SwiGLU fused, own heuristics",
    "tk_tuned": "triton_kernels, tuned for the cell",
    "dg_c64": "DeepGEMM, contiguous, rows aligned to 64",
    "dg_masked": "DeepGEMM, masked",
    "quack_tuned": "quack (CuTe DSL), tuned for the cell",
    "grouped_mm": "torch's CUTLASS grouped GEMM",
}

Cells = Sequence[ResultCell]


# ---- text --------------------------------------------------------------------------------------------------------


def table(heading: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; columns whose heading begins with a blank are aligned to the left."""
    columns = heading.split("|")
    rule = ["---" if column.startswith(" ") else "--:" for column in columns]
    lines = [" | ".join(column.strip() for column in columns), " | ".join(rule)]
    lines += [" | ".join(str(value) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def flowed(text: str) -> str:
    """Paragraphs and lists in lines of up to 120 columns; headings, tables, pictures and code as they are."""
    return "\n\n".join(map(_flowed_block, text.strip().split("\n\n"))) + "\n"


def _flowed_block(block: str) -> str:
    if block.startswith(("|", "#", "    ", "!")):
        return block
    items = re.split(r"\n(?=- )", block)
    indent = "  " if block.startswith("- ") else ""
    wrap = textwrap.TextWrapper(120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    glued = (" ".join(item.split()).replace(" %", "\N{NO-BREAK SPACE}%") for item in items)
    return "\n".join(wrap.fill(item) for item in glued).replace("\N{NO-BREAK SPACE}", " ")


def percent(ratio: float) -> str:
    return f"{100.0 * ratio:+.1f} %"


def short(tactic: Tactic) -> str:
    """A tactic in one code span, as `fitune show` prints it."""
    tile = f"t{tactic.tile_size}" if tactic.family == "tile" else tactic.family
    return f"`{tile} {compact_gemm(tactic.gemm1)} {compact_gemm(tactic.gemm2)} {fused_letters(tactic)}`"


def by_ep(cells: Cells) -> dict[int, list[ResultCell]]:
    return {ep: [cell for cell in cells if cell.ep == ep] for ep in sorted({cell.ep for cell in cells})}


def mean_of(cells: Iterable[ResultCell], value: Callable[[ResultCell], float]) -> str:
    return f"{geometric_mean(value(cell) for cell in cells):.3f}"


# ---- what fills the template -------------------------------------------------------------------------------------


def run_values(recording: Recording, cells: Cells) -> dict[str, Any]:
    environment = next(iter(recording.environments.values()))
    least = min(cell.gain for cell in cells)
    assert least > 0.0, "a cell is slower than its default: say so on the page"
    cool = [cell for cell in cells if cell.tokens >= POWER_TOKENS and cell.measurement.sm_mhz >= COOL_MHZ]
    counts = {ep: " and ".join(f"{cell.tokens:,}" for cell in members) for ep, members in by_ep(cool).items()}
    num_stages = sum(record.part != "layer" for record in recording.records)
    states = [cell.decision.state for cell in cells]
    return {
        "num_stages": num_stages,
        "num_layers": len(recording.records) - num_stages,
        "num_cells": len(cells),
        "torch": environment.torch,
        "triton": environment.triton,
        "driver": environment.driver,
        "power_cap_w": environment.power_cap_w,
        "default_over_tuned": geometric_mean(1.0 + cell.gain for cell in cells),
        "least_gain": percent(least),
        "ratio": mean_of(cells, lambda cell: cell.ratio),
        "ratio_over_floor": mean_of(cells, lambda cell: cell.ratio_over_floor),
        "recorded": load_recording(embedded_recordings()[0]).note.partition(" in ")[0],
        "num_peers": len({name for cell in cells for name in cell.peer.times_us}),
        "cool": ", ".join(f"EP {ep} at {listed} tokens" for ep, listed in counts.items()),
        "cool_mhz": COOL_MHZ,
        "states": ", ".join(f"{states.count(state)} {state}" for state in ("tuned", "tie", "default")),
    }


def cell_tables(cells: Cells) -> str:
    heading = "tokens|fitune µs|default µs| best peer, µs|ratio|at floor| tactic"
    return "\n\n".join(
        f"### EP {ep}\n\n{table(heading, map(_cell_row, members))}" for ep, members in by_ep(cells).items()
    )


def _cell_row(cell: ResultCell) -> Sequence[object]:
    low, high = (microseconds(value) for value in (cell.measurement.ci_low_us, cell.measurement.ci_high_us))
    fair = f"{cell.ratio_over_floor:.3f}"
    return (
        f"{cell.tokens:,}",
        f"{microseconds(cell.us)}&nbsp;[{low},&nbsp;{high}]",
        microseconds(cell.decision.default_us),
        f"{microseconds(cell.peer.best_us)} {cell.peer.best}",
        f"{cell.ratio:.3f}",
        fair if cell.same_load else f"**{fair}**",
        short(cell.decision.chosen),
    )


def mean_table(cells: Cells) -> str:
    groups = [(f"EP {ep}", members) for ep, members in by_ep(cells).items()]
    for low, high in RANGES:
        groups.append((f"{low:,} to {high:,} tokens", [cell for cell in cells if low <= cell.tokens <= high]))
    groups.append(("the same load on both sides", [cell for cell in cells if cell.same_load]))
    groups.append(("all", list(cells)))
    rows = [
        (
            name,
            len(group),
            mean_of(group, lambda cell: cell.ratio),
            mean_of(group, lambda cell: cell.ratio_over_floor),
            mean_of(group, lambda cell: cell.over_floor),
            mean_of(group, lambda cell: cell.peer_over_floor),
            f"{max(cell.ratio_over_floor for cell in group):.3f}",
        )
        for name, group in groups
    ]
    return table(" cells|number|ratio|at floor|fitune / floor|best peer / floor|worst at floor", rows)


def peer_table(cells: Cells) -> str:
    """Against one way of running the layer everywhere, the best of them first."""
    rows = []
    for name, words in PEERS.items():
        known = [cell for cell in cells if name in cell.peer.times_us]
        values = [cell.over_floor / (cell.peer.times_us[name] / cell.peer.floor_us) for cell in known]
        rows.append((f"`{name}`", words, len(known), f"{geometric_mean(values):.3f}"))
    return table(" peer| what it is|cells|at floor", sorted(rows, key=lambda row: row[-1], reverse=True))


def slower_values(cells: Cells) -> dict[str, Any]:
    found = [cell for cell in cells if cell.ratio > 1.0 or cell.ratio_over_floor > 1.0]
    found.sort(key=lambda cell: -max(cell.ratio_over_floor, cell.ratio_at_our_load))
    rows = [
        (
            f"{cell.tokens:,}",
            f"EP {cell.ep}",
            f"{cell.ratio:.3f}",
            f"{cell.ratio_over_floor:.3f}",
            f"{cell.ratio_at_our_load:.3f}",
            f"{cell.load.active} / {cell.peer.load.active}",
            why_slower(cell),
        )
        for cell in found
    ]
    heading = "tokens| EP|ratio|at floor|at our load|active experts, ours / theirs| why"
    return {"num_slower": len(found), "slower": table(heading, rows)}


def why_slower(cell: ResultCell) -> str:
    """The reason in words, from the three ratios."""
    if cell.same_load:
        cap = ", and both at the power cap" if cell.tokens >= POWER_TOKENS else ""
        return f"parity: {percent(cell.ratio - 1.0)}, less than machines differ{cap}"
    load = f"our load's floor is {percent(cell.floor_us / cell.peer.floor_us - 1.0)}"
    behind = cell.ratio_at_our_load - 1.0
    if behind <= PARITY:
        return f"load: {load}; at equal load {percent(behind)}"
    columns = -(-2 * cell.decision.key.layer.intermediate_size // cell.decision.chosen.gemm1.block_n)
    low, high = (microseconds(value) for value in (cell.measurement.ci_low_us, cell.measurement.ci_high_us))
    return (
        f"behind by {percent(behind)} at equal load ({load}), interval {low} to {high} µs: "
        f"{cell.load.active * columns} tiles of gemm1 for 132 SMs"
    )


def gain_table(cells: Cells) -> str:
    rows = []
    for low, high in RANGES:
        group = [cell for cell in cells if low <= cell.tokens <= high]
        gains = [[cell.gain for cell in members] for members in by_ep(group).values()]
        spans = [f"{percent(min(values))} to {percent(max(values))}" for values in gains]
        rows.append((f"{low:,} to {high:,}", *spans, f"{geometric_mean(1.0 + cell.gain for cell in group):.2f}"))
    return table("tokens|EP 1|EP 8|EP 16|default / tuned", rows)


def gemm_values(cells: Cells) -> dict[str, Any]:
    at = {(cell.ep, cell.tokens): cell for cell in cells}
    rows, rests = [], []
    for tokens in sorted({cell.tokens for cell in cells}):
        one = at[1, tokens]
        row: list[object] = [f"{tokens:,}", microseconds(one.gemms_us)]
        for ep in (8, 16):
            cell = at[ep, tokens]
            whole = cell.gemms_us * ep / one.gemms_us
            floors = cell.floor_us * ep / one.floor_us
            row += [microseconds(cell.gemms_us), *(percent(x - 1.0) for x in (whole, floors, whole / floors))]
            rests += [whole / floors - 1.0] if tokens >= 16 else []
        row.append(" / ".join(f"{at[ep, tokens].measurement.sm_mhz:.0f}" for ep in (1, 8, 16)))
        rows.append(row)
    sums = {ep: at[ep, 16384].gemms_us * ep / at[1, 16384].gemms_us - 1.0 for ep in (8, 16)}
    heading = "tokens|EP 1 µs|EP 8 µs|x 8|of it load|rest|EP 16 µs|x 16|of it load|rest| SM MHz, EP 1 / 8 / 16"
    return {
        "gemm_sums": table(heading, rows),
        "most_rest": percent(max(rests)),
        "largest_sums": " and ".join(f"{percent(ratio)} (EP {ep})" for ep, ratio in sums.items()),
    }


def load_tables(cells: Cells) -> str:
    heading = "tokens|routed rows|active experts|floor, µs|time / floor|noise|SM MHz|W"
    return "\n\n".join(
        f"### Load at EP {ep}\n\n{table(heading, map(_load_row, members))}" for ep, members in by_ep(cells).items()
    )


def _load_row(cell: ResultCell) -> Sequence[object]:
    return (
        f"{cell.tokens:,}",
        f"{cell.load.rows:,} / {cell.peer.load.rows:,}",
        f"{cell.load.active} / {cell.peer.load.active}",
        f"{microseconds(cell.floor_us)} / {microseconds(cell.peer.floor_us)}",
        f"{cell.over_floor:.2f} / {cell.peer_over_floor:.2f}",
        f"{100.0 * cell.decision.noise:.1f} %",
        f"{cell.measurement.sm_mhz:.0f}",
        f"{cell.measurement.power_w:.0f}",
    )


def correctness_values(path: Path, recording: Recording, cells: Cells) -> dict[str, Any]:
    lines = [line.split(maxsplit=6) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    assert len(lines) == len(cells), "another grid was verified than tuned"
    chosen = {(cell.tokens, cell.ep): str(cell.decision.chosen) for cell in cells}
    empty = [f"{line[0]} token at EP {line[2]}" for line in lines if float(line[3]) == 0.0]
    same = sum(chosen[int(line[0]), int(line[2])] == line[6] for line in lines)
    choices = {(cell.decision.key, cell.decision.chosen) for cell in cells}
    finals = [record.accuracy for record in recording.records if (record.key, record.tactic) in choices]
    assert len(finals) >= len(cells) and None not in finals, "a choice without a checked result"
    return {
        "num_right": sum(line[5] == "right" for line in lines),
        "num_same": same,
        "num_retaken": len(cells) - same,
        "finals_rms": max(accuracy.rms_relative for accuracy in finals if accuracy is not None),
        "empty_cells": f" ({', '.join(empty)} drew no local slot, so zeros are right)" if empty else "",
        "max_abs": max(float(line[3]) for line in lines),
        "max_rms": max(float(line[4]) for line in lines),
    }


def dispatch_values(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    us = {row["name"]: row["median_ns"] / 1000.0 for part in data["parts"].values() for row in part}
    rows = []
    for tokens in sorted(int(found[1]) for name in us if (found := re.fullmatch(r"N=(\d+): bare launches", name))):
        bare, given, plain = (us[f"N={tokens}: {what}"] for what in ("bare launches", "call, out given", "call"))
        rows.append((f"{tokens:,}", f"{bare:.1f}", f"{given:.1f}", f"{given - bare:.1f}", f"{plain - bare:.1f}"))
    return {
        "python": data["python"].split()[0],
        "dispatch_ep": data["ep"],
        "lookup_ns": 1000.0 * us["look-up and plan"],
        "dict_ns": 1000.0 * us["dict get"],
        "checks_us": us["checks of the tensors"],
        "dispatch": table("tokens|bare launches|call, out given|added|added, out allocated", rows),
    }


def page(recording: Recording, cells: Cells) -> str:
    """The whole page as Markdown."""
    values = {
        **run_values(recording, cells),
        "cells": cell_tables(cells),
        "means": mean_table(cells),
        "peers": peer_table(cells),
        **slower_values(cells),
        "gains": gain_table(cells),
        **gemm_values(cells),
        **diff_values({ep: side_of_ep(recording, ep) for ep in by_ep(cells)}, table, short),
        "loads": load_tables(cells),
        **correctness_values(DATA / "verify_h200.txt", recording, cells),
        **dispatch_values(DATA / "dispatch_h200.json"),
    }
    return flowed((HERE / "results_template.md").read_text(encoding="utf-8").format_map(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA.parent, help="folder for results.md and images/")
    parser.add_argument("--no-images", action="store_true", help="only the page")
    given = parser.parse_args()
    recording = load_recording(DATA / "h200-search-run.fitrec")
    cells = read_cells(recording, read_peers(DATA / "peers_h200_bf16.csv"))
    images = given.out / "images"
    images.mkdir(parents=True, exist_ok=True)
    (given.out / "results.md").write_text(page(recording, cells), encoding="utf-8")
    kernels = (DATA.parent / "kernels.md").read_text(encoding="utf-8")
    tables = axis_tables(load_recording(embedded_recordings()[0]), table)
    (given.out / "kernels.md").write_text(with_axes(kernels, tables), encoding="utf-8")
    if not given.no_images:
        from results_plots import draw_layer_times, draw_ratios

        draw_layer_times(cells, recording.environments, images)
        draw_ratios(cells, images)
    print(f"{given.out / 'results.md'}: {len(cells)} cells")


if __name__ == "__main__":
    main()
