"""Make the README's picture of a terminal: `fitune diff` after a search on the shipped recording, as in `make demo`.

    python scripts/make_diff_picture.py [--out docs/images/diff.svg] [--ep 1,8]

Searches all cells first (about a minute, no GPU, no torch).
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console

from fitune.cache import open_store
from fitune.cli import main as fitune
from fitune.diff import diff_sides, side_of
from fitune.models import preset
from fitune.render import picture, print_diff

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "diff.svg"
STORE = "demo-store"
COLUMNS = 100


def with_local_fonts(svg: str) -> str:
    """The picture without fonts from the network: pages that embed it do not load them anyway."""
    svg = re.sub(r"\s*@font-face \{.*?\n    \}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    return svg.replace("font-family: arial", "font-family: Helvetica, Arial, 'DejaVu Sans', sans-serif")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--ep", default="1,8", metavar="A,B")
    given = parser.parse_args()
    out, sizes = given.out.resolve(), [int(size) for size in given.ep.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        grid = ["--model", "deepseek-v3", "--dtype", "bf16", "--ep", "1,8,16", "--measurer", "recording"]
        code = fitune(["search", *grid, "--store", STORE])
        if code:
            return code
        store, experts = open_store(Path(STORE)), preset("deepseek-v3").shape.num_experts
        a, b = (side_of(store, label=f"EP {size}", local_experts=experts // size) for size in sizes)
        os.chdir(out.parent)
    report = diff_sides(a, b)

    def draw(console: Console) -> None:
        print_diff(report, console)

    svg = picture(draw, f"fitune diff --store {STORE} --ep {given.ep}", COLUMNS)
    out.write_text(with_local_fonts(svg), encoding="utf-8")
    print(f"{out}: {len(report.differing)} rows that differ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
