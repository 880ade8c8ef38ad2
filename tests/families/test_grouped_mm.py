"""The grouped_mm family: where it is legal, what it costs, and the layer it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fitune import cost, space
from fitune.errors import DispatchError
from fitune.families import family_named
from fitune.families.grouped_mm import MIN_ROWS, STAGES
from fitune.kernels import reference
from fitune.kernels.layer import INTERPRETED, IO_DTYPES, LayerArgs, Workspace, run_layer, run_stage
from fitune.measure.build import Collector, compile_layer_launches, compile_stage_launches
from fitune.measure.compile import compile_stage, job_key
from fitune.models import PRESETS
from fitune.problem import DType, LayerShape, Problem
from fitune.record import Status
from fitune.tactic import Tactic, parse_stage
from fitune.target import KNOWN_TARGETS

SM_90 = KNOWN_TARGETS["sm_90"]
DEEPSEEK = PRESETS["deepseek-v3"].shape
TACTIC = Tactic.of(STAGES["gemm1"], STAGES["gemm2"])


def reason(shape: LayerShape = DEEPSEEK, num_tokens: int = 16_384, local_experts: int = 16, arch: str = "sm_90") -> str:
    problem = Problem(shape, local_experts, num_tokens)
    return space.tactic_legality(TACTIC, problem, KNOWN_TARGETS[arch])


def test_its_text() -> None:
    assert str(TACTIC) == "grouped_mm t128 gather:permute act:separate g1:auto g2:auto fin:reduce"


def test_where_it_is_legal() -> None:
    assert reason() == reason(arch="sm_100") == ""
    for arch in ("sm_80", "sm_89", "gfx942"):
        assert reason(arch=arch) == f"gemm1: library: torch's grouped GEMM runs on sm_90 and sm_100, not on {arch}"
    assert reason(replace(DEEPSEEK, dtype="fp16")) == "gemm1: library: grouped_mm takes bf16, the layer is fp16"
    odd = reason(replace(DEEPSEEK, hidden_size=7172))
    assert odd == "gemm1: library: rows of 7172 elements are no multiple of 16 bytes"
    many = reason(LayerShape(512, 512, 2048, 8), 1 << 17, 2048)
    assert many == "gemm1: library: 2048 local experts, torch's grouped GEMM takes up to 1023"
    other = parse_stage("grouped_mm t64 g2:auto fin:reduce")
    assert space.rule_of(space.legality(other, Problem(DEEPSEEK, 16, 16_384), SM_90)) == "form"


def test_only_from_some_rows_per_expert_up() -> None:
    tokens = MIN_ROWS * DEEPSEEK.num_experts // DEEPSEEK.top_k
    assert reason(num_tokens=tokens) == ""
    assert reason(num_tokens=tokens // 2) == (
        "gemm1: load: 32 rows per active expert, the library's GEMM pays from 64 up"
    )


def test_its_estimate_is_a_roofline() -> None:
    problem = Problem(DEEPSEEK, 16, 8192)
    found = cost.terms(STAGES["gemm1"], problem, SM_90, expert_rows=[256] * 16)
    assert (found.padded_rows, found.expected_rows, found.bound) == (4096.0, 4096.0, "tensor")
    assert found.tensor_us == pytest.approx(2 * 4096 * 7168 * 4096 / (790e6 * 0.75))
    assert found.weight_bytes == 16 * 7168 * 4096 * 2
    assert found.predicted_us > found.tensor_us + found.extra_us
    best = cost.predict_many_us(space.pool(problem, SM_90, "gemm1"), problem, SM_90).min()
    assert 0.5 * best < cost.predict_us(STAGES["gemm1"], problem, SM_90) < 2.0 * best


def draw(dtype: DType, local_experts: int = 3, offset: int = 1, num_tokens: int = 11) -> tuple[Any, ...]:
    """(args, workspace, out) on the CPU, poisoned."""
    shape = LayerShape(72, 40, 6, 2, dtype)
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand((num_tokens, 6), generator=generator).argsort(dim=1)[:, :2].int()
    ids[0] = -1

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) / size[-1] ** 0.5).to(IO_DTYPES[dtype])

    args = LayerArgs(
        normal(num_tokens, 72),
        normal(local_experts, 80, 72),
        normal(local_experts, 72, 40),
        torch.rand((num_tokens, 2), generator=generator),
        ids,
        offset,
    )
    ws = Workspace.allocate(shape, local_experts, num_tokens, "cpu", num_sms=2)
    for name in ("permuted", "hidden", "expert_out"):
        getattr(ws, name).fill_(float("nan"))
    return args, ws, torch.full((num_tokens, 72), float("nan"), dtype=IO_DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("local_experts", "offset"), [(3, 1), (6, 0), (1, 5)])
def test_it_computes_the_layer(dtype: DType, local_experts: int, offset: int) -> None:
    """On the CPU torch's operator takes other types than bf16, which the interpreter cannot compute with."""
    args, ws, out = draw(dtype, local_experts, offset)
    run_layer(TACTIC, args, ws, out)
    expected = reference.layer(args.x, args.w13, args.w2, args.topk_weights, args.topk_ids, offset)
    close = 6e-3 if dtype == "fp16" else 3e-5
    torch.testing.assert_close(out.float(), expected, rtol=close, atol=close)


