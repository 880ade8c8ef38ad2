"""The measurer with its child on the CPU, where kernels are interpreted: every way in which a candidate can end."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fitune.errors import MeasureError, NoGpuError
from fitune.measure.compile import CompilePool
from fitune.measure.gpu import GpuMeasurer, Limits
from fitune.measure.protocol import Outcome
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.tactic import GemmTactic, Stage, Tactic

SHAPE = LayerShape(32, 16, 4, 2, "fp32")
PROBLEM = Problem(SHAPE, 2, 3)
TILE = Tactic("tile", 16, GemmTactic(32, 32, 1, 4, 3), GemmTactic(32, 16, 1, 4, 3))
GEMV = Tactic("gemv", 1, GemmTactic(16, 32, 1, 4, 1), GemmTactic(16, 16, 1, 4, 1))
SEGFAULT, HANG, UNWRITTEN, ILLEGAL, WRONG, COMPILE_ABORT, COMPILE_ERROR, NO_MEMORY, LATE_SEGFAULT = range(101, 110)


class Sabotaged(GpuMeasurer):
    """Its child's kernels go wrong as group_m says."""

    worker_module = "bad_worker"


@pytest.fixture(scope="module", autouse=True)
def _bad_worker_on_path() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), before or ""])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def measurer() -> Iterator[GpuMeasurer]:
    with GpuMeasurer(device="cpu", problems=[PROBLEM]) as made:
        yield made


@pytest.fixture(scope="module")
def sabotaged() -> Iterator[Sabotaged]:
    with Sabotaged(device="cpu", problems=[PROBLEM], limits=Limits(run_s=6.0, race_s=60.0)) as made:
        yield made


def spoiled(tactic: Tactic, how: int, stage: str = "gemm1") -> Tactic:
    return replace(tactic, **{stage: replace(getattr(tactic, stage), group_m=how)})


def one(measurer: GpuMeasurer, stage: Stage, problem: Problem = PROBLEM) -> Outcome:
    (outcome,) = measurer.stages(problem, [stage], None)
    assert outcome.tactic == stage
    return outcome


@pytest.mark.parametrize(
    "tactic", [TILE, GEMV, replace(TILE, gather="permute", activation="separate", finalize="fused")]
)
def test_good_stages(measurer: GpuMeasurer, tactic: Tactic) -> None:
    outcomes = list(measurer.stages(PROBLEM, [tactic.stage("gemm2"), tactic.stage("gemm1")], None))
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 2, outcomes
    for outcome in outcomes:
        assert outcome.measurement is not None and outcome.accuracy is not None
        assert 0.0 < outcome.accuracy.rms_relative < 1e-5
        assert outcome.measurement.samples >= 6
        assert (outcome.measurement.regime.timer, outcome.measurement.regime.seed) == ("host", 0)


def test_hopeless_candidates_get_few_samples(measurer: GpuMeasurer) -> None:
    (outcome,) = measurer.stages(PROBLEM, [TILE.stage("gemm1")], 0.001)
    assert outcome.status is Status.OK
    assert outcome.measurement is not None and outcome.measurement.samples == 3


def test_no_tokens_is_nothing_to_measure(measurer: GpuMeasurer) -> None:
    empty = replace(PROBLEM, num_tokens=0)
    assert one(measurer, TILE.stage("gemm1"), empty).status is Status.REJECTED
    assert measurer.finals(empty, [TILE], 3)[0].status is Status.REJECTED
    assert measurer.noise(empty, TILE) == 0.0


def test_finals_in_order_with_parts(measurer: GpuMeasurer) -> None:
    outcomes = measurer.finals(PROBLEM, [GEMV, TILE], 5)
    assert [outcome.tactic for outcome in outcomes] == [GEMV, TILE]
    for outcome, parts in zip(outcomes, [{"gemm1", "gemm2"}, {"sort", "gemm1", "gemm2"}], strict=True):
        assert outcome.measurement is not None
        assert outcome.measurement.samples == 5
        assert outcome.measurement.regime.interleaved
        assert {name for name, _ in outcome.measurement.parts_us} == parts
        assert all(us > 0.0 for _, us in outcome.measurement.parts_us)


