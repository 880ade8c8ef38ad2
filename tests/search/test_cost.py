"""The estimate against what was measured on an H200 and against direct simulation of the routing."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune import cost, space
from fitune.problem import LayerShape, Problem
from fitune.routing import draw_topk_ids, local_rows
from fitune.tactic import num_tiles, parse_stage
from fitune.target import KNOWN_TARGETS

TARGET = KNOWN_TARGETS["sm_90"]
SHAPE = LayerShape(7168, 2048, 256, 8)
SEPARATE = "gather:permute act:separate"


def us(text: str, num_tokens: int, local_experts: int = 16) -> float:
    return cost.predict_us(parse_stage(text), Problem(SHAPE, local_experts, num_tokens), TARGET)


@pytest.mark.parametrize(
    ("faster", "slower", "tokens"),
    [
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s5/p1f/tma", f"t64 {SEPARATE} g1:256x64/g8/w4/s4/p1f/tma", 8192),
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s4/p1f/tma", f"t64 {SEPARATE} g1:256x64/g8/w8/s4/p1f/tma", 8192),
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s5/p1f/tma", f"t128 {SEPARATE} g1:256x64/g8/w8/s4/p1f/tma", 4096),
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s5/p1f/tma", f"t64 {SEPARATE} g1:128x64/g8/w4/s3/p3/tma", 16384),
        ("t64 g2:256x64/g8/w4/s5/p1f/tma fin:reduce", "t64 g2:256x64/g8/w4/s5/p1f/tma fin:fused", 8192),
        ("t16 g2:128x64/g8/w4/s4/p3/tma/swap fin:reduce", "t128 g2:256x64/g8/w8/s4/p1f/tma fin:reduce", 128),
        ("gemv t1 g2:2x2048/g1/w4/s1/p16/ptr fin:fused", "t16 g2:128x64/g8/w4/s4/p3/tma/swap fin:reduce", 1),
        ("t64 g2:256x64/g8/w4/s5/p1f/tma fin:reduce", "t16 g2:128x64/g8/w4/s4/p3/tma/swap fin:reduce", 8192),
    ],
)
def test_ranks_like_the_gpu(faster: str, slower: str, tokens: int) -> None:
    assert us(faster, tokens) < us(slower, tokens)


@pytest.mark.parametrize(
    ("text", "tokens", "measured_us"),
    [
        ("t16 gather:fused act:fused g1:128x64/g8/w4/s4/p3/tma/swap", 128, 215),
        ("t16 gather:fused act:fused g1:128x64/g8/w4/s4/p3/tma/swap", 512, 214),
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s5/p1f/tma", 4096, 253 + 14 + 8),
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s5/p1f/tma", 8192, 410 + 30 + 13),
        (f"t64 {SEPARATE} g1:256x64/g8/w4/s5/p1f/tma", 16384, 745 + 57 + 25),
    ],
)
def test_is_near_measured_times(text: str, tokens: int, measured_us: float) -> None:
    assert us(text, tokens) == pytest.approx(measured_us, rel=0.25)


@pytest.mark.parametrize("routing", ["random", "balanced", "zipf:1.0"])
@pytest.mark.parametrize("tile_size", [16, 64, 128])
def test_expected_tiles_match_drawn_routing(routing: str, tile_size: int) -> None:
    problem = Problem(SHAPE, 256, 512, routing)
    drawn = []
    for seed in range(4):
        rows = local_rows(draw_topk_ids(problem, seed), 0, 256)
        drawn.append(sum(num_tiles(int(count), tile_size) for count in rows))
    assert cost.expected_tiles(problem, tile_size) == pytest.approx(np.mean(drawn), rel=0.06)


def test_given_rows_replace_the_profile() -> None:
    stage = parse_stage("t64 g2:256x64/g8/w4/s5/p1f/tma fin:reduce")
    problem = Problem(SHAPE, 4, 64)
    found = cost.terms(stage, problem, TARGET, expert_rows=[1, 64, 65, 0])
    assert (found.tiles, found.padded_rows, found.expected_active_experts) == (4.0, 256.0, 3.0)
    assert found.padding == pytest.approx(256 / 130)
    assert found.weight_bytes == 3 * 2048 * 7168 * 2


def test_ep_changes_tiles_but_not_padding() -> None:
    stage = parse_stage("t64 g2:256x64/g8/w4/s5/p1f/tma fin:reduce")
    whole, part = (cost.terms(stage, Problem(SHAPE, count, 4096), TARGET) for count in (256, 16))
    assert whole.tiles == pytest.approx(16 * part.tiles)
    assert whole.padding == pytest.approx(part.padding)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40_000),
    st.integers(1, 256),
    st.sampled_from(["random", "balanced", "zipf:1.2"]),
    st.sampled_from(sorted(KNOWN_TARGETS)),
)
def test_is_finite_and_positive_everywhere(tokens: int, experts: int, routing: str, arch: str) -> None:
    problem, target = Problem(SHAPE, experts, tokens, routing), KNOWN_TARGETS[arch]
    for name in ("gemm1", "gemm2"):
        found = cost.terms(space.default_tactic(problem, target).stage(name), problem, target)
        assert 0.0 < found.predicted_us < 1e9
        assert found.padded_rows >= found.expected_rows * (1 - 1e-6)
        assert found.rounds >= found.waves * (1 - 1e-9)


def test_is_fast() -> None:
    problem = Problem(SHAPE, 16, 4096)
    stages = space.pool(problem, TARGET, "gemm1")[:500]
    cost.predict_many_us(stages, problem, TARGET)
    took = []
    for _ in range(5):
        began = time.process_time()
        cost.predict_many_us(stages, problem, TARGET)
        took.append(time.process_time() - began)
    assert min(took) < 0.05
