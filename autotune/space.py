"""The tactic space: what can be tried for a problem on a target, and the one legality rule with its reasons.

A candidate is a stage (one GEMM with the choices that belong to it). Legality asks the chip first (shared memory,
registers, tensor-core shape, TMA), then the kernels (combinations they cannot compile well), then the load (tiles
that would be mostly padding, axes without effect). A reason reads `rule: detail`; reports group by the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Final, Literal

from fitune.footprint import (
    RESERVED_SHARED_BYTES,
    accumulator_registers,
    gemm_size,
    programs_per_sm,
    result_columns,
    shared_memory_bytes,
)
from fitune.problem import SCALE_GROUP, LayerShape, Problem
from fitune.tactic import (
    STAGES,
    TILE_SIZES,
    GemmTactic,
    Loads,
    Quantize,
    Schedule,
    Stage,
    StageName,
    Tactic,
    num_tiles,
)
from fitune.target import Target

FAMILIES: Final[tuple[str, ...]] = ("tile", "gemv")

BLOCK_N: Final = (64, 128, 256)
BLOCK_K: Final = (32, 64, 128)
NUM_WARPS: Final = (4, 8)
NUM_STAGES: Final = (2, 3, 4, 5, 6)
GROUP_M: Final = (1, 8)
LOOPS: Final[tuple[tuple[Schedule, int, bool], ...]] = (
    ("grid", 1, False),
    ("persistent", 1, False),
    ("persistent", 2, False),
    ("persistent", 3, False),
    ("persistent", 1, True),
    ("persistent", 2, True),
)
LOADS: Final[tuple[Loads, ...]] = ("pointer", "tma")

GEMV_ROWS: Final = (2, 4, 8)
GEMV_BLOCK_K: Final = (512, 1024, 2048)
GEMV_WARPS: Final = (2, 4)
GEMV_STAGES: Final = (1, 2)
GEMV_LOOPS: Final[tuple[tuple[Schedule, int, bool], ...]] = (("grid", 1, False), ("persistent", 16, False))

MAX_GEMV_SLOTS: Final = 64
MAX_GEMV_ROWS: Final = 16
SWAP_MAX_ROWS_PER_EXPERT: Final = 160


LAUNCH_RULES: Final = frozenset({"family", "form", "dtype", "scales", "pdl", "shared memory", "tma"})
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
    """Every enumerated stage of the problem with its verdict."""
    found = []
    for candidate in _static_candidates(problem.shape, target, stage):
        reason = candidate.reason or _load_reason(candidate.stage, problem)
        found.append(Candidate(candidate.stage, reason) if reason != candidate.reason else candidate)
    return found


def pool(problem: Problem, target: Target, stage: StageName) -> list[Stage]:
    """The legal stages of the problem, in enumeration order."""
    return [item for item in _static_pool(problem.shape, target, stage) if not _load_reason(item, problem)]


def legality(stage: Stage, problem: Problem, target: Target) -> str:
    """Why the stage may not be tried on the problem and target; empty when it may."""
    return _static_reason(stage, problem.shape, target) or _load_reason(stage, problem)


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


def _enumerate(stage: StageName, quantized: bool) -> Iterator[Stage]:
    places: list[dict[str, Literal["fused", "permute", "separate", "reduce"]]]
    if stage == "gemm1":
        places = [
            {"gather": "fused", "activation": "fused"},
            {"gather": "fused", "activation": "separate"},
            {"gather": "permute", "activation": "fused"},
            {"gather": "permute", "activation": "separate"},
        ]
        if quantized:
            places += [place | {"quantize": "separate"} for place in places if place["activation"] == "fused"]
    else:
        places = [{"finalize": "reduce"}, {"finalize": "fused"}]
    axes = product(TILE_SIZES, (False, True), BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES, LOOPS, LOADS, GROUP_M)
    for tile, swap, block_n, block_k, warps, stages, (schedule, programs, flatten), loads, group_m in axes:
        gemm = GemmTactic(block_n, block_k, group_m, warps, stages, schedule, programs, flatten, loads, swap)
        for place in places:
            yield Stage(stage, "tile", tile, gemm, **place)  # type: ignore[arg-type]
    streams = product(gemv_block_n(stage), GEMV_BLOCK_K, GEMV_WARPS, GEMV_STAGES, GEMV_LOOPS, (False, True))
    for block_n, block_k, warps, stages, (schedule, programs, flatten), pdl in streams:
        gemm = GemmTactic(block_n, block_k, 1, warps, stages, schedule, programs, flatten, pdl=pdl)
        for place in places:
            if place.get("gather", "fused") == "fused" and place.get("activation", "fused") == "fused":
                yield Stage(stage, "gemv", 1, gemm, **place)  # type: ignore[arg-type]


def gemv_block_n(stage: StageName) -> tuple[int, ...]:
    """Weight rows of one gemv program: those of gate and up together in gemm1."""
    return tuple((2 if stage == "gemm1" else 1) * rows for rows in GEMV_ROWS)


@lru_cache(maxsize=16)
def _static_candidates(shape: LayerShape, target: Target, stage: StageName) -> tuple[Candidate, ...]:
    members = _enumerate(stage, bool(shape.scales))
    return tuple(Candidate(item, _static_reason(item, shape, target)) for item in members)


@lru_cache(maxsize=16)
def _compilable(target: Target, stage: StageName, quantized: bool) -> tuple[Stage, ...]:
    """The enumeration without what no shape can make legal on the target: most of it, dropped once for all shapes."""
    members = _enumerate(stage, quantized)
    return tuple(item for item in members if item.family != "tile" or not _code_reason(item, target))


@lru_cache(maxsize=64)
def _static_pool(shape: LayerShape, target: Target, stage: StageName) -> tuple[Stage, ...]:
    members = _compilable(target, stage, bool(shape.scales))
    return tuple(item for item in members if not _static_reason(item, shape, target))


def _static_reason(stage: Stage, shape: LayerShape, target: Target) -> str:
    """Reasons that do not depend on the load."""
    if stage.family not in FAMILIES:
        return f"family: {stage.family!r} is not known"
    if shape.scales and not target.has_fp8:
        return f"dtype: {target.arch} does not multiply fp8"
    if stage.family == "gemv":
        return _gemv_reason(stage, shape, target)
    return (
        _form_reason(stage)
        or _quantize_reason(stage, shape)
        or _chip_reason(stage, shape, target)
        or _code_reason(stage, target)
    )


def _code_reason(stage: Stage, target: Target) -> str:
    """Reasons of a tile stage that depend on neither load nor shape."""
    return _tensor_core_reason(stage, target) or _kernel_reason(stage, target)


def _form_reason(stage: Stage) -> str:
    gemm = stage.gemm
    powers = (stage.tile_size, gemm.block_n, gemm.block_k, gemm.num_warps)
    if any(value < 1 or value & (value - 1) for value in powers) or stage.tile_size < 16 or gemm.block_k < 16:
        return "form: tile_size, block_n, block_k and warps must be powers of two, tile_size and block_k 16 or more"
    if gemm.group_m < 1 or gemm.num_stages < 1 or gemm.programs_per_sm < 1:
        return "form: group_m, stages and programs must be 1 or more"
    if gemm.flatten and gemm.schedule != "persistent":
        return "form: only a persistent loop can be flattened"
    if gemm.pdl:
        return "form: only gemv kernels start before their forerunner ends; others gain nothing by it"
    return ""


def _quantize_reason(stage: Stage, shape: LayerShape) -> str:
    """Reasons that lie in the scales of a quantised layer, or in there being none."""
    if stage.quantize == "separate" and (stage.activation != "fused" or not shape.scales):
        return "quantize: there is nothing left for a kernel of its own to quantise"
    if shape.scales == "block" and stage.gemm.block_k > SCALE_GROUP:
        return f"scales: block_k {stage.gemm.block_k} spans several groups of {SCALE_GROUP} columns"
    if stage.activation != "fused" or stage.quantize == "separate":
        return ""
    if shape.scales == "block" and result_columns(stage) != SCALE_GROUP:
        return f"scales: the epilogue sees {result_columns(stage)} columns, a scale belongs to {SCALE_GROUP}"
    if shape.scales == "channel":
        return "scales: the epilogue sees a part of a row, a scale belongs to all of it"
    return ""


def _chip_reason(stage: Stage, shape: LayerShape, target: Target) -> str:
    gemm = stage.gemm
    _, k = gemm_size(stage, shape)
    shared = shared_memory_bytes(stage, shape, target)
    if shared > target.shared_bytes - RESERVED_SHARED_BYTES:
        return f"shared memory: needs {shared:,} B of {target.shared_bytes:,} B"
    registers = accumulator_registers(stage, shape)
    if registers > 128:
        return f"registers: {registers} accumulators per thread leave no room"
    if gemm.schedule == "persistent" and gemm.programs_per_sm > programs_per_sm(stage, shape, target):
        return f"residency: {gemm.programs_per_sm} programs do not fit on one SM"
    if gemm.loads == "tma":
        if not target.has_tma:
            return f"tma: {target.arch} has no tensor memory accelerator"
        if k * shape.item_bytes % 16:
            return f"tma: rows of {k} elements are not a multiple of 16 bytes"
        if gemm.block_n > 256 or stage.tile_size > 256:
            return "tma: a box side is larger than 256"
    return ""


def _tensor_core_reason(stage: Stage, target: Target) -> str:
    gemm = stage.gemm
    if gemm.block_n < 16:
        return "tensor core: fewer than 16 weight rows in one operand"
    if not target.has_wgmma:
        return "swap: only pays where the M side is coarse (wgmma)" if gemm.swap_ab else ""
    m_side = gemm.block_n if gemm.swap_ab else stage.tile_size
    if m_side < 64:
        return f"tensor core: {m_side} rows on the M side, wgmma takes 64; the other operand order has them"
    if m_side < 16 * gemm.num_warps:
        return f"tensor core: {gemm.num_warps} warps want {16 * gemm.num_warps} rows on the M side, there are {m_side}"
    return ""


def _kernel_reason(stage: Stage, target: Target) -> str:
    """Combinations the kernels cannot compile well, or that another candidate contains."""
    gemm = stage.gemm
    if gemm.flatten and target.has_wgmma and gemm.swap_ab:
        return "flatten: swapped tiles are too short to gain by it, and ptxas serialises their wgmma"
    if stage.gather == "permute" and gemm.loads != "tma":
        return "permute: the copy only pays when TMA reads it"
    if stage.activation == "separate" and gemm.swap_ab:
        return "activation: free in the swapped epilogue, a kernel of its own only adds traffic"
    if stage.finalize == "fused" and (gemm.block_k != 64 or gemm.num_stages != 4):
        return "finalize: atomics are enumerated at block_k 64 and 4 stages only; they add a fill and a cast kernel"
    if stage.finalize == "fused" and (gemm.loads != "tma") and target.has_tma:
        return "finalize: atomics are enumerated with TMA loads only; they add a fill and a cast kernel"
    if gemm.loads == "pointer" and target.has_tma and (gemm.programs_per_sm > 1 or gemm.flatten):
        return "pointer: persistent loops of several programs or one flat loop are enumerated with TMA loads only"
    if gemm.group_m == 1 and gemm.schedule == "persistent":
        return "group_m: a persistent loop that leaves an expert's block of weights at once reads it again"
    if gemm.block_k == 32 and target.has_wgmma:
        return "block_k: 32 starves the tensor cores"
    if gemm.num_stages == 2 and target.has_wgmma:
        return "stages: two leave the loads exposed"
    return ""


def _gemv_reason(stage: Stage, shape: LayerShape, target: Target) -> str:
    gemm = stage.gemm
    _, k = gemm_size(stage, shape)
    if stage.tile_size != 1:
        return "form: gemv has no tile_size but 1"
    if stage.gather == "permute" or stage.activation == "separate" or stage.finalize == "fused":
        return "form: gemv gathers and activates in the kernel and reduces after it"
    if gemm.loads != "pointer" or gemm.swap_ab or gemm.flatten:
        return "form: gemv streams by pointers"
    if gemm.pdl and not target.has_pdl:
        return f"pdl: {target.arch} has no programmatic dependent launch"
    by_kernel = shape.scales in ("channel", "tensor") and stage.stage == "gemm1"
    if (stage.quantize == "separate") != by_kernel:
        return f"quantize: gemv quantises hidden rows {'in a kernel of its own' if by_kernel else 'as it reads them'}"
    if gemm.block_k >= 2 * k:
        return f"block_k: {gemm.block_k} is at least twice the reduction length {k}"
    if gemm.num_stages > 1 and gemm.block_k >= k:
        return "stages: there is one step only, nothing to load ahead"
    registers = accumulator_registers(stage, shape)
    if registers > 128:
        return f"registers: {registers} per thread for the weights in flight leave no room"
    return ""


def _load_reason(stage: Stage, problem: Problem) -> str:
    """Reasons that depend on how many rows an expert gets: from routing over *all* experts, never the local ones."""
    routed = problem.expected_routed_rows
    if stage.family == "gemv":
        if problem.num_slots > MAX_GEMV_SLOTS:
            return f"load: {problem.num_slots} slots, gemv takes up to {MAX_GEMV_SLOTS}"
        if routed > MAX_GEMV_ROWS:
            return f"load: {routed:.0f} routed rows would each read their expert's weights again"
        return ""
    tile, gemm = stage.tile_size, stage.gemm
    rows = rows_of_active_expert(problem)
    if tile > max(32, 2 * _power_at_least(rows)):
        return f"padding: tile_size {tile} for {rows:.0f} rows per active expert"
    if tile <= 64 and tile * (8 if tile == 64 else 2) < rows:
        return f"tiles: tile_size {tile} cuts {rows:.0f} rows per expert into {num_tiles(int(rows), tile)} tiles"
    if gemm.swap_ab and rows > SWAP_MAX_ROWS_PER_EXPERT:
        return f"swap: {rows:.0f} rows per expert fill the M side as they are"
    if stage.gather == "permute" and rows < 32:
        return f"permute: {rows:.0f} rows per expert, the kernel is bound by weights and gathers for free"
    if gemm.group_m == 1 and rows <= tile:
        return "group_m: no effect with one tile per expert"
    return ""


def rows_of_active_expert(problem: Problem) -> float:
    """Expected rows of a local expert that has any."""
    return problem.expected_routed_rows / max(problem.expected_active_experts, 1e-9) if problem.num_tokens else 0.0


def _power_at_least(value: float) -> int:
    power = 1
    while power < value:
        power *= 2
    return power


def default_tactic(problem: Problem, target: Target) -> Tactic:
    """The untuned choice: legal for every shape, load and target, by rows per expert alone."""
    shape = problem.shape
    rows = rows_of_active_expert(problem)
    tile = min(128, max(16, _power_at_least(rows)))
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
