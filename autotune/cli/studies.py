"""`fitune export optuna`: a store's stages as Optuna studies, for optuna-dashboard and whoever reads Optuna."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fitune.cli import options

if TYPE_CHECKING:
    from fitune.search.history import History

EXAMPLES = """\b
Examples:
  fitune export optuna --store tuned --ep 8 --out tuned.db
  optuna-dashboard sqlite:///tuned.db"""


def register(exports: typer.Typer) -> None:
    exports.command("optuna", short_help="Write stages as Optuna studies, one SQLite file.", epilog=EXAMPLES)(
        export_optuna
    )


def export_optuna(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", parser=options.some_path, help="The SQLite file to make.")
    ],
    store: options.StoreDir = None,
    ep: options.EpFilter = None,
    tokens: options.TokensFilter = None,
) -> None:
    """Write the stages of every key and GEMM as an Optuna study, all into one new SQLite file.

    Optuna and optuna-dashboard read it as sqlite:///FILE. A stage with a time is a finished trial with its µs as value,
    one without a failed trial with the reason as attribute; tactic text, status, interval, clocks and environment stand
    in each trial's attributes. Stages measured again are written once, those of other kernels not at all. A trial takes
    some 0.1 s.
    """
    from fitune.cache import open_store
    from fitune.cli.output import say
    from fitune.cli.show import select_keys
    from fitune.errors import InputError
    from fitune.search.export import check_new, export_studies
    from fitune.search.history import histories

    check_new(out)
    path = options.store_path(store)
    found = histories(open_store(path))
    kept = select_keys([item.key for item in found], ep, tokens)
    found = [item for item in found if item.key in kept]
    if not found:
        raise InputError(f"no stages in {path}; fill it with: fitune search --model deepseek-v3 --store {path}")
    count = export_studies(_told(found), out)
    left_out = sum(item.left_out for item in found)
    say(f"{out}: {count} trials in {len(found)} studies{f'; {left_out} older records left out' if left_out else ''}")


def _told(found: list[History]) -> Iterator[History]:
    """The histories one by one, each announced on stderr."""
    from fitune.cli.output import say
    from fitune.cli.progress import key_name

    for number, item in enumerate(found, start=1):
        say(f"[{number}/{len(found)}] {key_name(item.key)} {item.part}: {len(item.records)} trials")
        yield item
