"""`fitune importance`: which axes of a tactic decide a GEMM's time, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fitune.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from fitune.search.importance import AxisImportance, GemmImportance, ValueEffect

EXAMPLES = """\b
Examples:
  fitune importance --store tuned --ep 8 --tokens 64,4096
  fitune importance --store tuned --all
  fitune importance --store tuned --ep 8 --html charts
  fitune importance --store tuned --json | jq '.readings'"""
SHOWN_SHARE: Final = 0.05
"""Axes with less of the importance are left to --all."""
MANY: Final = 10
"""More GEMMs than these are announced, so that nobody thinks the command hangs."""
LEGEND: Final = (
    "importance: share of PED-ANOVA's over all axes, with its 90 % interval; +: more than chance gives. "
    "values: the best time with each over the best of all; ?: fewer than 5 stages had it."
)


def register(app: typer.Typer) -> None:
    app.command("importance", short_help="Show which axes of a tactic decide its time.", epilog=EXAMPLES)(importance)


def importance(
    store: options.StoreDir = None,
    ep: options.EpFilter = None,
    tokens: options.TokensFilter = None,
    all_axes: Annotated[bool, typer.Option("--all", help="All axes, those of little importance too.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="DIR", parser=options.some_path, help="Also write Optuna's charts, one page a GEMM."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show which axes of a tactic decide each GEMM's time, from the stages that were measured.

    Importances are Optuna's PED-ANOVA: how differently the fastest quarter of the stages chose on an axis than all of
    them did. From few stages that is luck: each has an interval, + marks those that chance alone does not give (all
    axes of a GEMM taken together, one in 20), and GEMMs with fewer than 12 stages get none. A value's own line, the
    best time with it over the best of all, is plain measurement. It takes a second or two per GEMM.
    """
    from fitune.cache import open_store
    from fitune.cells import grid_of
    from fitune.cli.output import console, emit_json, say
    from fitune.cli.show import select_keys
    from fitune.search.history import histories
    from fitune.search.importance import importance_of, reading

    path = options.store_path(store)
    if html is not None:
        from fitune.search.charts import check_charts

        check_charts()
    found = histories(open_store(path))
    kept = select_keys([item.key for item in found], ep, tokens)
    found = [item for item in found if item.key in kept]
    if html is not None:
        from fitune.search.charts import write_charts

        say(f"charts: {write_charts(found, html)[0]}")
    if len(found) > MANY:
        say(f"{len(found)} GEMMs, a second or two each; --ep and --tokens choose fewer")
    gemms = [importance_of(item) for item in found]
    layers = [(grid, list(members)) for grid, members in groupby(gemms, key=lambda item: grid_of(item.key.layer))]
    if json:
        readings = [{"layer": list(grid), "reading": reading(members)} for grid, members in layers]
        emit_json({"store": str(path), "gemms": [_gemm_json(item) for item in gemms], "readings": readings})
        return
    if not gemms:
        say(f"no stages in {path}; fill it with: fitune search --model deepseek-v3 --ep 1,8,16 --store {path}")
        return
    terminal = console()
    for grid, members in layers:
        _print_layer(grid, members, terminal, all_axes=all_axes)
    from fitune.render import print_legend

    print_legend(LEGEND, terminal)


def _print_layer(
    grid: tuple[str, ...], members: Sequence[GemmImportance], terminal: Console, *, all_axes: bool
) -> None:
    """The GEMMs of one layer, each a line and a table of its axes, and what they add up to."""
    from rich.text import Text

    from fitune.render import cut, plain_table, print_table
    from fitune.search.importance import reading

    terminal.print(Text(f"{grid[0]}: {', '.join(grid[1:])}", style="bold"), soft_wrap=True)
    for item in members:
        terminal.print(Text(_heading(item), style="bold"), soft_wrap=True)
        table = plain_table(
            ("  axis", "left"), ("importance", "right"), ("90 %", "right"), ("", "left"), ("values", "left"),
            shrinking=("values",),
        )  # fmt: skip
        shown = [axis for axis in item.axes if all_axes or axis.share is None or axis.share >= SHOWN_SHARE]
        for axis in shown:
            values = ", ".join(map(_effect_text, axis.effects))
            table.add_row(f"  {axis.axis}", *_importance_cells(axis), cut(values))
        if shown:
            print_table(table, terminal)
    terminal.print(Text(f"{reading(members)}.", style="bold"), soft_wrap=not terminal.is_terminal)


def _heading(item: GemmImportance) -> str:
    from fitune.cli.progress import key_name
    from fitune.render import microseconds, signed_percent

    failed = f", {item.failed} failed" if item.failed else ""
    where = f"{key_name(item.key)} {item.part}: {item.stages} stages{failed}"
    if item.best_us is None or item.median_us is None or item.worst_us is None:
        return f"{where}, none with a time"
    spread = f"median {signed_percent(item.median_us / item.best_us - 1)}, worst {item.worst_us / item.best_us:.2f}x"
    return f"{where}, best {microseconds(item.best_us)} µs, {spread}{f' ({item.reason})' if item.reason else ''}"


def _importance_cells(axis: AxisImportance) -> tuple[str, str, str]:
    if axis.share is None or axis.low is None or axis.high is None:
        return "-", "-", ""
    return f"{100 * axis.share:.0f}%", f"{100 * axis.low:.0f}-{100 * axis.high:.0f}", "+" if axis.above_chance else ""


def _effect_text(effect: ValueEffect) -> str:
    from fitune.render import signed_percent

    name = str(effect.value).lower() if isinstance(effect.value, bool) else str(effect.value or "-")
    worse = "best" if effect.ratio == 1.0 else signed_percent(effect.ratio - 1.0)
    return f"{name} {worse}{'?' if effect.is_thin else ''}"


def _gemm_json(item: GemmImportance) -> dict[str, object]:
    """Plain JSON values; times in µs, importances null where there are too few stages."""
    key = item.key
    return {
        "tokens": key.num_tokens,
        "ep": key.layer.ep_label,
        "local_experts": key.layer.local_experts,
        "gemm": item.part,
        "stages": item.stages,
        "failed": item.failed,
        "best_us": item.best_us,
        "median_us": item.median_us,
        "worst_us": item.worst_us,
        "reason": item.reason,
        "axes": [
            {
                "axis": axis.axis,
                "importance": axis.share,
                "low": axis.low,
                "high": axis.high,
                "above_chance": axis.above_chance,
                "values": [{**asdict(effect), "few_stages": effect.is_thin} for effect in axis.effects],
            }
            for axis in item.axes
        ],
        "environment": item.environment_id,
        "layer": asdict(key.layer),
    }
