"""Compiling without a GPU, in children that abort, hang and ask for too much; and that what is compiled is found."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from fitune.measure import compiler
from fitune.measure.build import Collector, normalized_code
from fitune.measure.compile import CompilePool, compile_stage, compile_stages, job_key
from fitune.measure.compiler import _SERIALIZED, SERIALIZED, Compiler, meta_tensors, serializes_wgmma
from fitune.measure.wire import problem_to_wire, target_to_wire
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.tactic import GemmTactic, Stage, parse_stage
from fitune.target import KNOWN_TARGETS, Target

SHAPE = LayerShape(256, 128, 8, 2)
PROBLEM = Problem(SHAPE, 4, 300)
SM_90 = KNOWN_TARGETS["sm_90"]
TMA = parse_stage("t64 gather:permute act:separate g1:128x64/g8/w4/s3/p1f/tma")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


def test_a_report_for_each_arch() -> None:
    report = compile_stage(TMA, PROBLEM, SM_90)
    assert report.status is Status.OK, report.error
    assert report.shared_bytes and report.shared_bytes >= 3 * (64 + 128) * 64 * 2
    assert report.registers and 32 <= report.registers <= 255
    assert report.spill_bytes == 0 and not report.serialized_wgmma
    assert len(report.ptx_hash) == len(report.binary) == 16
    amd = compile_stage(parse_stage("t32 g2:64x32/g8/w4/s2/grid/ptr fin:reduce"), PROBLEM, KNOWN_TARGETS["gfx942"])
    assert amd.status is Status.OK, amd.error
    assert amd.shared_bytes and amd.registers and amd.spill_bytes == 0


def test_too_much_shared_memory_is_out_of_resources() -> None:
    greedy = replace(TMA, gemm=replace(TMA.gemm, block_n=256, block_k=128, num_stages=6))
    report = compile_stage(greedy, PROBLEM, SM_90)
    assert report.status is Status.OUT_OF_RESOURCES
    assert "shared memory" in report.error and report.shared_bytes and report.shared_bytes > SM_90.shared_bytes


def test_what_the_compiler_refuses_is_a_compile_error() -> None:
    odd = replace(TMA, gemm=replace(TMA.gemm, block_k=48))
    good = compile_stages([odd, TMA], PROBLEM, SM_90, workers=1)
    assert [report.status for report in good] == [Status.COMPILE_ERROR, Status.OK]


COUNT_HITS = """
import sys, torch
from fitune.measure.build import compile_stage_launches
from fitune.measure.compiler import StubDriver, meta_tensors
from fitune.kernels.layer import LayerArgs, Workspace
from fitune.problem import LayerShape, Problem
from fitune.tactic import parse_stage
from fitune.target import KNOWN_TARGETS
from triton import knobs
from triton.runtime import driver
hits = []
knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
target = KNOWN_TARGETS["sm_90"]
driver.set_active(StubDriver(target))
problem = Problem(LayerShape(256, 128, 8, 2), 3, 37)
meta, _, _ = meta_tensors(problem, target)
real = {
    name: torch.empty(getattr(meta, name).shape, dtype=getattr(meta, name).dtype)
    for name in ("x", "topk_weights", "topk_ids")
}
bank = torch.empty(8, 256, 256, dtype=torch.bfloat16), torch.empty(8, 256, 128, dtype=torch.bfloat16)
args = LayerArgs(w13=bank[0][3:6], w2=bank[1][3:6], **real)
workspace = Workspace.allocate(problem.shape, 3, 37, "cpu", num_sms=132)
for text in sys.argv[1:]:
    compile_stage_launches(parse_stage(text), args, workspace, torch.empty_like(args.x))
