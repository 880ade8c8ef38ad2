"""`fitune import`: the group of commands that read other programs' files into a store."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="Read files of other programs' formats into a store.", no_args_is_help=True, rich_markup_mode=None
)
