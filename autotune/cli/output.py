"""Data goes to stdout, talk to stderr; colour only where it is wanted."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH: Final = 240
LEAST_WIDTH: Final = 40
"""Narrower tables would lose whole columns; lines run over instead."""


def say(text: str) -> None:
    """One line of talk, on stderr."""
    print(text, file=sys.stderr, flush=True)


def emit_json(value: object) -> None:
    """One JSON document, on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout or stderr. A pipe gets wide, uncoloured lines unless COLUMNS says otherwise."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    made = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    made.width = max(made.width, LEAST_WIDTH)
    return made
