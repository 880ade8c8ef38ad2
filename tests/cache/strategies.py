"""Hypothesis strategies of records, decisions and what they are made of."""

import math

from hypothesis import strategies as st

from fitune.problem import Key, LayerKey
from fitune.record import Accuracy, Decision, Measurement, Member, Record, Regime, Status
from fitune.tactic import TILE_SIZES, GemmTactic, Stage, Tactic
from fitune.target import Environment

LINES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
TIMES = st.floats(1e-3, 1e9)
GEMMS = st.builds(
    GemmTactic,
    st.sampled_from([16, 64, 256]),
    st.sampled_from([32, 64]),
    st.integers(1, 64),
    st.sampled_from([4, 8]),
    st.integers(1, 7),
    st.just("persistent"),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["tma", "pointer"]),
    st.booleans(),
)
TACTICS = st.builds(
    Tactic,
    st.sampled_from(["tile", "gemv", "grouped_mm"]),
    st.sampled_from((1, *TILE_SIZES)),
    GEMMS,
    GEMMS,
    st.sampled_from(["fused", "permute"]),
    st.sampled_from(["fused", "separate"]),
    st.sampled_from(["fused", "reduce"]),
)
STAGES = st.builds(Tactic.stage, TACTICS, st.sampled_from(["gemm1", "gemm2"]))
KEYS = st.builds(
    lambda experts, top_k, local, device, tokens: Key(
        LayerKey(
            7168,
            2048,
            experts,
            min(top_k, experts),
            "bf16",
            "swiglu",
            min(local, experts),
            "all_gather",
            "random",
            device,
        ),
        tokens,
    ),
    st.integers(1, 512),
    st.integers(1, 16),
    st.integers(1, 512),
    LINES,
    st.integers(1, 2**40),
)
ENVIRONMENTS = st.builds(Environment, LINES, LINES, st.integers(1, 304), LINES, LINES, power_cap_w=st.floats(0, 2000))
REGIMES = st.builds(Regime, l2=st.sampled_from(["cold", "warm"]), seed=st.integers(-(2**63), 2**64 - 1))
MEASUREMENTS = st.builds(
    lambda times, samples, regime, parts: Measurement(times[1], times[0], times[2], samples, regime, parts),
    st.lists(TIMES, min_size=3, max_size=3).map(sorted),
    st.integers(1, 10_000),
    REGIMES,
    st.lists(st.tuples(LINES, TIMES), max_size=3).map(tuple),
)
ACCURACIES = st.none() | st.builds(Accuracy, st.floats(0, math.inf), st.floats(0, math.inf))


@st.composite
def records(draw: st.DrawFn, environment_id: str) -> Record:
    choice = draw(TACTICS | STAGES)
    status = draw(st.sampled_from(Status))
    return Record(
        draw(KEYS),
        choice.stage if isinstance(choice, Stage) else "layer",
        choice,
        status,
        environment_id,
        draw(LINES),
        draw(st.floats(0, 4e9)),
        draw(LINES),
        draw(st.sampled_from(["search", "final"])),
        draw(MEASUREMENTS) if status is Status.OK else None,
        draw(ACCURACIES),
        draw(st.just("") | LINES),
        draw(st.just("") | st.lists(LINES, max_size=3).map("\n\t".join)),
    )


@st.composite
def decisions(draw: st.DrawFn, environment_id: str) -> Decision:
    members = draw(st.lists(st.builds(Member, TACTICS, MEASUREMENTS, st.booleans()), max_size=4).map(tuple))
    return Decision(
        draw(KEYS),
        draw(TACTICS),
        members,
        draw(TACTICS),
        draw(TIMES),
        draw(st.floats(0, 1)),
        draw(LINES),
        environment_id,
        draw(LINES),
        draw(st.floats(0, 4e9)),
    )
