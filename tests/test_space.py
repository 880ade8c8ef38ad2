"""The tactic space: no hole in it, one verdict everywhere, and pruning that asks the whole layer's routing."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fitune import footprint, space
from fitune.models import PRESETS
from fitune.problem import DTYPES, SCALES, DType, LayerShape, Problem
from fitune.tactic import STAGES, TILE_SIZES, Stage, StageName, Tactic, parse_stage, parse_tactic
from fitune.target import KNOWN_TARGETS, Target

SM_90 = KNOWN_TARGETS["sm_90"]
TOKENS = [0, *(2**power for power in range(15)), 12_345, 131_072]
SHAPES = list(dict.fromkeys(preset.shape for preset in PRESETS.values()))
ODD_SHAPES = [
    LayerShape(2880, 2880, 128, 4),
    LayerShape(1856, 704, 8, 1),
    LayerShape(704, 1856, 512, 22),
    LayerShape(71, 33, 8, 2),
    LayerShape(7168, 2048, 256, 8, "fp32"),
]
DEEPSEEK = PRESETS["deepseek-v3"].shape
SUITING_ROWS = {16: 8, 32: 32, 64: 64, 128: 256, 256: 512}


LANDSCAPE = [
    *SHAPES,
    LayerShape(2880, 2880, 128, 4),
    LayerShape(2688, 1856, 128, 6),
    LayerShape(4096, 2688, 512, 22),
    LayerShape(2816, 704, 128, 8),
    LayerShape(5120, 8192, 16, 1),
    LayerShape(4096, 14336, 8, 2),
]
PERMUTED = parse_stage("t64 gather:permute act:fused g1:256x64/g8/w4/s3/p1/tma")
SWAPPED = parse_stage("t64 gather:fused act:fused g1:256x64/g8/w8/s3/p1/tma/swap")
STREAM = parse_stage("gemv t1 gather:fused act:fused g1:8x1024/g1/w4/s1/grid/ptr")


def tile_sizes(stages: list[Stage]) -> set[int]:
    return {stage.tile_size for stage in stages if stage.family == "tile"}


def problem_with_rows(shape: LayerShape, rows_per_expert: int) -> Problem:
    """All experts local and about so many rows for each."""
    return Problem(shape, shape.num_experts, -(-rows_per_expert * shape.num_experts // shape.top_k))


def check_partners(shape: LayerShape, target: Target, sizes: tuple[int, ...] = TILE_SIZES) -> None:
    for tile_size in sizes:
        problem = problem_with_rows(shape, SUITING_ROWS[tile_size])
        for name in STAGES:
            assert tile_size in tile_sizes(space.pool(problem, target, name)), (shape, target.arch, tile_size, name)


@pytest.mark.parametrize("name", PRESETS)
def test_every_tile_size_has_partners_on_hopper(name: str) -> None:
    check_partners(PRESETS[name].shape, SM_90)


@pytest.mark.parametrize("arch", [arch for arch in KNOWN_TARGETS if arch != "sm_90"])
def test_every_tile_size_has_partners_elsewhere(arch: str) -> None:
    """float32 tiles of 256 rows fit no chip with 64 KB of shared memory."""
    check_partners(DEEPSEEK, KNOWN_TARGETS[arch])
    check_partners(ODD_SHAPES[4], KNOWN_TARGETS[arch], TILE_SIZES[:4])


def test_every_tile_size_has_partners_for_odd_shapes() -> None:
    for shape in ODD_SHAPES:
        check_partners(shape, SM_90, TILE_SIZES[:4] if shape.dtype == "fp32" else TILE_SIZES)


def ranks(shape: LayerShape) -> list[int]:
    """Local experts at EP 1, 8 and 16, where the layer has so many experts."""
    return [shape.num_experts // ep for ep in (1, 8, 16) if ep <= shape.num_experts]


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_default_is_legal_everywhere(arch: str) -> None:
    target = KNOWN_TARGETS[arch]
    for shape in [*SHAPES, *ODD_SHAPES]:
        for local_experts, num_tokens in product(ranks(shape), TOKENS):
            problem = Problem(shape, local_experts, num_tokens)
            tactic = space.default_tactic(problem, target)
            assert space.tactic_legality(tactic, problem, target) == "", (problem, str(tactic))


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_a_pair_can_be_formed_for_every_load(dispatch: str) -> None:
    """Pools are not empty and share a tile size, the default's among them; so up to more rows than any tile holds."""
    for shape in [*ODD_SHAPES, DEEPSEEK, PRESETS["mixtral-8x7b"].shape, PRESETS["nemotron-3-super"].shape]:
        for local_experts, num_tokens in product({1, *ranks(shape)}, TOKENS[::3] + TOKENS[-3:]):
            problem = Problem(shape, local_experts, num_tokens, dispatch=dispatch)  # type: ignore[arg-type]
            first, second = (tile_sizes(space.pool(problem, SM_90, name)) for name in STAGES)
            assert space.default_tactic(problem, SM_90).tile_size in first & second, problem


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-120b", "qwen3-next-80b", "nemotron-3-super"])
def test_pruning_asks_global_routing(name: str) -> None:
    """Under all-gather an expert of EP 16 gets the rows it gets at EP 1: the tiles that are tried must not differ."""
    shape = PRESETS[name].shape
    whole, sixteenth = shape.num_experts, shape.num_experts // 16
    for num_tokens, stage in product(TOKENS, STAGES):
        pools = [space.pool(Problem(shape, local, num_tokens), SM_90, stage) for local in (whole, sixteenth)]
        tiled = [[each for each in members if each.family == "tile"] for members in pools]
        assert tiled[0] == tiled[1], (num_tokens, stage)


