"""`fitune export`: the group of commands that write what a store holds for other programs."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Write what a store holds in other programs' formats.", no_args_is_help=True, rich_markup_mode=None
)
