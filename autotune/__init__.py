"""fitune: finds, keeps and explains the fastest tactic for every mixture-of-experts problem a GPU will meet.

Importing this module imports nothing heavy; torch comes with the first use of `fused_moe` or `Dispatcher`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fitune.cache import load_table as load_table
    from fitune.dispatch import Dispatcher as Dispatcher
    from fitune.dispatch import fused_moe as fused_moe
    from fitune.problem import LayerShape as LayerShape
    from fitune.problem import Problem as Problem

    __version__: str

__all__ = ["Dispatcher", "LayerShape", "Problem", "__version__", "fused_moe", "load_table"]


def __getattr__(name: str) -> Any:
    home = {
        "Dispatcher": "fitune.dispatch",
        "LayerShape": "fitune.problem",
        "Problem": "fitune.problem",
        "fused_moe": "fitune.dispatch",
        "load_table": "fitune.cache",
    }.get(name)
    if home is not None:
        value = getattr(import_module(home), name)
    elif name == "__version__":
        value = import_module("fitune.target").version_of("fitune")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