def test_padding_and_tile_count_prune() -> None:
    """At 12 rows per expert nothing pads to 64, at 512 nothing is cut into tiles of 16 or 32."""
    for local_experts in (256, 16):
        few, many = (Problem(DEEPSEEK, local_experts, num_tokens) for num_tokens in (384, 16_384))
        for name in STAGES:
            assert tile_sizes(space.pool(few, SM_90, name)) == {16, 32}
            assert tile_sizes(space.pool(many, SM_90, name)) == {64, 128, 256}


def test_gemv_only_for_a_handful_of_slots() -> None:
    def has_gemv(local_experts: int, num_tokens: int) -> set[bool]:
        problem = Problem(DEEPSEEK, local_experts, num_tokens)
        pools = [space.pool(problem, SM_90, name) for name in STAGES]
        return {any(stage.family == "gemv" for stage in members) for members in pools}

    assert has_gemv(256, 1) == has_gemv(256, 2) == has_gemv(16, 8) == {True}
    assert has_gemv(256, 4) == has_gemv(16, 16) == {False}  # many rows; many slots


VERDICTS = [
    (Problem(DEEPSEEK, 16, 8192), SM_90),
    (Problem(DEEPSEEK, 256, 4), SM_90),
    (Problem(ODD_SHAPES[3], 3, 9), SM_90),
    (Problem(PRESETS["gpt-oss-120b"].shape, 128, 1024), KNOWN_TARGETS["sm_80"]),
]


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize(("problem", "target"), VERDICTS)
def test_one_verdict_everywhere(problem: Problem, target: Target, name: StageName) -> None:
    found = space.candidates(problem, target, name)
    pool = space.pool(problem, target, name)
    assert pool == [each.stage for each in found if not each.reason]
    assert 50 <= len(pool) <= 3000
    for each in found[:: 7 if name == "gemm1" else 3]:
        assert space.legality(each.stage, problem, target) == each.reason
    shape_of_reason = re.compile(r"[a-z][a-z _]*: \S.*")
    reasons = {each.reason for each in found}
    assert all(reason == "" or shape_of_reason.fullmatch(reason) for reason in reasons)
    assert {each.rule for each in found} == {reason.partition(":")[0] for reason in reasons}
    assert len({each.stage for each in found}) == len(found)


