"""What the enumeration of a side would have done with a stage it never tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from fitune import space
from fitune.problem import Problem
from fitune.tactic import TILE_SIZES, GemmTactic, Stage
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
)
STAGE_AXES: Final = ("family", "tile_size", "gather", "activation", "finalize")


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
    for axis, values in _axes(stage).items():
        if value_on(stage, axis) not in values:
            listed = ", ".join(_word(value) for value in values)
            return Refusal(
                "dropped", f"{axis}: {_word(value_on(stage, axis))} is not one of the values tried ({listed})"
            )
    return None


def is_resource(reason: str) -> bool:
    """Whether a reason of the legality function is about what can run rather than what is worth trying."""
    return space.rule_of(reason) in space.RESOURCE_RULES


def value_on(stage: Stage, axis: str) -> Any:
    """A stage's value on one axis; `loop` joins the persistent loop's three."""
    gemm = stage.gemm
    if axis == "loop":
        return (gemm.schedule, gemm.programs_per_sm, gemm.flatten)
    return getattr(gemm if axis in GEMM_AXES else stage, axis)


def _axes(stage: Stage) -> dict[str, tuple[Any, ...]]:
    if stage.family == "gemv":
        return {
            "block_n": space.gemv_block_n(stage.stage),
            "block_k": space.GEMV_BLOCK_K,
            "num_warps": space.GEMV_WARPS,
            "loop": space.GEMV_LOOPS,
        }
    return {
        "tile_size": TILE_SIZES,
        "block_n": space.BLOCK_N,
        "block_k": space.BLOCK_K,
        "num_warps": space.NUM_WARPS,
        "num_stages": space.NUM_STAGES,
        "loop": space.LOOPS,
        "loads": space.LOADS,
        "group_m": space.GROUP_M,
    }


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        schedule, programs, flatten = value
        text = str(GemmTactic(1, 1, schedule=schedule, programs_per_sm=programs, flatten=flatten))
        return text.split("/")[4]
    return str(value)
