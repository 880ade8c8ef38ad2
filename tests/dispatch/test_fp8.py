"""Calls of fp8 layers: results of every scheme, and scales that are missing, wrong or not wanted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import fitune
from fitune.dispatch import Dispatcher, Runtime, forget
from fitune.dispatch.device import INTERPRETER
from fitune.dispatch.ops import dispatch_op, fused_moe_op
from fitune.dispatch.scales import SCALE_NAMES
from fitune.errors import DispatchError
from fitune.families import family_named
from fitune.kernels import reference
from fitune.kernels.layer import LayerArgs
from fitune.problem import LayerShape
from fitune.space import LAUNCH_RULES, rule_of
from fitune.tactic import STAGES, Stage, Tactic, parse_tactic
from fitune.target import target_named

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter on the CPU")

SCHEMES = ("fp8_block128", "fp8_channel", "fp8_tensor")
LOCAL, OFFSET = 2, 1
# The one left out multiplies its tensors, which torch cannot with e4m3.
OPERATOR_RULES = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FEW = parse_tactic(
    "t16 gather:fused act:fused quant:separate g1:128x64/g8/w4/s3/grid/ptr/swap g2:64x64/g8/w4/s3/grid/ptr/swap "
    "fin:reduce"
)


def shape_of(dtype: Any) -> LayerShape:
    return LayerShape(hidden_size=160, intermediate_size=136, num_experts=4, top_k=2, dtype=dtype)


def gemv_stage(shape: LayerShape, name: Any) -> Stage:
    """The first stage of the family gemv that can be launched."""
    family = family_named("gemv")
    stages = family.stages(shape, INTERPRETER, name)
    return next(one for one in stages if rule_of(family.static_reason(one, shape, INTERPRETER)) not in LAUNCH_RULES)


@dataclass
class Call:
    """The tensors of one call of an fp8 layer."""

    args: tuple[torch.Tensor, ...]
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    def but(self, **changes: Any) -> dict[str, torch.Tensor]:
        """The scales with some changed; None leaves one out."""
        return {name: scale for name, scale in (self.scales | changes).items() if scale is not None}

    def wanted(self, dtype: Any) -> torch.Tensor:
        """The layer in float32 on the quantised values."""
        scheme = shape_of(dtype).scales
        args = LayerArgs(*self.args, OFFSET, scheme, **self.scales)
        w13, w2 = args.reference_weights()
        routed = args.topk_ids, OFFSET
        hidden = reference.gemm1(reference.round_trip(args.x, scheme, args.x_scale), w13, *routed)
        hidden = reference.round_trip(hidden.bfloat16(), scheme, args.hidden_scale)
        return reference.gemm2_finalized(hidden, w2, args.topk_weights, *routed)


def draw(dtype: Any, num_tokens: int = 3, seed: int = 0) -> Call:
    shape = shape_of(dtype)
    h, i = shape.hidden_size, shape.intermediate_size
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    def scale(*size: int) -> torch.Tensor:
        return torch.exp2(torch.randint(-2, 3, size, generator=generator).float()) / 100 / h**0.5

    sizes: dict[str, tuple[tuple[int, ...], ...]] = {
        "fp8_block128": ((LOCAL, 4, 2), (LOCAL, 2, 2)),
        "fp8_channel": ((LOCAL, 2 * i), (LOCAL, h)),
        "fp8_tensor": ((LOCAL, 2), (LOCAL, 1)),
    }
    scales = {name: scale(*size) for name, size in zip(SCALE_NAMES, sizes[dtype], strict=False)}
    if dtype == "fp8_tensor":
        scales |= {"x_scale": torch.tensor([[0.01]]), "hidden_scale": torch.tensor([[0.02]])}
    w13, w2 = ((normal(LOCAL, *size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn) for size in ((2 * i, h), (h, i)))
    ids = torch.rand(num_tokens, 4, generator=generator).argsort(1)[:, :2].int()
    weights = torch.rand(num_tokens, 2, generator=generator) + 0.1
    return Call((normal(num_tokens, h).bfloat16(), w13, w2, weights, ids), scales)


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """As near as rounding hidden rows to e4m3 at slightly different values allows."""
    assert actual.dtype is torch.bfloat16
    assert float((actual.float() - wanted).norm() / wanted.norm()) < 2e-2


@pytest.fixture
def table(small: Any) -> Any:
    """Makes a table of a scheme with tactics at 1, 2 and 4 tokens."""

    def make(dtype: Any) -> Any:
        maker = small.table(shape=shape_of(dtype), local_experts=LOCAL)
        gemv = Tactic.of(*(gemv_stage(shape_of(dtype), name) for name in STAGES))
        return maker((1, 2, 4), lambda count: gemv if count == 1 else FEW)

    return make


@pytest.fixture
def layer(table: Any, runtime: Runtime) -> Any:
    """Makes a dispatcher of a scheme."""

    def make(dtype: Any) -> Dispatcher:
        return Dispatcher(table(dtype), shape_of(dtype), LOCAL, local_expert_offset=OFFSET, runtime=runtime)

    return make


@interpreted
@pytest.mark.parametrize("dtype", SCHEMES)
def test_hits_and_misses_give_the_layer(dtype: str, layer: Any) -> None:
    dispatcher = layer(dtype)
    for num_tokens in (1, 3, 5):
        call = draw(dtype, num_tokens, seed=num_tokens)
        close(dispatcher(*call.args, **call.scales), call.wanted(dtype))
    assert dispatcher.counters()["hits"] == 2 and dispatcher.counters()["misses"] == 1


@interpreted
@pytest.mark.parametrize("dtype", SCHEMES)
def test_scales_may_be_strided_and_out_given(dtype: str, layer: Any) -> None:
    call = draw(dtype)
    wide = {name: torch.full((*scale.shape[:-1], 2 * scale.shape[-1]), 7.0) for name, scale in call.scales.items()}
    for name, scale in call.scales.items():
        wide[name][..., ::2] = scale
    strided = {name: scale[..., ::2] for name, scale in wide.items()}
    out = torch.full_like(call.args[0], float("nan"))
    assert layer(dtype)(*call.args, out, **strided) is out
    close(out, call.wanted(dtype))


@interpreted
@pytest.mark.parametrize("dtype", SCHEMES)
def test_warm_makes_what_it_is_not_given(dtype: str, layer: Any) -> None:
    dispatcher, call = layer(dtype), draw(dtype)
    assert dispatcher.warm(num_tokens=[2]) == 2
    assert dispatcher.warm(*call.args[1:3], num_tokens=[2], **call.scales) == 2
    held = dispatcher.counters()["workspace_bytes"]
    dispatcher(*draw(dtype, 2).args, **call.scales)
    assert dispatcher.counters()["workspace_bytes"] == held > 0
    with pytest.raises(DispatchError, match="w2_scale: shape"):
        dispatcher.warm(num_tokens=[2], w2_scale=torch.ones(3, 3))


@interpreted
@pytest.mark.parametrize("dtype", SCHEMES)
def test_compiled_graphs_hold_a_call_whole(dtype: str, layer: Any) -> None:
    dispatcher, call = layer(dtype), draw(dtype)

    def model(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return dispatcher(x * 1.0, *rest, **call.scales) * 2.0

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(*call.args) / 2.0, call.wanted(dtype))


@interpreted
def test_the_operators_keep_torchs_rules(layer: Any) -> None:
    dispatcher, call = layer("fp8_tensor"), draw("fp8_tensor")
    texts = ("", "all_gather", "", "explain", "")
    for operator, rest in ((dispatch_op, (dispatcher._handle,)), (fused_moe_op, (4, OFFSET, *texts))):
        torch.library.opcheck(operator, (*call.args, *rest), call.scales, test_utils=OPERATOR_RULES)
    forget()


@interpreted
@pytest.mark.parametrize("dtype", SCHEMES)
def test_fused_moe_tells_the_scheme_by_its_scales(dtype: str, table: Any, tmp_path: Path) -> None:
    path = tmp_path / "table.fitune"
    path.write_bytes(table(dtype).to_bytes())
    options = {"num_experts": 4, "local_expert_offset": OFFSET, "store": path, "policy": "frozen"}
    call = draw(dtype)
    close(fitune.fused_moe(*call.args, **options, **call.scales), call.wanted(dtype))

    class Layer(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = fitune.fused_moe(*args, **options, **call.scales)
            return result

    close(torch.compile(Layer(), backend="aot_eager", fullgraph=True)(*call.args), call.wanted(dtype))
    close(torch.export.export(Layer(), call.args).module()(*call.args), call.wanted(dtype))
    forget()


def test_weights_and_scales_that_passed_are_not_looked_at_again(layer: Any, monkeypatch: Any) -> None:
    binding, call = layer("fp8_block128")._binding, draw("fp8_block128")
    scales = (*call.scales.values(), None, None)
    assert binding.check(*call.args, scales) == 3
    looks: list[object] = []
    check = binding._check_weights
    monkeypatch.setattr(binding, "_check_weights", lambda *args: looks.append(args) or check(*args))
    assert binding.check(*call.args, tuple(scales)) == 3
    assert not looks
    assert binding.check(*call.args, (scales[0].clone(), *scales[1:])) == 3
    assert len(looks) == 1
    with pytest.raises(DispatchError, match="w13_scale: it is missing"):
        binding.check(*call.args)
    with pytest.raises(DispatchError, match="hidden_scale: it is given"):
        binding.check(*call.args, (*scales[:3], torch.ones(1, 1)))


BLOCK, CHANNEL, TENSOR = SCHEMES
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        BLOCK,
        {"w13_scale": None},
        r"w13_scale: it is missing, and fp8_block128 layers need it: pass float32 \[2, 4, 2\]",
    ),
    (TENSOR, {"hidden_scale": None}, r"hidden_scale: it is missing.*\[1, 1\] \(one for all hidden rows\)"),
    (BLOCK, {"w2_scale": torch.ones(2, 2)}, r"w2_scale: shape is \[2, 2\]; in this fp8_block128 layer .* \[2, 2, 2\]"),
    (CHANNEL, {"w13_scale": torch.ones(2, 136)}, r"w13_scale: shape is \[2, 136\].*\[2, 272\] \(local_experts, 2 \*"),
    (TENSOR, {"x_scale": torch.tensor(1.0)}, r"x_scale: shape is \[\]; .* must be \[1, 1\]"),
    (TENSOR, {"w2_scale": torch.ones(2, 1).double()}, "w2_scale: dtype is float64; it must be fp32: convert it"),
    (TENSOR, {"w2_scale": torch.ones(2, 1, device="meta")}, "w2_scale: it is on meta; this layer runs on cpu"),
    (CHANNEL, {"x_scale": torch.ones(1, 1)}, "x_scale: it is given, and fp8_channel layers take the scales of rows"),
    (CHANNEL, {"w2_scale": 1.0}, "w2_scale: it is a float; give a torch tensor"),
]


@pytest.mark.parametrize(("dtype", "change", "message"), WRONG)
def test_wrong_scales_are_told(dtype: str, change: dict[str, Any], message: str, layer: Any) -> None:
    call = draw(dtype)
    with pytest.raises(DispatchError, match=message):
        layer(dtype)(*call.args, **call.but(**change))


def test_wrong_elements_are_told(layer: Any, small: Any) -> None:
    call = draw("fp8_channel")
    x, w13, w2, *rest = call.args
    dispatcher = layer("fp8_channel")
    with pytest.raises(DispatchError, match="w13: dtype is bf16; it must be float8_e4m3fn: quantise it"):
        dispatcher(x, w13.bfloat16(), w2, *rest, **call.scales)
    with pytest.raises(DispatchError, match="w2: dtype is float8_e4m3fnuz; it must be float8_e4m3fn: this chip"):
        dispatcher(x, w13, w2.view(torch.float8_e4m3fnuz), *rest, **call.scales)
    with pytest.raises(DispatchError, match="x: dtype is fp16; it must be bf16"):
        dispatcher(x.half(), w13, w2, *rest, **call.scales)
    with pytest.raises(DispatchError, match="w13_scale: it is given, and fp32 layers have no scales; leave it out"):
        Dispatcher(None, small.shape, 4)(*small.tensors(2).args, w13_scale=torch.ones(4, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w2_scale": None}, "w2_scale: it is missing, and w13 is float8_e4m3fn"),
        ({"w13_scale": 3}, "scales must be torch tensors"),
        (
            {"w13_scale": torch.ones(2, 2)},
            r"shapes are \[2, 2\] and \[2, 160\]; .*fp8_channel: \[2, 272\] and \[2, 160\]",
        ),
    ],
)
def test_fused_moe_refuses_scales_of_no_scheme(change: dict[str, Any], message: str) -> None:
    call = draw("fp8_channel")
    with pytest.raises(DispatchError, match=message):
        fitune.fused_moe(*call.args, num_experts=4, **call.but(**change))


def test_fused_moe_refuses_what_does_not_belong_together(small: Any) -> None:
    with pytest.raises(DispatchError, match="w13_scale: it is given, and w13 is fp32; scales belong to weights in"):
        fitune.fused_moe(*small.tensors(2).args, num_experts=8, w13_scale=torch.ones(4, 32))
    one = [torch.ones(1, *size).to(torch.float8_e4m3fn) for size in ((2, 1), (1, 1))]
    x, weights, ids = torch.ones(1, 1).bfloat16(), torch.ones(1, 1), torch.zeros(1, 1).int()
    with pytest.raises(DispatchError, match="fit fp8_channel and fp8_tensor; make a"):
        fitune.fused_moe(x, *one, weights, ids, num_experts=1, w13_scale=torch.ones(1, 2), w2_scale=torch.ones(1, 1))


def test_chips_that_do_not_multiply_fp8_are_told_at_once(runtime: Runtime) -> None:
    with pytest.raises(DispatchError, match=r"dtype: the layer is fp8_tensor, and NVIDIA A100.*\(sm_80\) does not"):
        Dispatcher(None, shape_of("fp8_tensor"), LOCAL, target=target_named("sm_80"), runtime=runtime)


def test_amds_form_is_what_amds_chip_takes(small: Any, runtime: Runtime, monkeypatch: Any) -> None:
    here = replace(target_named("gfx942"), num_sms=4)
    monkeypatch.setattr("fitune.dispatch.dispatcher.target_of", lambda device: here)
    dispatcher = Dispatcher(None, shape_of("fp8_tensor"), LOCAL, runtime=runtime)
    workspace = dispatcher._workspaces.own(3)
    assert workspace.x_q is not None and workspace.x_q.values.dtype is torch.float8_e4m3fnuz
    call = draw("fp8_tensor")
    with pytest.raises(DispatchError, match="w13: dtype is float8_e4m3fn; it must be float8_e4m3fnuz: this chip"):
        dispatcher(*call.args, **call.scales)
