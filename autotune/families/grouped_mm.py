"""The `grouped_mm` family: torch's grouped GEMM between our permute, SwiGLU and combine kernels.

There is nothing to choose in it, so each GEMM has one stage. The tile_size of the sort does not matter to it. In fp8
torch knows float32 scales of rows only, so of the fp8 schemes it serves `fp8_channel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from fitune.families.plain import LIBRARY_TENSOR_RATE, library_terms
from fitune.families.protocol import Family
from fitune.footprint import gemm_size
from fitune.problem import LayerShape, Problem
from fitune.roofline import CostTerms, rows_of_active_expert
from fitune.tactic import LibraryGemm, Stage, StageName
from fitune.target import Target, version_of

TILE_SIZE: Final = 128
MIN_ROWS: Final = 64
"""Rows per active expert below which it never wins: weights set the pace and the copy of the rows comes on top."""
MAX_EXPERTS: Final = 1023
ALIGNMENT_BYTES: Final = 16
DTYPES: Final = ("bf16", "fp8_channel")
_LAUNCHES: Final = 2
"""torch starts a kernel that prepares the groups' pointers, then the GEMM."""

STAGES: Final[dict[StageName, Stage]] = {
    "gemm1": Stage("gemm1", "grouped_mm", TILE_SIZE, LibraryGemm(), gather="permute", activation="separate"),
    "gemm2": Stage("gemm2", "grouped_mm", TILE_SIZE, LibraryGemm(), finalize="reduce"),
}


class GroupedMM(Family):
    """bf16 on sm_90 and sm_100, where torch's operator runs without waiting for the GPU; row-wise fp8 on sm_90."""

    name = "grouped_mm"
    launching = "fitune.kernels.grouped_mm:run_stage"

    def stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        return (STAGES[stage],)

    def static_reason(self, stage: Stage, shape: LayerShape, target: Target) -> str:
        if stage != STAGES[stage.stage]:
            return f"form: the only {stage.stage} of grouped_mm is {STAGES[stage.stage]}"
        if not 90 <= target.capability < 110:
            return f"library: torch's grouped GEMM runs on sm_90 and sm_100, not on {target.arch}"
        if shape.dtype not in DTYPES:
            return f"library: grouped_mm takes {', '.join(DTYPES)}, the layer is {shape.dtype}"
        if shape.scales and target.capability != 90:  # torch asks for 9.0 or 10.0, but builds the kernel for 9.0 alone
            return f"library: torch's grouped GEMM with row-wise fp8 scales is built for sm_90, not for {target.arch}"
        for size in gemm_size(stage, shape):
            if size * shape.item_bytes % ALIGNMENT_BYTES:
                return f"library: rows of {size} elements are no multiple of {ALIGNMENT_BYTES} bytes"
        return ""

    def load_reason(self, stage: Stage, problem: Problem) -> str:
        if problem.local_experts > MAX_EXPERTS:
            return f"library: {problem.local_experts} local experts, torch's grouped GEMM takes up to {MAX_EXPERTS}"
        rows = rows_of_active_expert(problem)
        if rows < MIN_ROWS:
            return f"load: {rows:.0f} rows per active expert, the library's GEMM pays from {MIN_ROWS} up"
        return ""

    def cost(
        self, stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None
    ) -> CostTerms:
        rate = LIBRARY_TENSOR_RATE * (2.0 if problem.shape.scales else 1.0)
        return library_terms(stage, problem, target, expert_rows, tensor_rate=rate, launches=_LAUNCHES)

    def code_version(self) -> str:
        return _torch_version()


@cache
def _torch_version() -> str:
    return f"torch {version_of('torch')}"


FAMILY: Final = GroupedMM()
