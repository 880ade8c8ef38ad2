"""How kernels are started: every launch goes through a `Launcher`, so one code path runs, compiles or records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Launcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], Mapping[str, Any]], None]
"""Called with a kernel, its grid, its positional arguments, and its constants with `num_warps` and the like."""


def run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
    """Launch a kernel."""
    kernel[grid](*args, **meta)
