"""fp8 layers against the dequantised reference: every class of tactic under each kind of scales.

Scales of neighbours differ by powers of two, and so do the rows' magnitudes: a scale taken from the wrong place is off
by a factor of two at least. Each GEMM is checked alone, elementwise, against the rounding it may do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle

import pytest
import torch
from checking import CheckedLauncher

from fitune import space
from fitune.kernels import quantize, reference, rows
from fitune.kernels.launch import INTERPRETED
from fitune.kernels.layer import LayerArgs, Workspace, hidden_q, row_of_slots, run_layer
from fitune.problem import SCALES, DType, LayerShape, Problem, weight_scale_shapes
from fitune.tactic import STAGES, TILE_SIZES, Stage, StageName, Tactic, parse_tactic
from fitune.target import KNOWN_TARGETS

E4M3 = torch.float8_e4m3fn
FP8_NAN = 0x7F
NAN = float("nan")
DTYPES: tuple[DType, ...] = tuple(SCALES)  # type: ignore[arg-type]
BF16_STEP = 2.0**-7  # stores truncate in the interpreter
FP8_HALF_STEP = 2.0**-4
SUM_ERROR = 2e-5 if INTERPRETED else 4e-3  # of a sum, by the sum of absolute values: fp8 tensor cores keep few bits

POINTERS = "t16 gather:fused act:separate g1:256x64/g8/w4/s3/p1/ptr g2:64x128/g8/w4/s3/grid/ptr fin:reduce"
SWAPPED = "t32 gather:fused act:fused quant:separate g1:128x128/g1/w4/s3/grid/tma/swap g2:128x128/g8/w4/s3/p2/tma/swap fin:reduce"  # noqa: E501
PERMUTED = "t16 gather:permute act:separate g1:128x128/g8/w4/s3/p1f/tma g2:128x128/g8/w4/s3/p1/tma/tail2 fin:reduce"
ATOMICS = "t16 gather:permute act:fused quant:separate g1:256x128/g8/w4/s3/p1/tma g2:128x32/g8/w4/s4/p1/tma fin:fused"
EPILOGUE = "t16 gather:fused act:fused g1:256x128/g8/w4/s3/p1/tma/swap g2:128x128/g8/w4/s3/p1/tma fin:reduce"
GEMV = "gemv t1 gather:fused act:fused g1:128x128/g1/w2/s2/p2/ptr g2:128x128/g1/w2/s2/grid/ptr fin:fused"
FORMS = {
    "pointers": POINTERS,
    "swapped": SWAPPED,
    "permuted": PERMUTED,
    "atomics": ATOMICS,
    "epilogue": EPILOGUE,
    "gemv": GEMV,
}


def forms_of(dtype: DType) -> Iterator[str]:
    """The forms that the scales allow, spelt for them."""
    for form, text in FORMS.items():
        if form == "gemv" and dtype != "fp8_block128":
            yield text.replace("act:fused", "act:fused quant:separate")
        elif form != "epilogue" or dtype != "fp8_channel":
            yield text


CASES = [(dtype, text) for dtype in DTYPES for text in forms_of(dtype)]


def form_of(text: str) -> str:
    return next(form for form in FORMS if FORMS[form][-60:] == text[-60:])


def cases_of(**forms: str) -> pytest.MarkDecorator:
    """A case for each of the named forms of each dtype, given as words."""
    chosen = [(dtype, text) for dtype, text in CASES if form_of(text) in forms[dtype].split()]
    names = [f"{dtype}-{form_of(text)}" for dtype, text in chosen]
    return pytest.mark.parametrize(("dtype", "text"), chosen, ids=names)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed launches of a size that the interpreter walks quickly."""
    monkeypatch.setattr(quantize, "_PROGRAMS_PER_SM", 2)
    monkeypatch.setattr(rows, "PROGRAMS_PER_SM", 2)


