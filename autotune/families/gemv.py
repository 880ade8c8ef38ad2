"""The `gemv` family: one program per routed row and few weight rows, on the vector units, for a handful of slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from fitune.families.protocol import Family, Footprint
from fitune.footprint import accumulator_registers, gemm_size, programs_per_sm, shared_memory_bytes, step_bytes
from fitune.problem import LayerShape, Problem
from fitune.roofline import CostTerms, gemv_terms
from fitune.tactic import GemmTactic, Quantize, Schedule, Stage, StageName
from fitune.target import Target

GEMV_ROWS: Final = (2, 4, 8)
GEMV_BLOCK_K: Final = (512, 1024, 2048)
GEMV_WARPS: Final = (2, 4)
GEMV_STAGES: Final = (1, 2)
GEMV_LOOPS: Final[tuple[tuple[Schedule, int, bool], ...]] = (("grid", 1, False), ("persistent", 16, False))

MAX_GEMV_SLOTS: Final = 64
MAX_GEMV_ROWS: Final = 16


class Gemv(Family):
    """Our matrix-vector kernel (kernels/gemv.py)."""

    name = "gemv"
    launching = "fitune.kernels.layer:run_own_stage"
    binary_depends_on_tokens = True
    sorts = False

    def stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        streams = product(gemv_block_n(stage), GEMV_BLOCK_K, GEMV_WARPS, GEMV_STAGES, GEMV_LOOPS, (False, True))
        for block_n, block_k, warps, stages, (schedule, programs, flatten), pdl in streams:
            gemm = GemmTactic(block_n, block_k, 1, warps, stages, schedule, programs, flatten, pdl=pdl)
            if stage == "gemm1":
                yield Stage(stage, "gemv", 1, gemm, "fused", "fused", quantize=_quantizes(shape))
            else:
                yield Stage(stage, "gemv", 1, gemm, finalize="fused")

    def static_reason(self, stage: Stage, shape: LayerShape, target: Target) -> str:
        if not isinstance(stage.gemm, GemmTactic):
            return f"form: gemv has no options like {stage.gemm}"
        return _gemv_reason(stage, shape, target)

    def load_reason(self, stage: Stage, problem: Problem) -> str:
        routed = problem.expected_routed_rows
        if problem.num_slots > MAX_GEMV_SLOTS:
            return f"load: {problem.num_slots} slots, gemv takes up to {MAX_GEMV_SLOTS}"
        if routed > MAX_GEMV_ROWS:
            return f"load: {routed:.0f} routed rows would each read their expert's weights again"
        return ""

    def axes(self, stage: StageName) -> Mapping[str, Sequence[Any]]:
        return {
            "block_n": gemv_block_n(stage),
            "block_k": GEMV_BLOCK_K,
            "num_warps": GEMV_WARPS,
            "loop": GEMV_LOOPS,
        }

    def cost(
        self, stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None
    ) -> CostTerms:
        return gemv_terms(stage, problem, target, expert_rows)

    def footprint(self, stage: Stage, shape: LayerShape, target: Target) -> Footprint | None:
        return Footprint(shared_memory_bytes(stage, shape, target), programs_per_sm(stage, shape, target))

    def bytes_in_flight(self, stage: Stage, shape: LayerShape) -> int:
        return stage.own_gemm.num_stages * step_bytes(stage, shape)


def gemv_block_n(stage: StageName) -> tuple[int, ...]:
    """Weight rows of one gemv program: those of gate and up together in gemm1."""
    return tuple((2 if stage == "gemm1" else 1) * rows for rows in GEMV_ROWS)


def _quantizes(shape: LayerShape) -> Quantize:
    """Where hidden rows are quantised: a scale of the whole row, or one given, needs a kernel of its own."""
    return "separate" if shape.scales in ("channel", "tensor") else "fused"


def _gemv_reason(stage: Stage, shape: LayerShape, target: Target) -> str:
    gemm = stage.own_gemm
    _, k = gemm_size(stage, shape)
    if stage.tile_size != 1:
        return "form: gemv has no tile_size but 1"
    if stage.gather == "permute" or stage.activation == "separate" or stage.finalize == "reduce":
        return "form: gemv gathers, activates and sums a token's slots in its kernels"
    if gemm.loads != "pointer" or gemm.swap_ab or gemm.flatten:
        return "form: gemv streams by pointers"
    if gemm.pdl and not target.has_pdl:
        return f"pdl: {target.arch} has no programmatic dependent launch"
    if gemm.tail != 1:
        return "form: gemv has no tiles to cut"
    if stage.stage == "gemm1" and stage.quantize != _quantizes(shape):
        how = "in a kernel of its own" if _quantizes(shape) == "separate" else "as it reads them"
        return f"quantize: gemv quantises hidden rows {how}"
    if gemm.block_k >= 2 * k:
        return f"block_k: {gemm.block_k} is at least twice the reduction length {k}"
    if gemm.num_stages > 1 and gemm.block_k >= k:
        return "stages: there is one step only, nothing to load ahead"
    registers = accumulator_registers(stage, shape)
    if registers > 128:
        return f"registers: {registers} per thread for the weights in flight leave no room"
    return ""


FAMILY: Final = Gemv()
