"""The measurer on a real GPU: right results, graph times, and a candidate that does not fit."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fitune.measure.choose import choose_measurer
from fitune.measure.gpu import GpuMeasurer
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.space import default_tactic, legality, pool
from fitune.tactic import STAGES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPE = LayerShape(4096, 1536, 32, 4)  # one expert's smaller matrix, 32 times, is more than twice L2
PROBLEMS = [Problem(SHAPE, 8, tokens) for tokens in (1, 64, 1024)]


@pytest.fixture(scope="module")
def measurer() -> Iterator[GpuMeasurer]:
    made, _ = choose_measurer("gpu", PROBLEMS)
    assert isinstance(made, GpuMeasurer)
    with made:
        yield made


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem.num_tokens))
def test_stages_are_right_and_timed_cold_in_graphs(measurer: GpuMeasurer, problem: Problem) -> None:
    for name in STAGES:
        stages = pool(problem, measurer.target, name)[:: max(1, len(pool(problem, measurer.target, name)) // 4)]
        for outcome in measurer.stages(problem, stages, None):
            assert outcome.status is Status.OK, (str(outcome.tactic), outcome.status, outcome.error)
            assert outcome.measurement is not None and outcome.binary
            assert (outcome.measurement.regime.timer, outcome.measurement.regime.l2) == ("graph", "cold")
            assert outcome.measurement.relative_halfwidth < 0.5


def test_a_layer_takes_about_what_its_parts_take(measurer: GpuMeasurer) -> None:
    problem = PROBLEMS[-1]
    tactic = default_tactic(problem, measurer.target)
    first, second = measurer.finals(problem, [tactic, tactic], 12)
    assert first.measurement is not None and second.measurement is not None
    assert sum(us for _, us in first.measurement.parts_us) == pytest.approx(first.measurement.median_us, rel=0.3)
    noise = measurer.noise(problem, tactic)
    assert 0.0 < noise < 0.2
    assert first.measurement.median_us == pytest.approx(second.measurement.median_us, rel=3 * noise + 0.02)


def test_what_does_not_fit_costs_no_restart(measurer: GpuMeasurer) -> None:
    stage = default_tactic(PROBLEMS[-1], measurer.target).stage("gemm2")
    greedy = replace(stage, tile_size=256, gemm=replace(stage.gemm, block_n=256, block_k=128, num_stages=6))
    assert legality(greedy, PROBLEMS[-1], measurer.target)
    restarts = measurer.restarts
    statuses = [outcome.status for outcome in measurer.stages(PROBLEMS[-1], [greedy, stage], None)]
    assert sorted(statuses) == sorted([Status.OUT_OF_RESOURCES, Status.OK])
    assert measurer.restarts == restarts


def test_whole_layers_on_fresh_inputs(measurer: GpuMeasurer) -> None:
    for problem in PROBLEMS:
        for seed in (11, 12):
            (outcome,) = measurer.check_cells(problem, [default_tactic(problem, measurer.target)], seed)
            assert outcome.status is Status.OK, outcome.error
