"""What the enumeration of a side would have done with a stage it never tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from fitune import space
from fitune.families import family_named
from fitune.problem import Problem
from fitune.tactic import GemmTactic, LibraryGemm, Stage
from fitune.target import Target

GEMM_AXES: Final = (
    "block_n",
    "block_k",
    "group_m",
    "num_warps",
    "num_stages",
    "schedule",
    "programs_per_sm",
    "flatten",
    "loads",
    "swap_ab",
    "pdl",
    "tail",
)
OPTIONS: Final = "options"
"""The one axis of a GEMM that a library runs."""
STAGE_AXES: Final = ("family", "tile_size", "gather", "activation", "finalize", "quantize")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the space of a problem lacks a stage: it cannot run there (`illegal`), or a rule or axis leaves it out."""

    kind: Literal["illegal", "dropped"]
    reason: str


def refusal(stage: Stage, problem: Problem, target: Target) -> Refusal | None:
    """The space's reason against a stage; None where the stage is one of its members."""
    reason = space.legality(stage, problem, target)
    if reason:
        return Refusal("illegal" if is_resource(reason) else "dropped", reason)
    for axis, values in _axes(stage, problem, target).items():
        if value_on(stage, axis) not in values:
            listed = ", ".join(_word(value) for value in values)
            return Refusal(
                "dropped", f"{axis}: {_word(value_on(stage, axis))} is not one of the values tried ({listed})"
            )
    return None


def is_resource(reason: str) -> bool:
    """Whether a reason of the legality function is about what can run rather than what is worth trying."""
    return space.rule_of(reason) in space.RESOURCE_RULES


def gemm_axes(stage: Stage) -> tuple[str, ...]:
    """Axes of the stage's GEMM."""
    return (OPTIONS,) if isinstance(stage.gemm, LibraryGemm) else GEMM_AXES


def value_on(stage: Stage, axis: str) -> Any:
    """A stage's value on one axis; None on an axis of another kind of GEMM.

    `loop` joins the persistent loop's three, `options` is the text of a library's GEMM.
    """
    gemm = stage.gemm
    if isinstance(gemm, LibraryGemm):
        return str(gemm) if axis == OPTIONS else getattr(stage, axis) if axis in STAGE_AXES else None
    if axis == OPTIONS:
        return None
    if axis == "loop":
        return (gemm.schedule, gemm.programs_per_sm, gemm.flatten)
    return getattr(gemm if axis in GEMM_AXES else stage, axis)


def _axes(stage: Stage, problem: Problem, target: Target) -> Mapping[str, Sequence[Any]]:
    """Values tried on each axis: what the family lists, or what its enumeration holds where it lists none."""
    family = family_named(stage.family)
    axes = family.axes(stage.stage)
    if axes:
        return axes
    members = list(family.stages(problem.shape, target, stage.stage))
    names = ("tile_size", *gemm_axes(stage))
    return {name: tuple(dict.fromkeys(value_on(member, name) for member in members)) for name in names}


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        schedule, programs, flatten = value
        text = str(GemmTactic(1, 1, schedule=schedule, programs_per_sm=programs, flatten=flatten))
        return text.split("/")[4]
    return str(value)
