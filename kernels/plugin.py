"""The launching halves of families: found by name, imported at the first launch, never sooner."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from fitune.errors import InputError
from fitune.kernels.launch import Launcher
from fitune.tactic import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from fitune.kernels.layer import LayerArgs, Workspace

StageRunner = Callable[[Stage, "LayerArgs", "Workspace", "Tensor", Launcher], None]
"""Runs one stage: gemm1 fills ws.hidden, gemm2 reads it and fills out [N, H]. Never waits for the GPU."""


@cache
def launching_half(where: str) -> StageRunner:
    """The function that `package.module:function` names. Raises InputError."""
    module, _, function = where.partition(":")
    try:
        found: StageRunner = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{where} cannot launch ({error}); fix or uninstall the package of that family") from error
    return found


def compiles_only(launch: Launcher) -> bool:
    """Whether a launcher only compiles: then buffers hold nothing, and what is no kernel launch must not run."""
    return bool(getattr(launch, "compiles_only", False))