print(len(hits), sum(hits))
"""


def test_compiled_on_meta_tensors_is_found_by_a_process_with_real_ones() -> None:
    """Other token count, other local experts, weights sliced from a bank: the same disk-cache entries."""
    stages = [TMA, parse_stage("t64 g2:128x64/g8/w4/s4/grid/tma fin:fused")]
    assert all(report.status is Status.OK for report in compile_stages(stages, PROBLEM, SM_90, workers=1))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_HITS, *map(str, stages)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    compiled, found = map(int, done.stdout.split())
    assert compiled == found == 6  # permute, GEMM, SwiGLU; zero, GEMM, cast


def job(warps: int) -> Stage:
    return Stage("gemm2", "tile", 64, GemmTactic(64, 64, 8, warps), finalize="reduce")


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    made = CompilePool(SM_90, workers=2, limit_s=1.0, module="bad_child")
    yield made
    made.close()


def test_abort_hang_and_greed_fail_their_own_jobs_only(pool: CompilePool) -> None:
    stages = [job(4), job(8), job(2), job(1), replace(job(4), tile_size=32)]
    pool.submit(PROBLEM, stages)
    waiting = list(stages)
    while waiting:
        waiting.pop(pool.next_ready(PROBLEM, waiting))
    failures = [pool.failure(PROBLEM, stage) for stage in stages]
    assert failures[0] is None and failures[4] is None
    assert [failure.status for failure in failures[1:4] if failure] == [
        Status.COMPILE_ERROR,
        Status.TIMEOUT,
        Status.OUT_OF_RESOURCES,
    ]
    assert failures[1] and "SIGABRT" in failures[1].error


def test_a_job_is_done_once_and_closing_does_not_wait_for_a_hang(pool: CompilePool) -> None:
    for _ in range(3):
        pool.submit(PROBLEM, [job(4)], urgent=False)
        pool.submit(replace(PROBLEM, num_tokens=1), [job(4)])
        assert pool.next_ready(PROBLEM, [job(4)]) == 0
    slow = CompilePool(SM_90, workers=1, limit_s=600.0, module="bad_child")
    slow.submit(PROBLEM, [job(2)])
    slow.close()


def test_jobs_depend_on_the_load_in_gemv_only() -> None:
    other = Problem(SHAPE, 2, 16)
    gemv = Stage("gemm2", "gemv", 1, GemmTactic(4, 512), finalize="fused")
    assert job_key(PROBLEM, TMA) == job_key(other, TMA)
    assert job_key(PROBLEM, gemv) != job_key(other, gemv)


def test_meta_tensors_hold_no_memory() -> None:
    args, workspace, out = meta_tensors(Problem(LayerShape(7168, 2048, 256, 8), 256, 16384), SM_90)
    assert {tensor.device.type for tensor in (args.w13, workspace.hidden, out)} == {"meta"}


def test_normalized_code_drops_places_and_keeps_code() -> None:
    def ptx(path: str, line: int, register: int) -> str:
        return (
            f"//\n// Generated\n.visible .entry k(\n\t.loc\t1 {line} 0   // {path}:{line}\n$L__tmp3:\n"
            f"\tmov.b32 %r{register}, 1; // {path}\n$L__BB0_1:\n\tret;\n\t.section\t.debug_str\n{{ {path} }}\n"
        )

    assert normalized_code(ptx("/a/x.py", 3, 1), "//") == normalized_code(ptx("/b/y.py", 99, 1), "//")
    assert normalized_code(ptx("/a/x.py", 3, 1), "//") != normalized_code(ptx("/a/x.py", 3, 2), "//")
    assert "$L__BB0_1:" in normalized_code(ptx("/a/x.py", 3, 1), "//")


SAID = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."


def test_what_ptxas_says_of_serialised_instructions_is_recognised() -> None:
    assert _SERIALIZED.search(SAID)
    assert not _SERIALIZED.search("ptxas info    : Used 168 registers, used 1 barriers")


def kernel(name: str, *, wgmma: bool) -> SimpleNamespace:
    """As much of a compiled kernel as is asked for its tensor-core instructions."""
    ptx = "wgmma.mma_async.sync.aligned" if wgmma else "ret;"
    return SimpleNamespace(asm={"ptx": f"{name} {ptx}"}, metadata=SimpleNamespace(name=name, shared=0))


def entry(name: str) -> str:
    return f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\nptxas info    : Used 168 registers\n"


MOVER, GEMM = kernel("permute_kernel", wgmma=False), kernel("grouped_gemm_kernel", wgmma=True)


@pytest.mark.parametrize(
    ("kernels", "log", "assembled"),
    [
        ([MOVER, GEMM], entry("permute_kernel") + entry("grouped_gemm_kernel"), False),
        ([MOVER, GEMM], "", True),
        ([MOVER, GEMM], entry("permute_kernel"), True),
        ([MOVER], "", False),
        ([SimpleNamespace(asm={"amdgcn": ""}, metadata=None)], "", False),
    ],
    ids=["all compiled now", "all from the cache", "the GEMM from the cache", "no tensor core", "another vendor"],
)
@pytest.mark.parametrize("serialized", [False, True])
def test_kernels_from_the_cache_are_assembled_once_more(
    kernels: list[SimpleNamespace], log: str, assembled: bool, serialized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ptxas speaks while it compiles; of a kernel that came from Triton's disk cache it said nothing now."""
    asked = []

    def ptxas_facts(ptx: str, target: Target) -> dict[str, bool]:
        asked.append(ptx)
        return {"serialized_wgmma": serialized}

    monkeypatch.setattr(compiler, "ptxas_facts", ptxas_facts)
    collector = Collector()
    collector.compiled += kernels
    assert serializes_wgmma(collector, SM_90, log) is (assembled and serialized)
    assert asked == ([GEMM.asm["ptx"]] if assembled else [])
    assert serializes_wgmma(collector, SM_90, log + SAID)
    assert len(asked) == assembled


@pytest.mark.parametrize("report", [False, True])
def test_serialised_instructions_reject_a_stage_unless_a_report_is_wanted(
    report: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before timing, such a stage is not worth its run; a report says what there is and leaves the verdict open."""

    class Finished(Compiler):
        def _compile(self, stage: Stage, problem: Problem, target: Target) -> Collector:
            self._ptxas_log = entry("grouped_gemm_kernel") + SAID
            return Collector()

    request = {"problem": problem_to_wire(PROBLEM), "target": target_to_wire(SM_90), "tactic": str(TMA)}
    answer = Finished().answer({**request, "report": report})
    assert (answer["status"], answer["error"]) == (("ok", "") if report else ("rejected", SERIALIZED))


@pytest.mark.slow
def test_a_serialised_stage_is_rejected_before_timing() -> None:
    """For real, compiled anew and then from the disk cache: under Triton 3.6, whose ptxas serialises the flat loop."""
    flat = parse_stage("t32 gather:permute act:fused g1:128x64/g8/w4/s4/p1f/tma/swap")
    plain = replace(flat, gemm=replace(flat.own_gemm, flatten=False))
    problem = Problem(LayerShape(7168, 2048, 256, 8), 16, 512)
    for _ in range(2):
        pool = CompilePool(SM_90, workers=1)
        try:
            pool.submit(problem, [flat, plain])
            answers = [pool.answer(problem, stage) for stage in (flat, plain)]
            failure = pool.failure(problem, flat)
            assert pool.failure(problem, plain) is None, answers[1]
        finally:
            pool.close()
        if triton.__version__.startswith("3.6."):
            assert failure is not None and (failure.status, failure.error) == (Status.REJECTED, SERIALIZED)
        else:
            assert failure is None or failure.status is Status.REJECTED, answers[0]
