"""The command tree, and the border where every error becomes one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Final

import typer

from fitune.cli import (
    cache,
    diff,
    env,
    exports,
    grid,
    importance,
    imports,
    record,
    search,
    show,
    space,
    studies,
    t4,
    verify,
)
from fitune.errors import FituneError

EXTRA_OF: Final[dict[str, str]] = {
    "optuna": "search",
    "matplotlib": "plot",
    "plotly": "html",
    "rich": "cli",
    "torch": "gpu",
    "triton": "gpu",
}
INTERRUPTED: Final = 130
MAX_WORD: Final = 300
"""Longer words of an error are shown by their beginning and end."""
BROKEN_PIPE: Final = 141

app = typer.Typer(
    name="fitune",
    help="Find, keep and explain the fastest tactic for every mixture-of-experts problem a GPU will meet.",
    epilog="""\b
Examples:
  fitune search --model deepseek-v3 --ep 1,8,16 --store tuned
  fitune show --store tuned
  fitune diff --store tuned --ep 1,8

\b
Exit codes: 0 done, 1 found something, 2 bad usage or input, 3 no usable GPU.""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from fitune.target import version_of

        print(f"fitune {version_of('fitune')}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
) -> None:
    pass


for module in (search, show, diff, importance, space, grid, record, verify, env):
    module.register(app)
app.add_typer(cache.app, name="cache")
t4.register(exports.app, imports.app)
studies.register(exports.app)
app.add_typer(exports.app, name="export")
app.add_typer(imports.app, name="import")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; nothing but our own bugs leaves as an exception."""
    # A stream the shell has closed is None; what would go there is dropped.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no µ gets a question mark
    try:
        code = _invoke(list(arguments))
        sys.stdout.flush()
        return code
    except FituneError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        return _fail(_os_error_text(error), 2)
    except ModuleNotFoundError as error:
        extra = EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _fail(f"this command needs {error.name}; install it with: pip install 'fitune[{extra}]'", 2)


def _invoke(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("fitune", arguments) as context:
            command.invoke(context)
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    except usage_error_type() as error:
        return _usage_failure(error)
    return 0


def usage_error_type() -> type[Exception]:
    """The exception typer raises for wrong usage: its own click's, or the click beside it in older releases."""
    return typer.BadParameter.__mro__[2]


def _usage_failure(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "fitune"
    text = error.format_message()  # type: ignore[attr-defined]
    if context is not None and text == context.get_help():
        print(text, file=sys.stderr)
        return 2
    return _fail(f"{text.rstrip('.')} (see '{path} --help')", 2)


def _os_error_text(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error)
    advice = {
        errno.ENOSPC: "; free some space and run the same command again, nothing recorded so far is lost",
        errno.EACCES: "; check its permissions or choose another place",
        errno.EROFS: "; choose a place that can be written",
    }
    return f"{where}{what}{advice.get(error.errno or 0, '')}"


def _fail(text: str, code: int) -> int:
    words = (word if len(word) <= MAX_WORD else f"{word[: MAX_WORD // 2]}...{word[-20:]}" for word in text.split())
    print(f"fitune: error: {' '.join(words)}", file=sys.stderr)
    return code