def test_noise_is_a_small_positive_number(measurer: GpuMeasurer) -> None:
    assert 0.0 < measurer.noise(PROBLEM, TILE) < 10.0


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("routing", ["random", "zipf:1.2"])
def test_cells_are_right_on_fresh_inputs(measurer: GpuMeasurer, dispatch: str, routing: str) -> None:
    problem = Problem(SHAPE, 2, 5, routing, dispatch, local_expert_offset=1)  # type: ignore[arg-type]
    first, second = (measurer.check_cells(problem, [TILE, GEMV], seed) for seed in (1, 2))
    for outcome in first + second:
        assert outcome.status is Status.OK
        assert outcome.accuracy is not None and outcome.accuracy.rms_relative < 1e-5
    assert first[0].accuracy != second[0].accuracy
    assert one(measurer, TILE.stage("gemm1")).status is Status.OK


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        (UNWRITTEN, Status.WRONG_RESULT, "never written"),
        (WRONG, Status.WRONG_RESULT, "relative to the reference"),
        (COMPILE_ERROR, Status.COMPILE_ERROR, "PassManager"),
        (NO_MEMORY, Status.OUT_OF_RESOURCES, "shared memory"),
    ],
)
@pytest.mark.parametrize("stage", ["gemm1", "gemm2"])
def test_faults_that_leave_the_child_alive(
    sabotaged: Sabotaged, how: int, status: Status, text: str, stage: str
) -> None:
    bad = spoiled(TILE, how, stage).stage(stage)  # type: ignore[arg-type]
    good = TILE.stage(stage)  # type: ignore[arg-type]
    restarts = sabotaged.restarts
    outcomes = list(sabotaged.stages(PROBLEM, [good, bad, good], None))
    assert [outcome.status for outcome in outcomes] == [Status.OK, status, Status.OK]
    assert text in outcomes[1].error
    assert outcomes[1].measurement is None
    assert sabotaged.restarts == restarts
    if status is Status.WRONG_RESULT:
        accuracy = outcomes[1].accuracy
        assert accuracy is not None
        assert math.isnan(accuracy.rms_relative) == (how == UNWRITTEN)


@pytest.mark.parametrize(
    ("how", "status", "text"),
    [
        (SEGFAULT, Status.CRASHED, "SIGSEGV"),
        (HANG, Status.TIMEOUT, "running took longer than 6 s"),
        (ILLEGAL, Status.LAUNCH_ERROR, "illegal memory access"),
        (COMPILE_ABORT, Status.CRASHED, "LLVM ERROR: Cannot select"),
    ],
)
def test_faults_that_cost_the_child(sabotaged: Sabotaged, how: int, status: Status, text: str) -> None:
    good, bad = TILE.stage("gemm1"), spoiled(TILE, how).stage("gemm1")
    restarts = sabotaged.restarts
    outcomes = list(sabotaged.stages(PROBLEM, [good, bad, good], None))
    assert [outcome.status for outcome in outcomes] == [Status.OK, status, Status.OK]
    assert text in outcomes[1].error
    assert sabotaged.restarts == restarts + 1


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (WRONG, Status.WRONG_RESULT),
        (SEGFAULT, Status.CRASHED),
        (ILLEGAL, Status.LAUNCH_ERROR),
        (LATE_SEGFAULT, Status.CRASHED),
    ],
)
def test_finals_lose_exactly_the_culprit(sabotaged: Sabotaged, how: int, status: Status) -> None:
    outcomes = sabotaged.finals(PROBLEM, [TILE, spoiled(TILE, how), GEMV], 4)
    assert [outcome.status for outcome in outcomes] == [Status.OK, status, Status.OK]
    for outcome in outcomes:
        assert (outcome.measurement is not None) == (outcome.status is Status.OK)


def test_noise_of_a_bad_tactic_is_an_error(sabotaged: Sabotaged) -> None:
    with pytest.raises(MeasureError, match="A/A"):
        sabotaged.noise(PROBLEM, spoiled(TILE, SEGFAULT))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_so() -> None:
    with pytest.raises(NoGpuError, match="no usable GPU"):
        GpuMeasurer()


def test_what_did_not_compile_ahead_never_reaches_the_child() -> None:
    good = TILE.stage("gemm2")
    aborts, hangs, greedy = (replace(good, gemm=replace(good.gemm, num_warps=warps)) for warps in (8, 2, 1))
    with GpuMeasurer(device="cpu", problems=[PROBLEM]) as measurer:
        measurer.use_precompiler(CompilePool(measurer.target, workers=2, limit_s=1.0, module="bad_child"))
        measurer.warm(PROBLEM, [good])
        outcomes = {o.tactic: o.status for o in measurer.stages(PROBLEM, [hangs, aborts, good, greedy], None)}
        assert measurer.restarts == 0
    assert outcomes == {
        good: Status.OK,
        aborts: Status.COMPILE_ERROR,
        hangs: Status.TIMEOUT,
        greedy: Status.OUT_OF_RESOURCES,
    }
