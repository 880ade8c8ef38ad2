"""Records, measurements and what a decision is called."""

import math

import pytest

from fitune.problem import LayerShape, Problem, key_of
from fitune.record import Decision, Measurement, Member, Record, Regime, Status
from fitune.tactic import GemmTactic, Tactic

KEY = key_of(Problem(LayerShape(64, 64, 8, 2), 4, 16), "NVIDIA H200")
DEFAULT = Tactic("tile", 64, GemmTactic(128, 64), GemmTactic(128, 64))
WINNER = Tactic("tile", 32, GemmTactic(128, 64), GemmTactic(128, 64))


def measured(median_us: float) -> Measurement:
    return Measurement(median_us, median_us * 0.99, median_us * 1.01, 10, Regime())


def decision(chosen: Tactic, *members: Member) -> Decision:
    return Decision(KEY, chosen, members, DEFAULT, 12.0, 0.01, "test", "env", "run", 0.0)


@pytest.mark.parametrize(
    ("median", "low", "high", "samples"),
    [
        (0.0, 0.0, 0.0, 3),
        (10.0, 11.0, 12.0, 3),
        (10.0, 9.0, 9.5, 3),
        (-1.0, -2.0, 1.0, 3),
        (math.nan, 1.0, 2.0, 3),
        (10.0, 9.0, math.inf, 3),
        (math.inf, math.inf, math.inf, 3),
        (10.0, 9.0, 11.0, 0),
    ],
)
def test_times_that_cannot_be_are_our_own_mistake(median: float, low: float, high: float, samples: int) -> None:
    with pytest.raises(AssertionError):
        Measurement(median, low, high, samples, Regime())


def test_relative_halfwidth() -> None:
    assert Measurement(10.0, 9.0, 12.0, 5, Regime()).relative_halfwidth == pytest.approx(0.15)


@pytest.mark.parametrize("status", list(Status))
def test_a_measurement_is_there_if_and_only_if_the_status_is_ok(status: Status) -> None:
    good = measured(5.0) if status is Status.OK else None
    bad = None if status is Status.OK else measured(5.0)
    Record(KEY, "layer", WINNER, status, "env", "run", 0.0, measurement=good)
    with pytest.raises(AssertionError):
        Record(KEY, "layer", WINNER, status, "env", "run", 0.0, measurement=bad)


def test_a_record_holds_what_its_part_says() -> None:
    for part in ("gemm1", "gemm2"):
        stage = WINNER.stage(part)  # type: ignore[arg-type]
        Record(KEY, part, stage, Status.TIMEOUT, "env", "run", 0.0)  # type: ignore[arg-type]
        with pytest.raises(AssertionError):
            Record(KEY, "layer", stage, Status.TIMEOUT, "env", "run", 0.0)
        with pytest.raises(AssertionError):
            Record(KEY, part, WINNER, Status.TIMEOUT, "env", "run", 0.0)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        Record(KEY, "gemm1", WINNER.stage("gemm2"), Status.TIMEOUT, "env", "run", 0.0)


def test_states_of_a_decision() -> None:
    fast, slow = Member(WINNER, measured(10.0), True), Member(DEFAULT, measured(12.0), False)
    assert decision(WINNER, fast, slow).state == "tuned"
    assert decision(WINNER, fast, Member(DEFAULT, measured(10.05), True)).state == "tie"
    assert decision(DEFAULT, fast, Member(DEFAULT, measured(10.05), True)).state == "default"
    assert decision(WINNER, fast).state == "tuned"
    assert decision(WINNER, fast, slow).member(DEFAULT) is slow
    assert decision(WINNER, fast).member(DEFAULT) is None
