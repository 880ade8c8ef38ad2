"""The `tile` family: grouped GEMMs of our own kernel over tiles of rows, with SwiGLU fused or apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Final, Literal

from fitune.families.protocol import Family, Footprint
from fitune.footprint import (
    RESERVED_SHARED_BYTES,
    accumulator_registers,
    gemm_size,
    programs_per_sm,
    result_columns,
    shared_memory_bytes,
    step_bytes,
)
from fitune.problem import SCALE_GROUP, LayerShape, Problem
from fitune.roofline import CostTerms, power_at_least, rows_of_active_expert, tile_terms
from fitune.tactic import TILE_SIZES, GemmTactic, Loads, Schedule, Stage, StageName, num_tiles
from fitune.target import Target

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
TAILS: Final = (1, 2, 4)
SWAP_MAX_ROWS_PER_EXPERT: Final = 160


class Tile(Family):
    """Our grouped GEMM kernel (kernels/gemm.py)."""

    name = "tile"
    launching = "fitune.kernels.layer:run_own_stage"

    def stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        return _enumerate(stage, bool(shape.scales))

    def static_reason(self, stage: Stage, shape: LayerShape, target: Target) -> str:
        if not isinstance(stage.gemm, GemmTactic):
            return f"form: tile has no options like {stage.gemm}"
        return (
            _form_reason(stage)
            or _quantize_reason(stage, shape)
            or _chip_reason(stage, shape, target)
            or _code_reason(stage, target)
        )

    def load_reason(self, stage: Stage, problem: Problem) -> str:
        return _load_reason(stage, problem)

    def legal_stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        return (
            item
            for item in _compilable(target, stage, bool(shape.scales))
            if not self.static_reason(item, shape, target)
        )

    def axes(self, stage: StageName) -> Mapping[str, Sequence[Any]]:
        return {
            "tile_size": TILE_SIZES,
            "block_n": BLOCK_N,
            "block_k": BLOCK_K,
            "num_warps": NUM_WARPS,
            "num_stages": NUM_STAGES,
            "loop": LOOPS,
            "loads": LOADS,
            "group_m": GROUP_M,
        }

    def cost(
        self, stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None
    ) -> CostTerms:
        return tile_terms(stage, problem, target, expert_rows)

    def footprint(self, stage: Stage, shape: LayerShape, target: Target) -> Footprint | None:
        return Footprint(shared_memory_bytes(stage, shape, target), programs_per_sm(stage, shape, target))

    def bytes_in_flight(self, stage: Stage, shape: LayerShape) -> int:
        return stage.own_gemm.num_stages * step_bytes(stage, shape)


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
        for tail in TAILS if may_cut(tile, block_n, block_k, programs, loads) and schedule == "persistent" else (1,):
            gemm = GemmTactic(
                block_n, block_k, group_m, warps, stages, schedule, programs, flatten, loads, swap, tail=tail
            )
            for place in places:
                yield Stage(stage, "tile", tile, gemm, **place)  # type: ignore[arg-type]


def may_cut(tile_size: int, block_n: int, block_k: int, programs_per_sm: int, loads: Loads) -> bool:
    """Whether cutting the last round is enumerated: for tiles so large that a round of them is worth halving."""
    return loads == "tma" and programs_per_sm == 1 and tile_size * block_n >= 64 * 256 and block_k >= 64


@lru_cache(maxsize=16)
def _compilable(target: Target, stage: StageName, quantized: bool) -> tuple[Stage, ...]:
    """The enumeration without what no shape can make legal on the target: most of it, dropped once for all shapes."""
    return tuple(item for item in _enumerate(stage, quantized) if not _code_reason(item, target))


def _code_reason(stage: Stage, target: Target) -> str:
    """Reasons of a tile stage that depend on neither load nor shape."""
    return _tensor_core_reason(stage, target) or _kernel_reason(stage, target)


def _form_reason(stage: Stage) -> str:
    gemm = stage.own_gemm
    powers = (stage.tile_size, gemm.block_n, gemm.block_k, gemm.num_warps)
    if any(value < 1 or value & (value - 1) for value in powers) or stage.tile_size < 16 or gemm.block_k < 16:
        return "form: tile_size, block_n, block_k and warps must be powers of two, tile_size and block_k 16 or more"
    if gemm.group_m < 1 or gemm.num_stages < 1 or gemm.programs_per_sm < 1:
        return "form: group_m, stages and programs must be 1 or more"
    if gemm.flatten and gemm.schedule != "persistent":
        return "form: only a persistent loop can be flattened"
    if gemm.tail != 1 and (gemm.schedule != "persistent" or gemm.tail not in TAILS or gemm.block_n // gemm.tail < 16):
        return "form: only a persistent loop has a last round to cut, into 2 or 4 parts of 16 columns or more"
    if gemm.pdl:
        return "form: only gemv kernels start before their forerunner ends; others gain nothing by it"
    return ""


def _quantize_reason(stage: Stage, shape: LayerShape) -> str:
    """Reasons that lie in the scales of a quantised layer, or in there being none."""
    if stage.quantize == "separate" and (stage.activation != "fused" or not shape.scales):
        return "quantize: there is nothing left for a kernel of its own to quantise"
    if shape.scales == "block" and stage.own_gemm.block_k > SCALE_GROUP:
        return f"scales: block_k {stage.own_gemm.block_k} spans several groups of {SCALE_GROUP} columns"
    if stage.activation != "fused" or stage.quantize == "separate":
        return ""
    if shape.scales == "block" and result_columns(stage) != SCALE_GROUP:
        return f"scales: the epilogue sees {result_columns(stage)} columns, a scale belongs to {SCALE_GROUP}"
    if shape.scales == "block" and stage.own_gemm.tail > 1:
        return "scales: a cut tile has fewer columns than a scale belongs to"
    if shape.scales == "channel":
        return "scales: the epilogue sees a part of a row, a scale belongs to all of it"
    return ""


def _chip_reason(stage: Stage, shape: LayerShape, target: Target) -> str:
    gemm = stage.own_gemm
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
    gemm = stage.own_gemm
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
    gemm = stage.own_gemm
    if gemm.flatten and target.has_wgmma and gemm.swap_ab:
        return "flatten: swapped tiles are too short to gain by it"
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
    if gemm.tail > 1 and gemm.swap_ab:
        return "tail: swapped tiles are short, and several programs share an SM"
    if gemm.block_k == 32 and target.has_wgmma:
        return "block_k: 32 starves the tensor cores"
    if gemm.num_stages == 2 and target.has_wgmma:
        return "stages: two leave the loads exposed"
    return ""


def _load_reason(stage: Stage, problem: Problem) -> str:
    """Reasons that depend on how many rows an expert gets: from routing over *all* experts, never the local ones."""
    tile, gemm = stage.tile_size, stage.own_gemm
    rows = rows_of_active_expert(problem)
    if tile > max(32, 2 * power_at_least(rows)):
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


FAMILY: Final = Tile()