@dataclass(frozen=True)
class Load:
    """A small layer and the rank that runs it. No size is a multiple of the 128 columns of a scale."""

    dtype: DType
    num_tokens: int = 5
    hidden: int = 160
    intermediate: int = 208
    num_experts: int = 4
    top_k: int = 2
    local_experts: int = 3
    offset: int = 1

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.hidden, self.intermediate, self.num_experts, self.top_k, self.dtype)


def stepped(size: tuple[int, ...], unit: float, device: torch.device) -> torch.Tensor:
    """Powers of two around `unit` that differ between all neighbours along every dimension."""
    exponent = torch.zeros(size, dtype=torch.int64, device=device)
    for dimension, (length, step) in enumerate(zip(size, (3, 2, 1), strict=False)):
        along = torch.arange(length, device=device) * step
        exponent += along.view([-1 if other == dimension else 1 for other in range(len(size))])
    return unit * torch.exp2((exponent % 5 - 2).float())


def draw_args(load: Load, generator: torch.Generator) -> LayerArgs:
    """Random tensors; one slot in ten has no expert, and every token's ids are distinct."""
    device = generator.device

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    def weights(rows: int, columns: int, scale: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        values = (draw(load.local_experts, rows, columns) * 100).clamp(-448, 448).to(E4M3)
        return values, stepped((load.local_experts, *scale), 0.01 / columns**0.5, device)

    ids = torch.rand((load.num_tokens, load.num_experts), generator=generator, device=device)
    ids = ids.argsort(dim=1)[:, : load.top_k].int()
    ids[torch.rand(ids.shape, generator=generator, device=device) < 0.1] = -1
    first, second = weight_scale_shapes(load.shape.scales, load.hidden, load.intermediate)
    w13, w13_scale = weights(2 * load.intermediate, load.hidden, first)
    w2, w2_scale = weights(load.hidden, load.intermediate, second)
    magnitude = stepped((load.num_tokens, -(-load.hidden // 128)), 1.0, device).repeat_interleave(128, 1)
    given = {}
    if load.shape.scales == "tensor":
        given = {
            "x_scale": torch.tensor([[0.02]], device=device),  # the largest rows saturate
            "hidden_scale": torch.tensor([[0.03]], device=device),
        }
    return LayerArgs(
        x=(draw(load.num_tokens, load.hidden) * magnitude[:, : load.hidden]).bfloat16(),
        w13=w13,
        w2=w2,
        topk_weights=torch.rand(ids.shape, generator=generator, device=device) + 0.1,
        topk_ids=ids,
        local_expert_offset=load.offset,
        scales=load.shape.scales,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        **given,
    )


def poisoned(load: Load, device: torch.device, max_tokens: int | None = None) -> Workspace:
    tokens = load.num_tokens if max_tokens is None else max_tokens
    ws = Workspace.allocate(load.shape, load.local_experts, tokens, device, num_sms=2)
    for name in ("permuted", "gate_up", "hidden", "expert_out", "out_f32"):
        getattr(ws, name).fill_(NAN)
    for name in ("row_of_slot", "slot_of_row", "expert_rows", "expert_tiles", "tile_expert", "block_counts"):
        getattr(ws, name).fill_(-(10**9))
    for quantized in (ws.x_q, ws.hidden_q):
        assert quantized is not None
        quantized.values.view(torch.uint8).fill_(FP8_NAN)
        quantized.scales.fill_(NAN)
    return ws


def gate_and_up(args: LayerArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 gate and up results of local slots, zeros elsewhere, and a bound of SwiGLU's error that sums make."""
    x = reference.round_trip(args.x, args.scales, args.x_scale)
    w13, _ = args.reference_weights()
    half = w13.shape[1] // 2
    slots = args.topk_ids.numel()
    gate, up, bound = (torch.zeros((slots, half), device=x.device) for _ in range(3))
    for slot, expert in enumerate((args.topk_ids.flatten().long() - args.local_expert_offset).tolist()):
        if 0 <= expert < args.local_experts:
            row, weights = x[slot // args.top_k], w13[expert]
            gate[slot], up[slot] = (weights @ row).split(half)
            gate_sum, up_sum = (weights.abs() @ row.abs()).split(half)
            bound[slot] = SUM_ERROR * 1.1 * (gate_sum * up[slot].abs() + gate[slot].abs() * up_sum)
    return gate, up, bound


def check_hidden(tactic: Tactic, args: LayerArgs, load: Load, ws: Workspace) -> torch.Tensor:
    """Compare what gemm1 left with the reference; returns what gemm2 reads of it, float32 in slot order."""
    owned = row_of_slots(tactic.family, args, ws).long()
    slots = torch.nonzero(owned >= 0).flatten()
    owned = owned[slots]
    gate, up, bound = gate_and_up(args)
    hidden = torch.nn.functional.silu(gate) * up
    # Rounding of gate and up moves their product, not only the activated one, by a bf16 step.
    if tactic.activation == "separate":
        bound += 2.5 * BF16_STEP * (gate * up).abs()
    if tactic.quantize == "separate" or tactic.family == "gemv":
        bound += BF16_STEP * hidden.abs()
    bound, hidden = bound[slots], hidden[slots]
    seen = torch.zeros((args.num_slots, load.intermediate), device=hidden.device)
    untouched = torch.ones(len(ws.hidden), dtype=torch.bool, device=hidden.device)
    untouched[owned] = False

    if tactic.family == "gemv" and args.scales == "block":
        assert ((ws.hidden[owned].float() - hidden).abs() <= bound + 1e-30).all()
        assert ws.hidden[untouched].isnan().all(), "rows that nobody owns were written"
        seen[slots] = reference.round_trip(ws.hidden[owned], "block")
        return seen

    quantized = hidden_q(args, ws)
    values = quantized.values.view(torch.uint8)
    if tactic.family == "gemv":
        # Foreign slots have a row: what is in it is quantised and never read.
        untouched[: args.num_slots] = False
    assert (values[untouched] == FP8_NAN).all(), "rows that nobody owns were written"
    written = values[owned].view(E4M3).float()
    if args.scales == "tensor":
        assert args.hidden_scale is not None
        scale = args.hidden_scale
        hidden = hidden.clamp(-448 * scale, 448 * scale)
    else:
        assert quantized.scales_by_group()[:, untouched].isnan().all(), "scales of rows that nobody owns were written"
        wanted = reference.quantize(hidden, args.scales)[1]
        group = 128 if args.scales == "block" else load.intermediate
        slack = reference.quantize(bound, args.scales)[1]
        got = quantized.scales_by_group()[:, owned]
        assert ((got - wanted).abs() <= slack + 1e-6 * wanted).all()
        scale = got.T.repeat_interleave(group, 1)[:, : load.intermediate]
    error = (written * scale - hidden).abs()
    assert (error <= FP8_HALF_STEP * (hidden.abs() + bound) + 2.0**-10 * scale + 1.001 * bound).all()
    if tactic.family == "gemv" or (tactic.activation == "fused" and tactic.quantize == "separate"):
        again, scales = reference.quantize(ws.hidden[owned], args.scales, args.hidden_scale)
        if INTERPRETED:
            assert torch.equal(written, again.float())
            assert args.scales == "tensor" or torch.equal(quantized.scales_by_group()[:, owned], scales)
    seen[slots] = written * scale
    return seen


def check(
    tactic: str | Tactic, args: LayerArgs, load: Load, ws: Workspace | None = None, *, against: LayerArgs | None = None
) -> CheckedLauncher:
    """Run the layer; compare the hidden rows, then the result with what these rows give (under other scales)."""
    tactic = parse_tactic(tactic) if isinstance(tactic, str) else tactic
    ws = ws or poisoned(load, args.x.device)
    wide = torch.full((load.num_tokens, load.hidden + 5), NAN, dtype=args.x.dtype, device=args.x.device)
    out = wide[:, : load.hidden]
    launcher = CheckedLauncher()
    run_layer(tactic, args, ws, out, launcher)
    assert wide[:, load.hidden :].isnan().all(), "columns beside out were written"
    if load.num_tokens == 0:
        return launcher
    args = against or args
    hidden = check_hidden(tactic, args, load, ws)
    _, w2 = args.reference_weights()
    routing = (args.topk_weights, args.topk_ids, args.local_expert_offset)
    expected = reference.gemm2_finalized(hidden, w2, *routing)
    terms = reference.gemm2(hidden, w2, *routing[1:])
    sums = reference.gemm2_finalized(hidden.abs(), AbsoluteWeights(w2), *routing)
    bound = SUM_ERROR * sums + 1e-30
    bound += BF16_STEP * (expected.abs() + reference.combine(terms.abs(), args.topk_weights) * 1.02)
    assert ((out.float() - expected).abs() <= bound).all()
    local = args.topk_ids.long() - args.local_expert_offset
    foreign = ~((local >= 0) & (local < load.local_experts)).any(dim=1)
    assert not out[foreign].any(), "tokens without a local slot are exactly zero"
    return launcher


class AbsoluteWeights:
    """Weights without their signs."""

    def __init__(self, weights: reference.Weights) -> None:
        self._weights = weights
        self.shape = weights.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self._weights[expert].abs()


# Classes of tactics: what the kernels branch on, apart from block sizes.


def classes_of(stage: Stage) -> set[tuple[object, ...]]:
    """What the kernels branch on, in groups whose members touch one another; a stage is in a class of each.

    How tiles are walked meets how blocks are loaded; where rows come from and go meets the layout of blocks, and
    whether a tile may be cut.
    """
    gemm = stage.own_gemm
    if stage.family == "gemv":
        return {("gemv", gemm.schedule), ("gemv", gemm.num_stages > 1)}
    ends = (stage.activation, stage.quantize, stage.finalize)
    return {
        ("loop", gemm.schedule, gemm.flatten, gemm.tail, gemm.loads, gemm.swap_ab),
        ("ends", gemm.swap_ab, *ends),
        ("rows", stage.gather, gemm.loads, gemm.swap_ab, stage.quantize),
        ("tail", gemm.tail > 1, *ends),
        ("tile_size", stage.tile_size),
    }


def cost(stage: Stage) -> tuple[int, ...]:
    """The cheapest to interpret comes first: few programs and few steps."""
    gemm = stage.own_gemm
    block_n = 256 if stage.stage == "gemm1" else 128
    return abs(gemm.block_n - block_n), abs(gemm.block_k - 128), gemm.group_m, gemm.num_warps, gemm.num_stages


@cache
def stages_of_every_class(dtype: DType, name: StageName) -> list[Stage]:
    """Stages, legal on some chip for some load, that between them are in every class there is: few, and cheap ones."""
    shape = LayerShape(1024, 1024, 8, 2, dtype)
    legal = {
        stage: None
        for arch in ("sm_90", "gfx942")
        for tokens in (1, 32, 128, 512, 2048)
        for stage in space.pool(Problem(shape, 8, tokens), KNOWN_TARGETS[arch], name)
        if stage.family in ("tile", "gemv") and not stage.own_gemm.pdl
    }
    cheapest: dict[frozenset[tuple[object, ...]], Stage] = {}
    for stage in sorted(legal, key=cost):
        cheapest.setdefault(frozenset(classes_of(stage)), stage)
    missing, found = set().union(*cheapest), []
    while missing:
        classes = max(cheapest, key=lambda each: len(missing & each))
        found.append(cheapest[classes])
        missing -= classes
    return found


def tactics_of(dtype: DType) -> list[Tactic]:
    """Tactics that between them hold stages of every class of the layer dtype.

    Blocks of gemv are wider than those that are enumerated: the interpreter's time goes by programs.
    """
    firsts, seconds = (stages_of_every_class(dtype, name) for name in STAGES)
    tactics = []
    for family in ("tile", "gemv"):
        first, second = ([stage for stage in stages if stage.family == family] for stages in (firsts, seconds))
        pairs = zip(cycle(first), cycle(second), strict=False)
        for (one, other), _ in zip(pairs, range(max(len(first), len(second))), strict=False):
            tactic = Tactic.of(one, replace(other, tile_size=one.tile_size))
            if family == "gemv":
                wide = [replace(stage.own_gemm, block_n=128, block_k=128) for stage in (one, other)]
                tactic = replace(tactic, gemm1=wide[0], gemm2=wide[1])
            tactics.append(tactic)
    return tactics


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_class_of_tactics(dtype: DType, generator: torch.Generator) -> None:
    """Among them gate rows that end inside a group of scales, and rows that TMA cannot read."""
    few = {"top_k": 1, "num_experts": 3, "local_experts": 2}
    loads = [Load(dtype, num_tokens=3, **few), Load(dtype, num_tokens=3, hidden=144, intermediate=72, **few)]
    drawn = [draw_args(load, generator) for load in loads]
    for args in drawn:
        args.topk_ids[:, 0] = torch.tensor([2, 1, 2], dtype=torch.int32)
    for index, tactic in enumerate(tactics_of(dtype)):
        try:
            check(tactic, drawn[index % 2], loads[index % 2])
        except AssertionError as error:
            raise AssertionError(f"{tactic}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_classes_hold_every_choice(dtype: DType) -> None:
    """The classes above are not empty by accident."""
    tactics = tactics_of(dtype)
    tiles = [tactic for tactic in tactics if tactic.family == "tile"]
    streams = [tactic for tactic in tactics if tactic.family == "gemv"]
    assert {tactic.tile_size for tactic in tiles} == set(TILE_SIZES)
    for name in STAGES:
        gemms = [tactic.stage(name).own_gemm for tactic in tiles]
        assert {gemm.loads for gemm in gemms} == {"pointer", "tma"}
        assert {gemm.swap_ab for gemm in gemms} == {False, True}
        assert {gemm.tail > 1 for gemm in gemms} == {False, True}
        assert {tactic.stage(name).own_gemm.num_stages > 1 for tactic in streams} == {False, True}
        loops = {(gemm.schedule, gemm.flatten, gemm.tail) for gemm in gemms}
        flat = {("persistent", flat, tail) for flat in (False, True) for tail in (1, 2, 4)}
        assert loops == {("grid", False, 1)} | flat
    places = {(tactic.gather, tactic.activation, tactic.quantize) for tactic in tiles}
    ends = {("separate", "fused"), ("fused", "separate")} | ({("fused", "fused")} if dtype != "fp8_channel" else set())
    assert places == {(gather, *end) for gather in ("fused", "permute") for end in ends}
    assert {tactic.finalize for tactic in tiles} == {"fused", "reduce"}
    assert {tactic.quantize for tactic in streams} == {"fused" if dtype == "fp8_block128" else "separate"}


# Loads.


# How slots are sorted has nothing to do with the kind of scales: of the other two, a form on the tensor cores and gemv.
@cases_of(
    fp8_block128="pointers permuted atomics epilogue gemv", fp8_channel="atomics gemv", fp8_tensor="epilogue gemv"
)
def test_loads(dtype: DType, text: str, generator: torch.Generator) -> None:
    """No tokens, all experts at once, all slots to one expert, none of this rank's."""
    none = Load(dtype, num_tokens=0)
    assert not check(text, draw_args(none, generator), none).launches
    load = Load(dtype, num_tokens=2, top_k=4, local_experts=4, offset=0, hidden=144, intermediate=72)
    check(text, draw_args(load, generator), load)
    load = Load(dtype, num_tokens=4 if "gemv" in text else 18, hidden=144, intermediate=136, num_experts=6, offset=2)
    args = draw_args(load, generator)
    args.topk_ids[:] = torch.tensor([3, 0], dtype=torch.int32)
    check(text, args, load)
    args.topk_ids[:] = torch.tensor([-1, 5], dtype=torch.int32)
    check(text, args, load)


@cases_of(fp8_block128="pointers permuted epilogue gemv", fp8_channel="atomics gemv", fp8_tensor="epilogue gemv")
def test_strides_and_a_workspace_used_before(dtype: DType, text: str, generator: torch.Generator) -> None:
    """x and scales as slices and transposes, weights with gaps, and what another call left in the buffers."""
    load = Load(dtype, num_tokens=4, hidden=144, intermediate=160)
    ws = poisoned(load, generator.device)
    check(text, draw_args(load, generator), load, ws)
    ws.hidden.fill_(NAN)
    for quantized in (ws.x_q, ws.hidden_q):
        assert quantized is not None
        quantized.values.view(torch.uint8).fill_(FP8_NAN)
        quantized.scales.fill_(NAN)
    load = replace(load, num_tokens=2)
    args = draw_args(load, generator)
    args.topk_ids[-1, 0] = 1
    assert args.w13_scale is not None and args.w2_scale is not None
    x = torch.full((load.num_tokens, 2 * load.hidden + 3), NAN, dtype=args.x.dtype, device=args.x.device)
    x[:, 3::2] = args.x
    w13 = torch.full((4, 2 * load.intermediate + 8, load.hidden + 32), NAN, device=args.x.device).to(E4M3)
    w13 = w13[:3, : 2 * load.intermediate, : load.hidden]
    w13.view(torch.uint8).copy_(args.w13.view(torch.uint8))
    transposed = [scale.transpose(1, -1).contiguous().transpose(1, -1) for scale in (args.w13_scale, args.w2_scale)]
    args = replace(args, x=x[:, 3::2], w13=w13, w13_scale=transposed[0], w2_scale=transposed[1])
    assert args.x.stride(1) == 2
    check(text, args, load, ws)


@cases_of(**dict.fromkeys(DTYPES, "pointers atomics epilogue gemv"))
def test_zeros_and_magnitudes(dtype: DType, text: str, generator: torch.Generator) -> None:
    """A row, and a group of a row, of zeros; rows far beyond the range of e4m3 on either side."""
    load = Load(dtype, num_tokens=5, top_k=1, hidden=160, intermediate=136, local_experts=4, offset=0)
    args = draw_args(load, generator)
    args.topk_ids[:, 0] = torch.arange(5, dtype=torch.int32) % 2
    args.x[0] = 0.0
    args.x[1, 128:] = 0.0
    args.x[2] *= 2.0**20
    args.x[3] *= 2.0**-20
    check(text, args, load)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", [2, 4])
def test_parts_of_a_cut_round(tail: int, dtype: DType, generator: torch.Generator) -> None:
    """Of 160 columns in blocks of 128 the last parts lie wholly behind the end: nothing is read or written there.

    By TMA and by pointers, which rows of 72 fall back to; with five programs the last round is cut in any case.
    """
    acts = ["separate", "fused quant:separate"]
    for turn, (intermediate, fin) in enumerate([(144, "reduce"), (72, "fused")]):
        load = Load(dtype, num_tokens=2, hidden=160, intermediate=intermediate, top_k=1, num_experts=3, offset=0)
        args = draw_args(load, generator)
        args.topk_ids[:, 0] = torch.tensor([2, 0], dtype=torch.int32)
        for act in acts if dtype == "fp8_block128" else acts[turn : turn + 1]:
            gemm = f"128x128/g8/w4/s3/p1/tma/tail{tail}"
            text = f"t16 gather:fused act:{act} g1:{gemm} g2:{gemm} fin:{fin}"
            ws = poisoned(load, generator.device)
            ws.num_sms = 5 if tail == 4 else 3
            check(text, args, load, ws)


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale", "x_scale", "hidden_scale"])
def test_a_wrong_scale_is_noticed(name: str, generator: torch.Generator) -> None:
    """The check itself: one scale of the last expert, or the one given for all rows, is off by two."""
    load = Load("fp8_block128" if name.startswith("w") else "fp8_tensor")
    args = draw_args(load, generator)
    args.topk_ids[:] = torch.tensor([1, 3], dtype=torch.int32)
    check(POINTERS, args, load)
    scale = getattr(args, name).clone()
    scale.view(-1)[-1] *= 2.0
    with pytest.raises(AssertionError):
        check(POINTERS, replace(args, **{name: scale}), load, against=args)
