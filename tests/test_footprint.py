"""What a stage asks of the chip, against what the compiler took for it on Hopper."""

from __future__ import annotations

import pytest

from fitune import footprint
from fitune.models import PRESETS
from fitune.problem import LayerShape, Problem
from fitune.space import pool
from fitune.tactic import STAGES, parse_stage
from fitune.target import KNOWN_TARGETS

SM_90 = KNOWN_TARGETS["sm_90"]
DEEPSEEK = PRESETS["deepseek-v3"].shape

# Shared memory of one program as compiled for sm_90 with Triton 3.7.
TAKEN_BYTES = {
    "t64 g2:128x64/g8/w4/s4/p1/tma fin:reduce": 98_336,
    "t128 gather:fused act:fused g1:256x64/g8/w8/s4/p1/tma": 196_672,
    "t16 gather:fused act:fused g1:128x64/g8/w4/s4/p3/tma/swap": 73_792,
    "t64 gather:fused act:separate g1:64x64/g8/w4/s3/p1f/tma": 57_368,
    "t64 g2:64x128/g8/w4/s6/p1f/tma fin:reduce": 204_848,
    "t128 gather:fused act:separate g1:64x128/g8/w8/s4/p1f/tma": 213_024,
    "t64 g2:256x64/g8/w4/s5/p1f/tma fin:reduce": 221_224,
    "t128 g2:128x64/g8/w8/s3/p1f/tma fin:reduce": 131_096,
}


@pytest.mark.parametrize("text", TAKEN_BYTES)
def test_shared_memory_is_nearly_what_the_compiler_takes(text: str) -> None:
    estimate, taken = footprint.shared_memory_bytes(parse_stage(text), DEEPSEEK, SM_90), TAKEN_BYTES[text]
    assert taken - 17_000 <= estimate <= taken


def test_sizes_of_both_gemms() -> None:
    shape = LayerShape(hidden_size=1000, intermediate_size=300, num_experts=8, top_k=2)
    first = parse_stage("t64 gather:fused act:fused g1:128x64/g8/w4/s4/grid/ptr")
    apart = parse_stage("t64 gather:fused act:separate g1:128x64/g8/w4/s4/grid/ptr")
    second = parse_stage("t64 g2:128x64/g8/w4/s4/grid/ptr fin:reduce")
    assert [footprint.gemm_size(stage, shape) for stage in (first, second)] == [(600, 1000), (1000, 300)]
    assert [footprint.column_blocks(stage, shape) for stage in (first, second)] == [5, 8]
    assert [footprint.k_steps(stage, shape) for stage in (first, second)] == [16, 5]
    assert [footprint.rows_per_dot(stage) for stage in (first, apart, second)] == [64, 128, 128]
    assert footprint.step_bytes(second, shape) == (64 + 128) * 64 * 2


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_residency_keeps_within_the_sm(arch: str) -> None:
    """More than one program is only counted where memory, registers and threads hold them all."""
    target = KNOWN_TARGETS[arch]
    for name in STAGES:
        for stage in pool(Problem(DEEPSEEK, 16, 1024), target, name)[::5]:
            fit = footprint.programs_per_sm(stage, DEEPSEEK, target)
            threads = fit * stage.gemm.num_warps * target.warp_size
            assert fit == 1 or fit * footprint.shared_memory_bytes(stage, DEEPSEEK, target) <= target.shared_bytes
            assert fit == 1 or threads * footprint.accumulator_registers(stage) <= target.registers_per_sm
            assert threads <= 2048
            resident = footprint.programs_resident(stage, DEEPSEEK, target)
            started = stage.gemm.programs_per_sm if stage.gemm.schedule == "persistent" else fit
            assert resident == min(fit, started) * target.num_sms
