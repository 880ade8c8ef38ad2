"""`fitune cache`: where stores are, what is in them, and keeping them whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fitune.cli import options

app = typer.Typer(
    help="Look after stores: dir, list, check, merge, prune.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="""\b
Examples:
  fitune cache dir
  fitune cache list --store tuned
  fitune cache check --store tuned
  fitune cache merge --store tuned from-host-a from-host-b
  fitune cache prune --store tuned --dry-run""",
)


@app.command("dir", short_help="Print the default store directory.", epilog="\b\nExample:\n  fitune cache dir")
def directory(json: options.Json = False) -> None:
    """Print the default store directory ($FITUNE_HOME moves it)."""
    from fitune.settings import data_directory

    path = data_directory()
    if json:
        from fitune.cli.output import emit_json

        emit_json({"store": str(path), "exists": path.is_dir()})
    else:
        print(path)


@app.command(
    "list", short_help="List the layers a store holds.", epilog="\b\nExample:\n  fitune cache list --store tuned"
)
def list_(store: options.StoreDir = None, json: options.Json = False) -> None:
    """List the layers a store holds, with their cells and measurements."""
    from fitune.cache import open_store
    from fitune.cells import layer_facts, layer_name

    path = options.store_path(store)
    opened = open_store(path)
    records = Counter(record.key.layer for record in opened.records())
    cells = Counter(key.layer for key in opened.decisions())
    layers = sorted({*records, *cells}, key=lambda layer: (layer_name(layer), layer_facts(layer), -layer.local_experts))
    if json:
        from fitune.cli.output import emit_json

        rows: list[dict[str, Any]] = [
            {"layer": asdict(layer), "cells": cells[layer], "records": records[layer]} for layer in layers
        ]
        emit_json({"store": str(path), "layers": rows, "environments": len(opened.environments())})
        return
    from fitune.cli.output import console, say
    from fitune.render import plain_table, print_table

    if not layers:
        say(f"{path} is an empty store")
        return
    table = plain_table(
        ("layer", "left"), ("EP", "left"), ("cells", "right"), ("measurements", "right"), ("dtype", "left"),
        ("routing", "left"), ("dispatch", "left"), ("device", "left"),
    )  # fmt: skip
    for layer in layers:
        sizes = f"H={layer.hidden_size} I={layer.intermediate_size} E={layer.num_experts} K={layer.top_k}"
        name = f"{layer_name(layer)} {sizes}"
        counts = str(cells[layer]), str(records[layer])
        table.add_row(name, layer.ep_label, *counts, layer.dtype, layer.routing, layer.dispatch, layer.device)
    print_table(table, console())


@app.command(
    "check",
    short_help="Report what is damaged; exit 1 when something is.",
    epilog="\b\nExample:\n  fitune cache check --store tuned || echo damaged",
)
def check(store: options.StoreDir = None, json: options.Json = False) -> None:
    """Read every byte of a store and report what is damaged; exit 1 when something is."""
    from fitune.cache import open_store

    path = options.store_path(store)
    findings = open_store(path).check()
    if json:
        from fitune.cli.output import emit_json

        emit_json(
            {
                "store": str(path),
                "findings": [
                    {"file": str(item.file), "offset": item.offset, "what": item.what, "harmless": item.harmless}
                    for item in findings
                ],
            }
        )
    else:
        from fitune.cli.output import say

        for item in findings:
            print(f"{item}{' (harmless)' if item.harmless else ''}")
        if not findings:
            say(f"{path} is whole")
    if any(not item.harmless for item in findings):
        raise typer.Exit(1)


@app.command(
    "merge",
    short_help="Add what other stores hold.",
    epilog="\b\nExample:\n  fitune cache merge --store tuned from-host-a from-host-b",
)
def merge(
    sources: Annotated[
        list[Path], typer.Argument(metavar="STORE...", help="Stores to take from; they stay as they are.")
    ],
    store: options.StoreDir = None,
    json: options.Json = False,
) -> None:
    """Add everything other stores hold to one store: a union, nothing is lost and nothing stands twice."""
    from fitune.cache import Store, open_store

    opened = [open_store(source) for source in sources]
    path = options.store_path(store)
    into = Store.open(path, create=True)
    reports: list[dict[str, Any]] = [{"from": str(source.path), **_fields(into.merge(source))} for source in opened]
    into.write_table()
    if json:
        from fitune.cli.output import emit_json

        emit_json({"store": str(path), "merged": reports})
        return
    for item in reports:
        print(
            f"{item['from']}: {item['records']} records and {item['decisions']} decisions added, "
            f"{item['duplicates']} were there already"
        )


@app.command(
    "prune",
    short_help="Drop what nothing needs.",
    epilog="\b\nExample:\n  fitune cache prune --store tuned --stale --dry-run",
)
def prune(
    store: options.StoreDir = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Also drop measurements of other kernel sources than this fitune's.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: options.Json = False,
) -> None:
    """Drop what nothing needs: doubles and superseded decisions, never a decision in use.

    Damaged segments are set aside; what can be read of them stays in the store. The table is written anew.
    """
    from fitune.cache import open_store
    from fitune.target import kernel_source_hash

    path = options.store_path(store)
    opened = open_store(path)
    report = opened.prune(kernels=kernel_source_hash() if stale else None, dry_run=dry_run)
    if not dry_run:
        opened.write_table()
    if json:
        from fitune.cli.output import emit_json

        emit_json({"store": str(path), "dry_run": dry_run, **_fields(report)})
        return
    verb = "would drop" if dry_run else "dropped"
    print(
        f"{verb} {report.records_dropped} records and {report.decisions_dropped} decisions, kept "
        f"{report.records_kept} and {report.decisions_kept}; {report.bytes_before:,} -> {report.bytes_after:,} bytes"
    )
    for busy in report.busy:
        print(f"{busy}: is being written, left alone")
    for finding in report.damaged:
        print(f"{finding}; {'would be set aside' if dry_run else 'set aside'}")


def _fields(report: Any) -> dict[str, Any]:
    """A report dataclass as JSON values; paths and findings as text."""
    from dataclasses import fields

    values = {field.name: getattr(report, field.name) for field in fields(report)}
    return {
        name: [str(item) for item in value] if isinstance(value, tuple) else value for name, value in values.items()
    }
