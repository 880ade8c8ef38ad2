"""A search among our own kernels and a library's: whichever is faster wins, and is kept."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from fitune.cache.store import Store
from fitune.families.grouped_mm import STAGES as GROUPED
from fitune.problem import Problem, key_of
from fitune.search import SearchPlan, run_search
from fitune.tactic import LibraryGemm, Stage, StageName, Tactic
from fitune.target import Target

LIBRARY = Tactic.of(GROUPED["gemm1"], GROUPED["gemm2"])


@pytest.mark.parametrize("share", [0.5, 2.0])
@pytest.mark.parametrize("sampler", ["pool", "random", "tpe", "exhaustive"])
def test_a_library_wins_when_it_is_faster(tmp_path: Path, lab: SimpleNamespace, share: float, sampler: str) -> None:
    problem = lab.problem(8192)
    few = lab.few_stages(problem, "gemm1", 30), lab.few_stages(problem, "gemm2", 30)
    times = {
        name: min(us for us in (lab.Landscape(3).time_us(stage, problem) for stage in stages) if not math.isnan(us))
        for name, stages in zip(("gemm1", "gemm2"), few, strict=True)
    }

    class Land(lab.Landscape):  # type: ignore[misc, name-defined]
        def time_us(self, stage: Stage, key: Problem) -> float:
            if isinstance(stage.gemm, LibraryGemm):
                return share * times[stage.stage]
            return float(super().time_us(stage, key))

    class Mixed(lab.FewStages):  # type: ignore[misc, name-defined]
        def pool(self, key: Problem, target: Target, stage: StageName) -> list[Stage]:
            return [*super().pool(key, target, stage), GROUPED[stage]]

    measurer = lab.SyntheticMeasurer(Land(3))
    store = Store.open(tmp_path / "store", create=True)
    run_search(SearchPlan((problem,), trials=31, sampler=sampler), measurer, store, space=Mixed(30))
    decision = Store.open(store.path).decisions()[key_of(problem, lab.TARGET.device)]
    assert (decision.chosen == LIBRARY) is (share < 1.0)
