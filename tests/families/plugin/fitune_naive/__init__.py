"""A kernel family that is nothing but a loop over the experts."""

from collections.abc import Iterable

from fitune.families import Family
from fitune.problem import LayerShape
from fitune.tactic import LibraryGemm, Stage, StageName
from fitune.target import Target

STAGES: dict[StageName, Stage] = {
    "gemm1": Stage("gemm1", "naive", 1, LibraryGemm(), gather="fused", activation="fused"),
    "gemm2": Stage("gemm2", "naive", 1, LibraryGemm(), finalize="reduce"),
}


class Naive(Family):
    name = "naive"
    launching = "fitune_naive.launch:run_stage"
    sorts = False  # row s of ws.hidden is slot s

    def stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        return (STAGES[stage],)

    def static_reason(self, stage: Stage, shape: LayerShape, target: Target) -> str:
        return "" if stage == STAGES[stage.stage] else f"form: the only {stage.stage} is {STAGES[stage.stage]}"


FAMILY = Naive()
