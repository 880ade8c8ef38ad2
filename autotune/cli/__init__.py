"""fitune at a terminal. `main` is the console entry; nothing heavy is imported until a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code.

    0 done, 1 found something, 2 bad usage or input, 3 no usable GPU, 130 interrupted.
    """
    try:
        from fitune.cli.app import run
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "click", "pydantic"):
            raise
        print(
            f"fitune: error: the command line needs {error.name}; install it with: pip install 'fitune[cli]'",
            file=sys.stderr,
        )
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
