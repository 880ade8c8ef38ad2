"""What the search harness finds, kept and shown: rows, their CSV, tables in Markdown, and the plot."""

from __future__ import annotations

import csv
import gzip
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from fitune.tactic import STAGES

SAMPLERS: Final = {
    "pool": "pool", "pool-cold": "pool", "random": "random", "tpe": "tpe", "gp": "gp", "cost": "exhaustive",
}  # fmt: skip
"""Label in tables -> sampler of the plan. Only `pool` sees neighbours."""
WORDS: Final = {
    "pool": "pool, with neighbours",
    "pool-cold": "pool, cold",
    "random": "random",
    "tpe": "Optuna's TPE",
    "gp": "Optuna's GP",
    "cost": "in cost order",
}
COLOURS: Final = {
    "pool": "#0b6e4f",
    "pool-cold": "#4c9be8",
    "random": "#9a9a9a",
    "tpe": "#d9822b",
    "gp": "#7b5ea7",
    "cost": "#b8a200",
}
WHATS: Final = ("gemm1", "gemm2", "pair", "layer")


@dataclass(frozen=True, slots=True)
class Row:
    """One key, part, sampler, seed and budget: µs of what was found and of the best recorded. `pool` counts the
    recorded candidates of the part (both GEMMs' for a pair or layer), `measured` those that were tried."""

    ep: str
    local_experts: int
    tokens: int
    what: str
    sampler: str
    seed: int
    budget: int
    measured: int
    pool: int
    found_us: float
    best_us: float

    @property
    def regret(self) -> float:
        return self.found_us / self.best_us - 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """Regret of one GEMM of one key after each of the first measurements of one run."""

    sampler: str
    pool: int
    regrets: tuple[float, ...]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Gzip without a time stamp: the same rows give the same file."""
    text = io.StringIO()
    names = [field.name for field in fields(Row)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "regret"])
    for row in rows:
        values = [getattr(row, name) for name in names]
        times = [f"{value:.5g}" if isinstance(value, float) else value for value in values]
        writer.writerow([*times, f"{row.regret:.5f}"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))


def read_rows(path: Path) -> list[Row]:
    types: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
    with gzip.open(path, "rt", newline="") as file:
        return [
            Row(**{field.name: types[str(field.type)](line[field.name]) for field in fields(Row)})
            for line in csv.DictReader(file)
        ]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between order statistics, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(rows: Iterable[Row]) -> dict[tuple[str, str, int], list[Row]]:
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.what, row.sampler, row.budget), []).append(row)
    order = {what: place for place, what in enumerate(WHATS)} | {name: place for place, name in enumerate(SAMPLERS)}
    return dict(sorted(groups.items(), key=lambda item: (order[item[0][0]], item[0][2], order[item[0][1]])))


def print_summary(title: str, rows: Sequence[Row]) -> None:
    print(f"\n{title}\n")
    print("| regret of | measurements per GEMM | sampler | median | 90th percentile | worst | within 1 % | runs |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for (what, sampler, budget), group in summary(rows).items():
        regrets = [row.regret for row in group]
        near = sum(regret <= 0.01 for regret in regrets) / len(regrets)
        figures = f"{statistics.median(regrets):.2%} | {quantile(regrets, 0.9):.2%} | {max(regrets):.1%} | {near:.0%}"
        print(f"| {what} | {budget} | {WORDS[sampler]} | {figures} | {len(regrets)} |")


def print_cells(rows: Sequence[Row], what: str, sampler: str, budget: int) -> None:
    """Median and worst regret over the seeds, a line per token count and a column per EP."""
    cells: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        if (row.what, row.sampler, row.budget) == (what, sampler, budget):
            cells.setdefault(row.tokens, {}).setdefault(row.ep, []).append(row.regret)
    labels = list(dict.fromkeys(label for line in cells.values() for label in line))
    print(f"\nregret of {what}, {WORDS[sampler]}, {budget} measurements per GEMM: median (worst) over seeds\n")
    print("| tokens | " + " | ".join(labels) + " |")
    print("| ---: |" + " ---: |" * len(labels))
    for tokens, line in sorted(cells.items()):
        texts = [f"{statistics.median(line[at]):.1%} ({max(line[at]):.1%})" if at in line else "" for at in labels]
        print(f"| {tokens} | " + " | ".join(texts) + " |")


def plot(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Median and 90th percentile of the regret against measurements, a line per sampler."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True, layout="constrained")
    for axis, (name, share) in zip(axes, (("median", 0.5), ("90th percentile", 0.9)), strict=True):
        for sampler in SAMPLERS:
            own = [curve.regrets for curve in curves if curve.sampler == sampler]
            if own:
                line = [100.0 * quantile(values, share) for values in zip(*own, strict=True)]
                axis.plot(range(1, len(line) + 1), line, color=COLOURS[sampler], lw=2, label=WORDS[sampler])
        axis.set_yscale("symlog", linthresh=1.0)
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axis.set_yticks([0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200])
        axis.set_ylim(0, 200)
        axis.set_xlim(1, max(len(curve.regrets) for curve in curves))
        axis.axhline(1.0, color="black", lw=0.6, ls=":")
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_xlabel("measurements of one GEMM")
        axis.grid(axis="y", color="#e6e6e6", lw=0.7)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("regret against the recording's best")
    axes[1].legend(frameon=False, loc="upper right")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def report(rows: Sequence[Row], budgets: Sequence[int]) -> None:
    print_summary("all GEMMs and cells", rows)
    large = [row for row in rows if row.what in STAGES and row.pool > max(budgets)]
    if large:
        print_summary(f"GEMMs with more than {max(budgets)} recorded candidates", large)
    middle = sorted(budgets)[len(budgets) // 2]
    for what in ("pair", "layer"):
        print_cells(rows, what, "pool", middle)
