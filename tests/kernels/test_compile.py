"""Kernels compile for Hopper without a GPU: GEMMs neither spill nor wait, others move 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fitune.footprint import shared_memory_bytes
from fitune.measure.compile import compile_stage, compile_stages
from fitune.models import preset
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.space import legality
from fitune.tactic import Stage, parse_stage
from fitune.target import KNOWN_TARGETS

SHARED_BYTES_LIMIT = 232_448
SHARED_BYTES_NOT_FORESEEN = 17_000  # barriers, and half of the scratch that wide stores take in a flattened loop
MOVERS = {"permute_kernel", "swiglu_kernel", "combine_kernel", "cast_kernel", "zero_kernel"}
WALKERS = {"permute_kernel", "swiglu_kernel"}


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(fact["kernel"] for fact in facts) == {
        "count_kernel": 1,
        "rank_kernel": 2,
        "place_kernel": 1,
        **dict.fromkeys(MOVERS, 2),
        "softmax_kernel": 1,
        "grouped_kernel": 1,
    }
    for fact in facts:
        assert fact["shared_bytes"] <= SHARED_BYTES_LIMIT
        if fact["kernel"] in MOVERS:
            assert fact["wide_stores"] > 0, fact
            assert fact["wide_loads"] > 0 or fact["kernel"] == "zero_kernel", fact
        if fact["kernel"] in WALKERS:
            assert fact["loops_in_64_bits"] == 1, fact


# One stage of each class the GEMM kernels branch on, and a token count whose pool holds it (DeepSeek-V3, EP 16).
STAGES_FOR_HOPPER = {
    "t16 g2:64x128/g8/w4/s4/p2/tma/swap fin:reduce": 512,
    "t32 gather:fused act:fused g1:128x64/g8/w4/s4/p1/tma/swap": 512,
    "t64 gather:fused act:fused g1:128x64/g8/w4/s3/grid/ptr/swap": 2048,
    "t64 g2:64x64/g8/w4/s4/grid/tma/swap fin:fused": 2048,
    "t128 gather:fused act:fused g1:256x64/g8/w8/s3/p1/tma": 4096,
    "t128 gather:permute act:fused g1:128x64/g8/w8/s4/p1/tma": 4096,
    "t128 gather:permute act:separate g1:256x64/g8/w8/s3/p1f/tma": 4096,
    "t128 g2:256x64/g8/w8/s4/p1f/tma fin:reduce": 4096,
    "t128 g2:128x64/g1/w8/s3/grid/ptr fin:reduce": 16384,
    "t256 gather:fused act:separate g1:128x64/g8/w8/s3/grid/ptr": 16384,
    "gemv t1 gather:fused act:fused g1:8x1024/g1/w4/s1/p16/ptr": 8,
    "gemv t1 g2:4x1024/g1/w4/s1/grid/ptr fin:fused": 8,
}


@pytest.mark.slow
def test_gemms_compile_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = KNOWN_TARGETS["sm_90"]
    problem = Problem(preset("deepseek-v3").shape, 16, 8)
    stages = [parse_stage(text) for text in STAGES_FOR_HOPPER]
    for stage, num_tokens in zip(stages, STAGES_FOR_HOPPER.values(), strict=True):
        assert legality(stage, replace(problem, num_tokens=num_tokens), target) == "", str(stage)
    for report in compile_stages(stages, problem, target, workers=2):
        text = str(report.stage)
        assert report.status is Status.OK, (text, report.error)
        assert report.spill_bytes == 0 and report.stack_bytes == 0, text
        assert not report.serialized_wgmma, text
        assert report.registers and report.shared_bytes is not None, text
        estimate = shared_memory_bytes(report.stage, problem.shape, target)
        assert estimate <= report.shared_bytes <= min(estimate + SHARED_BYTES_NOT_FORESEEN, target.shared_bytes), text


@pytest.mark.slow
def test_one_slot_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of a top-1 layer: the smallest blocks there are.

    Of gemm2 ptxas keeps two values of four bytes in memory rather than take more than 64 registers, which let eight
    programs live on an SM: written before the loop over items and read once an item, outside the loop over K.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = Problem(preset("llama4-maverick").shape, 16, 1)
    stages = [parse_stage(text) for text in list(STAGES_FOR_HOPPER)[-2:]]
    for report in compile_stages(stages, problem, KNOWN_TARGETS["sm_90"], workers=2):
        assert report.status is Status.OK, (str(report.stage), report.error)
        most = 16 if report.stage.stage == "gemm2" and report.registers == 64 else 0
        assert report.spill_bytes is not None and report.spill_bytes <= most, str(report.stage)


# For each chip and dtype of a layer: a stage of each class that tells the most.
STAGES_ELSEWHERE = {
    ("sm_80", "bf16"): [
        "t64 gather:fused act:fused g1:128x32/g8/w4/s3/grid/ptr",
        "gemv t1 gather:fused act:fused g1:4x512/g1/w2/s2/grid/ptr",
    ],
    ("sm_89", "fp8_block128"): [
        "t16 gather:fused act:fused quant:separate g1:64x128/g1/w8/s4/grid/ptr",
        "t32 g2:64x64/g8/w8/s4/p2/ptr fin:fused",
    ],
    ("sm_90", "fp8_block128"): [
        "t16 gather:fused act:fused g1:256x64/g8/w4/s3/p1/tma/swap",
        "t64 g2:128x128/g8/w4/s3/p1f/tma fin:reduce",
        "gemv t1 gather:fused act:fused g1:8x512/g1/w4/s1/grid/ptr/pdl",
    ],
    ("sm_90", "fp8_channel"): [
        "t64 gather:permute act:fused quant:separate g1:128x128/g8/w4/s3/p1/tma",
        "gemv t1 gather:fused act:fused quant:separate g1:4x512/g1/w4/s1/grid/ptr",
    ],
    ("sm_100", "fp8_tensor"): ["t128 gather:permute act:fused g1:128x128/g8/w8/s3/p1/tma"],
    ("gfx942", "bf16"): ["gemv t1 gather:fused act:fused g1:8x512/g1/w4/s1/p16/ptr"],
    ("gfx942", "fp8_block128"): [
        "t64 gather:fused act:fused quant:separate g1:128x32/g8/w4/s4/grid/ptr",
        "gemv t1 gather:fused act:fused g1:8x512/g1/w2/s1/grid/ptr",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), STAGES_ELSEWHERE)
def test_what_is_legal_compiles(arch: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 on every chip that multiplies it, in the form the chip has; AMD's compiler meets no name of NVIDIA's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target, shape = KNOWN_TARGETS[arch], LayerShape(2048, 768, 128, 8, dtype)  # type: ignore[arg-type]
    stages = [parse_stage(text) for text in STAGES_ELSEWHERE[arch, dtype]]
    for stage in stages:
        rows = 1 if stage.family == "gemv" else 16 * stage.tile_size
        assert legality(stage, Problem(shape, 128, rows), target) == "", str(stage)
    for report in compile_stages(stages, Problem(shape, 128, 8), target, workers=2):
        assert report.status is Status.OK, (str(report.stage), report.error)
        assert not report.spill_bytes or arch == "sm_100", str(report.stage)
    if dtype.startswith("fp8"):
        texts = [path.read_text() for path in tmp_path.rglob("*.ttir")]
        assert any(("f8E4M3FNUZ" if arch == "gfx942" else "f8E4M3FN") in text for text in texts)
        assert arch != "gfx942" or not any("f8E4M3FN>" in text for text in texts)


SERIALIZED = parse_stage("t32 gather:permute act:fused g1:128x64/g8/w4/s4/p1f/tma/swap")


def report_on(stage: Stage) -> bool:
    report = compile_stage(stage, Problem(preset("deepseek-v3").shape, 16, 512), KNOWN_TARGETS["sm_90"])
    assert report.status is Status.OK, report.error
    return report.serialized_wgmma


@pytest.mark.slow
def test_serialised_wgmma_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A swapped tile with two accumulators in a flat loop, which ptxas serialises; not where the loop is not flat."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not report_on(replace(SERIALIZED, gemm=replace(SERIALIZED.own_gemm, flatten=False)))
    assert report_on(SERIALIZED)
