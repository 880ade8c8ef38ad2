"""Make docs/results.md, its pictures, and the table in docs/kernels.md from what was measured. No GPU, no torch.

    python scripts/make_results.py [--out docs] [--no-images]

The prose stands in results_template.md, the numbers come from here. The same data and fitune give the same page.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from layer_rows import read_rows
from results_axes import axis_tables, with_axes
from results_data import ResultCell, read_cells, read_peers, side_of_ep
from results_diff import diff_values
from results_layer import layer_values

from fitune.cache import Recording, load_recording
from fitune.cache.recording import embedded_recordings
from fitune.render import compact_gemm, fused_letters, microseconds
from fitune.tactic import Tactic

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "docs" / "data"
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


# ---- what fills the template -------------------------------------------------------------------------------------


def run_values(recording: Recording, cells: Cells) -> dict[str, Any]:
    environment = next(iter(recording.environments.values()))
    states = [cell.decision.state for cell in cells]
    return {
        "torch": environment.torch,
        "triton": environment.triton,
        "driver": environment.driver,
        "power_cap_w": environment.power_cap_w,
        "bf16_recorded": recording.note.partition(" in ")[0],
        "fp8_recorded": load_recording(recording_of("fp8_block128")).note.partition(" in ")[0],
        "num_peers": len({name for cell in cells for name in cell.peer.times_us}),
        "states": ", ".join(f"{states.count(state)} {state}" for state in ("tuned", "tie", "default")),
    }


def recording_of(dtype: str) -> Path:
    """The shipped recording of a dtype."""
    return next(path for path in embedded_recordings() if path.stem.endswith(dtype))


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
        **layer_values(read_rows(DATA / "layer_h200_bf16.csv"), "bf16", table),
        **layer_values(read_rows(DATA / "layer_h200_fp8_block128.csv"), "fp8", table),
        **gemm_values(cells),
        **diff_values({ep: side_of_ep(recording, ep) for ep in by_ep(cells)}, table, short),
        **dispatch_values(DATA / "dispatch_h200.json"),
    }
    return flowed((HERE / "results_template.md").read_text(encoding="utf-8").format_map(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA.parent, help="folder for results.md and images/")
    parser.add_argument("--no-images", action="store_true", help="only the page")
    given = parser.parse_args()
    recording = load_recording(recording_of("bf16"))
    cells = read_cells(recording, read_peers(DATA / "peers_h200_bf16.csv"))
    images = given.out / "images"
    images.mkdir(parents=True, exist_ok=True)
    (given.out / "results.md").write_text(page(recording, cells), encoding="utf-8")
    kernels = (DATA.parent / "kernels.md").read_text(encoding="utf-8")
    tables = axis_tables(recording, table)
    (given.out / "kernels.md").write_text(with_axes(kernels, tables), encoding="utf-8")
    if not given.no_images:
        from results_plots import draw_layer_times, draw_ratios

        draw_layer_times(cells, recording.environments, images)
        draw_ratios(cells, images)
    print(f"{given.out / 'results.md'}: {len(cells)} cells")


if __name__ == "__main__":
    main()