def test_weights_that_torch_does_not_take_are_named() -> None:
    args, ws, out = draw("fp16")
    wide = torch.zeros((3, 80, 75), dtype=torch.float16)
    with pytest.raises(DispatchError, match=r"w13 has strides \(6000, 75, 1\); .* pass contiguous weights"):
        run_layer(TACTIC, replace(args, w13=wide[..., :72]), ws, out)
    thin = torch.zeros((3, 72, 80), dtype=torch.float16)[..., ::2]
    with pytest.raises(DispatchError, match="w2 has strides"):
        run_stage(TACTIC.stage("gemm2"), replace(args, w2=thin), ws, out)


def test_collecting_runs_nothing_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """While compiling, buffers hold anything: rows of which torch would read wherever they say."""

    def fail(*args: object, **named: object) -> None:
        raise AssertionError("torch's operator ran")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", fail)
    args, ws, out = draw("fp16")
    first = compile_stage_launches(TACTIC.stage("gemm1"), args, ws, out)
    assert [kernel.fn.__name__ for kernel in first.functions] == ["permute_kernel", "swiglu_kernel"]
    second = compile_stage_launches(TACTIC.stage("gemm2"), args, ws, out)
    assert [kernel.fn.__name__ for kernel in second.functions] == ["combine_kernel"]
    whole = compile_layer_launches(TACTIC, args, ws, out)
    assert whole.versions == first.versions == [f"torch {torch.__version__}"]
    assert whole.binary() and Collector().binary() == ""


def test_the_compile_workers_compile_its_small_kernels() -> None:
    problem = Problem(LayerShape(256, 128, 8, 2), 4, 300)
    reports = [compile_stage(stage, problem, SM_90) for stage in STAGES.values()]
    for report in reports:
        assert report.status is Status.OK, report.error
        assert len(report.binary) == 16 and report.ptx_hash == "" and report.registers is None
    assert reports[0].binary != reports[1].binary
    assert job_key(problem, STAGES["gemm1"]) == job_key(replace(problem, num_tokens=7), STAGES["gemm1"])
    assert family_named("grouped_mm").code_version() == f"torch {torch.__version__}"


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device, TRITON_INTERPRET=0")
def test_on_the_gpu_in_a_graph() -> None:
    """Captured once, replayed with other routings: it computes, never waits, and minds no NaN behind the rows."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch's grouped GEMM is fast on sm_90 and sm_100 only")
    shape, device = LayerShape(1024, 512, 16, 4), torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=device) / size[-1] ** 0.5).bfloat16()

    def ids() -> torch.Tensor:
        return torch.rand((512, 16), generator=generator, device=device).argsort(dim=1)[:, :4].int()

    args = LayerArgs(
        normal(512, 1024), normal(5, 1024, 1024), normal(5, 1024, 512), torch.rand((512, 4), device=device), ids(), 3
    )
    ws = Workspace.allocate(shape, 5, 512, device)
    out = torch.empty((512, 1024), dtype=torch.bfloat16, device=device)
    run_layer(TACTIC, args, ws, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_layer(TACTIC, args, ws, out)
    for _ in range(3):
        args.topk_ids.copy_(ids())
        for buffer in (ws.permuted, ws.hidden, out):
            buffer.fill_(float("nan"))
        graph.replay()
        expected = reference.layer(args.x, args.w13, args.w2, args.topk_weights, args.topk_ids, 3)
        torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