@pytest.mark.parametrize("name", STAGES)
def test_text_of_every_member_reads_back(name: StageName) -> None:
    for arch, num_tokens in product(("sm_90", "sm_80"), (1, 128, 8192)):
        pool = space.pool(Problem(DEEPSEEK, 16, num_tokens), KNOWN_TARGETS[arch], name)
        texts = [str(stage) for stage in pool]
        assert [parse_stage(text) for text in texts] == pool
        assert len(set(texts)) == len(pool)


def test_a_tactic_of_two_members_reads_back() -> None:
    problem = Problem(DEEPSEEK, 16, 1024)
    firsts, seconds = (space.pool(problem, SM_90, name) for name in STAGES)
    for first, second in product(firsts[::50], seconds[::50]):
        if first.tile_size == second.tile_size and first.family == second.family:
            tactic = Tactic.of(first, second)
            assert parse_tactic(str(tactic)) == tactic
            assert space.tactic_legality(tactic, problem, SM_90) == ""


def axes_of(stages: list[Stage]) -> dict[str, set[object]]:
    """Values met on each axis, by the name of the constant that lists them."""
    tiled = [stage for stage in stages if stage.family == "tile"]
    streamed = [stage for stage in stages if stage.family == "gemv"]

    def loops(members: list[Stage]) -> set[object]:
        gemms = [member.gemm for member in members]
        return {(gemm.schedule, gemm.programs_per_sm, gemm.flatten) for gemm in gemms}

    return {
        "TILE_SIZES": {stage.tile_size for stage in tiled},
        "BLOCK_N": {stage.gemm.block_n for stage in tiled},
        "BLOCK_K": {stage.gemm.block_k for stage in tiled},
        "NUM_WARPS": {stage.gemm.num_warps for stage in tiled},
        "NUM_STAGES": {stage.gemm.num_stages for stage in tiled},
        "GROUP_M": {stage.gemm.group_m for stage in tiled},
        "LOADS": {stage.gemm.loads for stage in tiled},
        "LOOPS": loops(tiled),
        "GEMV_ROWS": {stage.gemm.block_n // (2 if stage.stage == "gemm1" else 1) for stage in streamed},
        "GEMV_BLOCK_K": {stage.gemm.block_k for stage in streamed},
        "GEMV_WARPS": {stage.gemm.num_warps for stage in streamed},
        "GEMV_LOOPS": loops(streamed),
        "FAMILIES": {stage.family for stage in stages},
    }


@pytest.mark.parametrize("name", STAGES)
def test_no_value_of_an_axis_is_lost(name: StageName) -> None:
    """Each value is enumerated, and is legal on some chip for some load."""
    enumerated = [each.stage for each in space.candidates(Problem(DEEPSEEK, 16, 1), SM_90, name)]
    legal = [
        stage
        for arch, num_tokens in product(("sm_90", "sm_80"), (1, 1024, 4096, 16_384))
        for stage in space.pool(Problem(DEEPSEEK, 16, num_tokens), KNOWN_TARGETS[arch], name)
    ]
    for axis, values in axes_of(enumerated).items():
        assert values == set(getattr(space, axis)), axis
    for axis, values in axes_of(legal).items():
        assert values == set(getattr(space, axis)), axis
    for choices in (enumerated, legal):
        assert {stage.gemm.swap_ab for stage in choices if stage.family != "grouped_mm"} == {False, True}
        places = {(stage.gather, stage.activation, stage.finalize) for stage in choices}
        if name == "gemm1":
            assert places == {(g, a, None) for g in ("fused", "permute") for a in ("fused", "separate")}
        else:
            assert places == {(None, None, "fused"), (None, None, "reduce")}


def test_on_hopper_no_choice_is_lost_at_a_tile_size() -> None:
    """Both schedules, loads and finalizes at every tile size; both operand orders wherever either has 64 rows."""
    for tile_size in TILE_SIZES:
        problem = problem_with_rows(DEEPSEEK, 130 if tile_size in (64, 128) else SUITING_ROWS[tile_size])
        for name in STAGES:
            pool = [stage for stage in space.pool(problem, SM_90, name) if stage.family == "tile"]
            members = [stage for stage in pool if stage.tile_size == tile_size]
            assert {stage.gemm.schedule for stage in members} == {"grid", "persistent"}, tile_size
            assert {stage.gemm.loads for stage in members} == {"pointer", "tma"}, tile_size
            orders = {16: {True}, 32: {True}, 256: {False}}.get(tile_size, {False, True})
            assert {stage.gemm.swap_ab for stage in members} == orders, tile_size
            assert {stage.finalize for stage in members} in ({None}, {"fused", "reduce"}), tile_size


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_legal_stages_fit_the_chip(arch: str) -> None:
    target = KNOWN_TARGETS[arch]
    for num_tokens, name in product((1, 1024, 16_384), STAGES):
        pool = space.pool(Problem(DEEPSEEK, 16, num_tokens), target, name)
        for stage in (each for each in pool if each.family != "grouped_mm"):
            assert footprint.shared_memory_bytes(stage, DEEPSEEK, target) < target.shared_bytes
            assert footprint.accumulator_registers(stage, DEEPSEEK) <= 128
            assert footprint.programs_resident(stage, DEEPSEEK, target) >= target.num_sms
            assert stage.gemm.loads == "pointer" or target.has_tma
            resident = footprint.programs_per_sm(stage, DEEPSEEK, target)
            assert stage.gemm.schedule == "grid" or stage.family == "gemv" or stage.gemm.programs_per_sm <= resident


def test_rows_that_tma_cannot_read_are_read_by_pointers() -> None:
    """Rows of 33 two-byte elements: gemm2 has no TMA candidate, and has others."""
    problem = Problem(LayerShape(64, 33, 8, 2), 8, 512)
    assert {stage.gemm.loads for stage in space.pool(problem, SM_90, "gemm1")} == {"pointer", "tma"}
    assert {stage.gemm.loads for stage in space.pool(problem, SM_90, "gemm2")} == {"pointer"}


def test_the_rules_that_dispatch_and_diff_go_by_are_rules_of_legality() -> None:
    """A rule that is renamed must not drop out of the sets silently."""
    problem = Problem(DEEPSEEK, 16, 4096)
    quantized = replace(problem, shape=replace(DEEPSEEK, dtype="fp8_block128"), num_tokens=8)
    reasons = {
        space.rule_of(candidate.reason)
        for arch in ("sm_90", "sm_80")
        for name in STAGES
        for each in (problem, quantized)
        for candidate in space.candidates(each, KNOWN_TARGETS[arch], name)
    }
    reasons.add(space.rule_of(space.legality(replace(PERMUTED, quantize="separate"), problem, SM_90)))
    first = space.pool(problem, SM_90, "gemm2")[0]
    odd = (replace(first, family="vendor"), replace(first, tile_size=48))
    reasons |= {space.rule_of(f"gemm2: {space.legality(stage, problem, SM_90)}") for stage in odd}
    assert reasons >= space.LAUNCH_RULES | space.RESOURCE_RULES
    assert space.rule_of("") == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_default_is_legal_for_every_dtype(arch: str, dtype: DType) -> None:
    """On chips that multiply it; elsewhere nothing is legal, and the reason is the dtype."""
    target = KNOWN_TARGETS[arch]
    for shape in (replace(shape, dtype=dtype) for shape in dict.fromkeys(LANDSCAPE)):
        for local_experts, num_tokens in product(ranks(shape), TOKENS[::2]):
            problem = Problem(shape, local_experts, num_tokens)
            reason = space.tactic_legality(space.default_tactic(problem, target), problem, target)
            if shape.scales and not target.has_fp8:
                assert reason == f"gemm1: dtype: {arch} does not multiply fp8"
                assert space.pool(problem, target, "gemm1") == []
            else:
                assert reason == "", problem


def reason_against(stage: Stage, dtype: DType = "bf16", arch: str = "sm_90", tokens: int = 2048, **of_gemm: Any) -> str:
    """Why a stage with other choices of its GEMM may not be tried; 64 rows per expert, or 8 slots for gemv."""
    stage = replace(stage, gemm=replace(stage.own_gemm, **of_gemm))
    problem = Problem(LayerShape(2048, 1024, 256, 8, dtype), 16, 1 if stage.family == "gemv" else tokens)
    return space.legality(stage, problem, KNOWN_TARGETS[arch])


def test_where_hidden_rows_are_quantised() -> None:
    """In the epilogue where it sees all that share a scale, else by a kernel of its own."""
    separate = replace(PERMUTED, quantize="separate")
    plain = replace(PERMUTED, activation="separate")
    assert reason_against(PERMUTED) == reason_against(SWAPPED, "fp8_block128") == ""
    assert reason_against(PERMUTED, "fp8_tensor", block_n=128) == ""
    assert reason_against(PERMUTED, "fp8_block128", block_n=128) == (
        "scales: the epilogue sees 64 columns, a scale belongs to 128"
    )
    assert reason_against(PERMUTED, "fp8_channel") == (
        "scales: the epilogue sees a part of a row, a scale belongs to all of it"
    )
    for dtype in SCALES:
        assert space.rule_of(reason_against(separate, dtype)) == "registers"  # a step's sums and those of all steps
        assert reason_against(separate, dtype, block_n=128) == reason_against(plain, dtype, block_n=128) == ""  # type: ignore[arg-type]
        assert space.rule_of(reason_against(replace(plain, quantize="separate"), dtype)) == "quantize"  # type: ignore[arg-type]
    assert reason_against(separate) == "quantize: there is nothing left for a kernel of its own to quantise"
    assert reason_against(STREAM, "fp8_block128") == ""
    assert reason_against(STREAM, "fp8_channel") == "quantize: gemv quantises hidden rows in a kernel of its own"
    assert reason_against(replace(STREAM, quantize="separate"), "fp8_tensor") == ""
    assert reason_against(replace(STREAM, quantize="separate"), "fp8_block128") == (
        "quantize: gemv quantises hidden rows as it reads them"
    )


def test_a_step_lies_in_one_group_of_scales() -> None:
    """Of 256 columns two groups of scales would be met; other kinds of scales do not mind."""
    separate = replace(PERMUTED, quantize="separate")
    assert reason_against(separate, "fp8_block128", block_k=256) == (
        "scales: block_k 256 spans several groups of 128 columns"
    )
    assert "scales" not in reason_against(separate, "fp8_channel", block_k=256)


def test_which_kernels_start_before_their_forerunner_ends() -> None:
    assert reason_against(STREAM, pdl=True) == ""
    assert reason_against(STREAM, pdl=True, arch="sm_80") == "pdl: sm_80 has no programmatic dependent launch"
    assert space.rule_of(reason_against(STREAM, pdl=True, arch="gfx942")) == "pdl"
    assert space.rule_of(reason_against(PERMUTED, pdl=True)) == "form"


def test_which_rounds_may_be_cut() -> None:
    assert reason_against(PERMUTED, tail=2) == reason_against(PERMUTED, tail=4) == ""
    assert space.rule_of(reason_against(PERMUTED, tail=3)) == "form"
    assert space.rule_of(reason_against(PERMUTED, tail=2, schedule="grid")) == "form"
    assert reason_against(PERMUTED, "fp8_block128", tail=2) == (
        "scales: a cut tile has fewer columns than a scale belongs to"
    )
    assert reason_against(replace(PERMUTED, quantize="separate"), "fp8_block128", tail=2, block_n=128) == ""
    assert space.rule_of(reason_against(PERMUTED, tail=2, swap_ab=True)) == "tail"
    assert reason_against(STREAM, tail=2) == "form: gemv has no tiles to cut"


def test_loading_ahead_needs_a_second_step() -> None:
    assert reason_against(STREAM, num_stages=2, block_k=512) == ""
    assert reason_against(STREAM, num_stages=2, block_k=2048) == (
        "stages: there is one step only, nothing to load ahead"
    )
