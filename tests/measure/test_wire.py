"""Every message survives the pipe as it was."""

import io

from fitune.measure import wire
from fitune.measure.protocol import Outcome
from fitune.problem import LayerShape, Problem
from fitune.record import Accuracy, Measurement, Regime, Status
from fitune.tactic import parse_stage, parse_tactic
from fitune.target import KNOWN_TARGETS, Environment

STAGE = parse_stage("t64 gather:permute act:separate g1:256x64/g8/w4/s5/p1f/tma")
TACTIC = parse_tactic("gemv t1 gather:fused act:fused g1:8x512/g1/w4/s1/grid/ptr g2:4x512/g1/w4/s1/p16/ptr fin:fused")


def through_the_pipe(message: dict[str, object]) -> dict[str, object]:
    read = wire.read_frame(io.BytesIO(wire.pack(message)))
    assert read is not None
    return read


def test_problem_target_environment() -> None:
    problem = Problem(LayerShape(2880, 704, 33, 3, "fp16"), 5, 77, "zipf:1.2", "all_to_all", 4)
    assert wire.problem_from_wire(through_the_pipe(wire.problem_to_wire(problem))) == problem
    for target in KNOWN_TARGETS.values():
        assert wire.target_from_wire(through_the_pipe(wire.target_to_wire(target))) == target
    environment = Environment("d", "sm_90", 132, "1", "k", power_cap_w=700.0)
    back = wire.environment_from_wire(through_the_pipe(wire.environment_to_wire(environment)))
    assert (back, back.id) == (environment, environment.id)


def test_outcomes() -> None:
    regime = Regime("graph", "graph", "cold", "balanced", 3, True)
    measurement = Measurement(2.0, 1.5, 2.5, 9, regime, (("sort", 0.5), ("gemm1", 1.5)), 1980.0, 512.0)
    for tactic, outcome in (
        (TACTIC, Outcome(TACTIC, Status.OK, measurement, Accuracy(0.1, 0.01), "abc")),
        (STAGE, Outcome(STAGE, Status.COMPILE_ERROR, error="no such instruction")),
    ):
        assert wire.outcome_from_wire(tactic, through_the_pipe(wire.outcome_to_wire(outcome))) == outcome


def test_end_of_stream_is_no_message() -> None:
    assert wire.read_frame(io.BytesIO(b"")) is None
    assert wire.read_frame(io.BytesIO(b"\x01")) is None
