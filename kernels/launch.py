"""How kernels are started: every launch goes through a `Launcher`, so one code path runs, compiles or records."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
"""Whether kernels run in Triton's interpreter."""

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], Mapping[str, Any]], None]
"""Called with a kernel, its grid, its positional arguments, and its constants with `num_warps` and the like."""


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
    """Launch a kernel."""
    kernel[grid](*args, **meta)


def pdl_options(wanted: bool) -> dict[str, bool]:
    """The constants of a launch with or without programmatic dependent launch, which the interpreter has not."""
    return {"PDL": True, "launch_pdl": True} if wanted and not INTERPRETED else {"PDL": False}
