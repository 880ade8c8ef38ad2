"""`fitune diff`: where two sets of decisions differ, why, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fitune.cli import options
from fitune.errors import InputError

if TYPE_CHECKING:
    from fitune.diff import DiffReport, Side

EXAMPLES = """\b
Examples:
  fitune diff --store tuned --ep 1,8
  fitune diff --store tuned --ep 1,8,16 --json
  fitune diff tuned-on-monday tuned-on-friday --exit-code
  fitune diff fp16-tune bf16-tune --align rows --all

\b
Verdicts, first that holds: not_enumerated, not_legal, other_bucket, stale, other_regime, other_routing, tie,
real; undecided where the records do not tell, only_a and only_b where one side has no such cell."""


def register(app: typer.Typer) -> None:
    app.command("diff", short_help="Explain why two EP sizes or two stores differ.", epilog=EXAMPLES)(diff)


def diff(
    stores: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[STORE_A STORE_B]", help="Two stores to compare.", show_default=False),
    ] = None,
    store: options.StoreDir = None,
    ep: Annotated[
        str | None,
        typer.Option("--ep", metavar="LIST", help="Sizes inside one store: the first against each other one."),
    ] = None,
    align: Annotated[
        str, typer.Option("--align", metavar="tokens|rows", help="Compare at equal tokens or equal rows per expert.")
    ] = "tokens",
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 1 when a difference is real.")] = False,
    all_rows: Annotated[bool, typer.Option("--all", help="Show rows that agree, too.")] = False,
    json: options.Json = False,
) -> None:
    """Explain why two EP sizes of a store, or two stores, chose different tactics, and whether it matters.

    Every row that differs gets a verdict and a sentence. "on other" is what a side's tactic costs on the other
    side's problem against the choice made there; a trailing ~ marks a sum of separately measured stages, ? an
    estimate that decides nothing.
    """
    from fitune.diff import Verdict, diff_sides, to_json

    if align not in ("tokens", "rows"):
        raise InputError(f"--align {align!r} is not known; use tokens or rows")
    reports = [diff_sides(a, b, align) for a, b in _pairs(stores or [], store, ep)]  # type: ignore[arg-type]
    if json:
        from fitune.cli.output import emit_json

        emit_json({"diffs": [to_json(report) for report in reports]})
    else:
        _print(reports, all_rows)
    if exit_code and any(Verdict.REAL in report.counts for report in reports):
        raise typer.Exit(1)


def _pairs(stores: list[Path], store: Path | None, ep: str | None) -> list[tuple[Side, Side]]:
    """The pairs of sides a command line names. Raises InputError."""
    from fitune.cache import open_store
    from fitune.diff import side_of

    if len(stores) == 2 and store is None:
        a, b = (side_of(open_store(path), label=label) for path, label in zip(stores, _labels(*stores), strict=True))
        if ep is None:
            return [(a, b)]
        return [(_narrowed(a, size), _narrowed(b, size)) for size in _sizes(ep, 1)]
    if stores:
        raise InputError(f"{_given(stores, store)}; name two stores, or one with --store DIR --ep 1,8")
    if ep is None:
        raise InputError("nothing to compare; use --store DIR --ep 1,8 or name two stores")
    first, *others = _sizes(ep, 2)
    whole = side_of(open_store(options.store_path(store)), label="")
    return [(_narrowed(whole, first), _narrowed(whole, other)) for other in others]


def _given(stores: list[Path], store: Path | None) -> str:
    count = f"{len(stores)} store{'s are' if len(stores) > 1 else ' is'} given"
    return count if store is None else f"{count} beside --store {store}"


def _labels(a: Path, b: Path) -> tuple[str, str]:
    """Short names of two stores that tell them apart."""
    return (a.name, b.name) if a.name and b.name and a.name != b.name else (str(a), str(b))


def _sizes(text: str, least: int) -> list[int]:
    """EP sizes in the order given, each once."""
    from fitune.cli.inputs import whole_numbers

    sizes = list(dict.fromkeys(size for item in text.split(",") for size in whole_numbers(item, "--ep")))
    if len(sizes) < least:
        raise InputError(f"--ep {text}: one size has nothing to be compared with; give two or more, like 1,8")
    return sizes


def _narrowed(side: Side, size: int) -> Side:
    """What a side holds for ranks of an EP group of `size`; where experts split unevenly, for the fuller ranks."""
    from fitune.cli.inputs import ep_labels
    from fitune.problem import local_experts_of_ep

    held = {key.layer for key in side.decisions}
    kept = {
        layer
        for layer in held
        if size <= layer.num_experts and layer.local_experts == local_experts_of_ep(layer.num_experts, size)[0]
    }
    label = f"{side.label} EP {size}".strip()
    if not kept:
        have = ep_labels(held) or "no tuned cells"
        raise InputError(f"--ep {size}: {side.label or 'the store'} has no such cells; it has {have}")
    return replace(
        side,
        label=label,
        decisions={key: decision for key, decision in side.decisions.items() if key.layer in kept},
        records=[record for record in side.records if record.key.layer in kept],
    )


def _print(reports: list[DiffReport], all_rows: bool) -> None:
    from fitune.cli.output import console
    from fitune.render import print_diff

    screen = console()
    for number, found in enumerate(reports):
        if number:
            screen.print()
        print_diff(found, screen, all_rows=all_rows)
