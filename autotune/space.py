"""The tactic space: what can be tried for a problem on a target, and the one legality rule with its reasons.

A candidate is a stage (one GEMM with the choices that belong to it). Each kernel family enumerates its own stages and
says why one may not be tried: first what the chip and the kernels cannot do, then what the load makes pointless. A
reason reads `rule: detail`; reports group by the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from fitune.families.gemv import GEMV_BLOCK_K, GEMV_LOOPS, GEMV_ROWS, GEMV_WARPS, gemv_block_n
from fitune.families.protocol import Family
from fitune.families.registry import BUILT_IN, families, find_family
from fitune.families.tile import BLOCK_K, BLOCK_N, GROUP_M, LOADS, LOOPS, NUM_STAGES, NUM_WARPS
from fitune.problem import LayerShape, Problem
from fitune.roofline import power_at_least, rows_of_active_expert
from fitune.tactic import STAGES, TILE_SIZES, GemmTactic, Quantize, Stage, StageName, Tactic
from fitune.target import Target

__all__ = [
    "BLOCK_K",
    "BLOCK_N",
    "FAMILIES",
    "GEMV_BLOCK_K",
    "GEMV_LOOPS",
    "GEMV_ROWS",
    "GEMV_WARPS",
    "GROUP_M",
    "LAUNCH_RULES",
    "LOADS",
    "LOOPS",
    "NUM_STAGES",
    "NUM_WARPS",
    "RESOURCE_RULES",
    "TILE_SIZES",
    "Candidate",
    "candidates",
    "default_tactic",
    "gemv_block_n",
    "legality",
    "pool",
    "rows_of_active_expert",
    "rule_of",
    "tactic_legality",
]

FAMILIES: Final = tuple(family.name for family in BUILT_IN)
"""The families fitune brings; those of installed packages come on top, see `families.families()`."""

LAUNCH_RULES: Final = frozenset(
    {"family", "form", "dtype", "scales", "quantize", "pdl", "library", "shared memory", "tma"}
)
"""Rules that say a stage cannot be launched, whatever it is worth."""
RESOURCE_RULES: Final = LAUNCH_RULES - {"family"} | {"registers", "residency", "tensor core"}
"""Rules about what the chip has; the others drop stages that could run, as not worth it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member of the enumeration; `reason` is empty when it may be tried."""

    stage: Stage
    reason: str

    @property
    def rule(self) -> str:
        """The rule that rejected it, without the detail."""
        return rule_of(self.reason)


def candidates(problem: Problem, target: Target, stage: StageName) -> list[Candidate]:
    """Every enumerated stage of the problem with its verdict, family by family."""
    found = []
    for family in families().values():
        for candidate in _static_candidates(family, problem.shape, target, stage):
            reason = candidate.reason or family.load_reason(candidate.stage, problem)
            found.append(Candidate(candidate.stage, reason) if reason != candidate.reason else candidate)
    return found


def pool(problem: Problem, target: Target, stage: StageName) -> list[Stage]:
    """The legal stages of the problem, in enumeration order."""
    return [
        item
        for family in families().values()
        for item in _static_pool(family, problem.shape, target, stage)
        if not family.load_reason(item, problem)
    ]


def legality(stage: Stage, problem: Problem, target: Target) -> str:
    """Why the stage may not be tried on the problem and target; empty when it may."""
    family = find_family(stage.family)
    if family is None:
        return f"family: {stage.family!r} is not installed"
    return _static_reason(family, stage, problem.shape, target) or family.load_reason(stage, problem)


def tactic_legality(tactic: Tactic, problem: Problem, target: Target) -> str:
    """The first reason against either half of a tactic; empty when it may run."""
    for name in STAGES:
        reason = legality(tactic.stage(name), problem, target)
        if reason:
            return f"{name}: {reason}"
    return ""


def rule_of(reason: str) -> str:
    """The rule that a reason names, without the stage before it and the detail behind it."""
    return reason.removeprefix("gemm1: ").removeprefix("gemm2: ").partition(":")[0]


@lru_cache(maxsize=64)
def _static_candidates(family: Family, shape: LayerShape, target: Target, stage: StageName) -> tuple[Candidate, ...]:
    stages = family.stages(shape, target, stage)
    return tuple(Candidate(item, _static_reason(family, item, shape, target)) for item in stages)


@lru_cache(maxsize=256)
def _static_pool(family: Family, shape: LayerShape, target: Target, stage: StageName) -> tuple[Stage, ...]:
    return () if _dtype_reason(shape, target) else tuple(family.legal_stages(shape, target, stage))


def _static_reason(family: Family, stage: Stage, shape: LayerShape, target: Target) -> str:
    return _dtype_reason(shape, target) or family.static_reason(stage, shape, target)


def _dtype_reason(shape: LayerShape, target: Target) -> str:
    if shape.scales and not target.has_fp8:
        return f"dtype: {target.arch} does not multiply fp8"
    return ""


def default_tactic(problem: Problem, target: Target) -> Tactic:
    """The untuned choice: legal for every shape, load and target, by rows per expert alone."""
    shape = problem.shape
    rows = rows_of_active_expert(problem)
    tile = min(128, max(16, power_at_least(rows)))
    stages = 3 if target.is_cuda else 2
    if shape.item_bytes > 2 or target.shared_bytes < 100_000:
        stages = 2
    quantize: Quantize = "separate" if shape.scales else "fused"
    if target.has_wgmma:
        stages = max(stages, 3)
        block_k = 128 if shape.scales else 64
        if tile <= 64:
            first = GemmTactic(128, block_k, 8, 4, stages, swap_ab=True)
            second = GemmTactic(64, block_k, 8, 4, stages, swap_ab=True)
            return Tactic("tile", tile, first, second, quantize=quantize)
        gemm = GemmTactic(128, block_k, 8, 8, stages)
        return Tactic("tile", tile, gemm, gemm, quantize=quantize)
    block_n = 64 if shape.item_bytes > 2 and target.shared_bytes < 100_000 else 128
    gemm = GemmTactic(block_n, 64 if stages > 2 else 32, 8, 4 if tile < 128 else 8, stages)
    return Tactic("tile", tile, gemm, gemm, quantize=quantize)
