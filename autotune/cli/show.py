"""`fitune show`: what a store holds, one line a cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import typer

from fitune.cli import options
from fitune.errors import InputError

if TYPE_CHECKING:
    from fitune.cache import Store
    from fitune.cells import Cell
    from fitune.problem import Key
    from fitune.record import Decision

EXAMPLES = """\b
Examples:
  fitune show --store tuned
  fitune show --store tuned --ep 8,16 --tokens 1024:16384
  fitune show --store tuned --json | jq '.cells[].tactic'"""


def register(app: typer.Typer) -> None:
    app.command("show", short_help="Show the tactics of a store, one line a cell.", epilog=EXAMPLES)(show)


def show(
    store: options.StoreDir = None,
    ep: options.EpFilter = None,
    tokens: options.TokensFilter = None,
    json: options.Json = False,
) -> None:
    """Show the tactics of a store: one line a cell.

    µs is the median of the chosen tactic with the half width of its 95 % interval, "vs def" its time against the
    default's in the same interleaved run. States: tuned (faster than the default beyond noise), tie (the default is
    as good), default (the default stayed), stale (measured with other kernel sources).
    """
    from fitune.cache import open_store
    from fitune.cells import cell_json
    from fitune.cli.output import console, emit_json, say

    path = options.store_path(store)
    opened = open_store(path)
    cells = select(read_cells(opened), ep, tokens)
    if json:
        emit_json({"store": str(path), "cells": [cell_json(cell) for cell in cells]})
        return
    if not cells:
        say(f"no tuned cells in {path}; fill it with: fitune search --model deepseek-v3 --ep 1,8,16 --store {path}")
        return
    from fitune.render import print_cells

    print_cells(cells, console())


def read_cells(store: Store, decisions: Sequence[Decision] | None = None) -> list[Cell]:
    """The store's latest decisions (or those given) as cells."""
    from fitune.cells import cells_of
    from fitune.target import kernel_source_hash

    chosen = list(store.decisions().values()) if decisions is None else decisions
    return cells_of(chosen, store.environments(), kernel_source_hash())


def select(cells: list[Cell], ep: str | None, tokens: str | None) -> list[Cell]:
    """The cells of the named EP sizes and token counts. Raises InputError where a name fits none of them."""
    kept = select_keys([cell.key for cell in cells], ep, tokens)
    return [cell for cell in cells if cell.key in kept]


def select_keys(keys: Iterable[Key], ep: str | None, tokens: str | None) -> set[Key]:
    """The keys of the named EP sizes and token counts. Raises InputError where a name fits none of them."""
    from fitune.cli.inputs import ep_labels, whole_numbers
    from fitune.problem import local_experts_of_ep

    kept = set(keys)
    if ep is not None:
        chosen: set[Key] = set()
        for size in whole_numbers(ep, "--ep"):
            found = {
                key
                for key in kept
                if size <= key.layer.num_experts
                and key.layer.local_experts in local_experts_of_ep(key.layer.num_experts, size)
            }
            if not found:
                held = ep_labels(key.layer for key in kept) or "none at all"
                raise InputError(f"--ep {size}: the store has no such cells; it has {held}")
            chosen |= found
        kept = chosen
    if tokens is not None:
        wanted = set(whole_numbers(tokens, "--tokens"))
        held_counts = sorted({key.num_tokens for key in kept})
        kept = {key for key in kept if key.num_tokens in wanted}
        if not kept:
            have = ",".join(map(str, held_counts)) or "none at all"
            raise InputError(f"--tokens {tokens}: the store has no such cells; it has {have}")
    return kept
