"""The whole layer against its reference: every class of tactic, every load, every stride a user may pass.

Outputs and intermediates are poisoned with NaN first, and where kernels are interpreted each launch may touch only
memory of the tensors it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from checking import CheckedLauncher

from fitune import space
from fitune.kernels import reference
from fitune.kernels.launches import is_wide
from fitune.kernels.layer import (
    INTERPRETED,
    IO_DTYPES,
    LayerArgs,
    Workspace,
    can_use_tma,
    row_of_slots,
    run_layer,
)
from fitune.problem import DType, LayerShape, Problem
from fitune.tactic import STAGES, TILE_SIZES, Stage, StageName, Tactic, parse_tactic
from fitune.target import KNOWN_TARGETS

NAN = float("nan")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 6e-3}
POINTERS = "t16 gather:fused act:fused g1:64x64/g8/w4/s3/p1/ptr g2:64x64/g8/w4/s3/p1/ptr fin:reduce"
ATOMICS = "t16 gather:fused act:fused g1:64x64/g8/w4/s3/p1/tma g2:64x64/g8/w4/s3/p1/tma fin:fused"
PERMUTED = "t16 gather:permute act:separate g1:64x64/g8/w4/s3/p1/tma g2:64x64/g8/w4/s3/p1/tma fin:reduce"
SWAPPED = "t32 gather:fused act:fused g1:128x64/g1/w4/s3/grid/tma/swap g2:64x64/g1/w4/s3/grid/tma/swap fin:reduce"
GEMV = "gemv t1 gather:fused act:fused g1:64x64/g1/w4/s1/p2/ptr g2:32x64/g1/w4/s1/p2/ptr fin:fused"
FORMS = {"pointers": POINTERS, "atomics": ATOMICS, "permuted": PERMUTED, "swapped": SWAPPED, "gemv": GEMV}


@dataclass(frozen=True)
class Load:
    """A small layer and the rank that runs it."""

    num_tokens: int = 9
    hidden: int = 72
    intermediate: int = 40
    num_experts: int = 6
    top_k: int = 2
    local_experts: int = 3
    offset: int = 0
    dtype: DType = "fp16"

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.hidden, self.intermediate, self.num_experts, self.top_k, self.dtype)


def draw_args(load: Load, generator: torch.Generator) -> LayerArgs:
    """Random tensors; one slot in ten has no expert, and every token's ids are distinct."""
    device, dtype = generator.device, IO_DTYPES[load.dtype]

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator, device=device) / size[-1] ** 0.5).to(dtype)

    scores = torch.rand((load.num_tokens, load.num_experts), generator=generator, device=device)
    ids = scores.argsort(dim=1)[:, : load.top_k].int()
    ids[torch.rand(ids.shape, generator=generator, device=device) < 0.1] = -1
    return LayerArgs(
        x=torch.randn((load.num_tokens, load.hidden), generator=generator, device=device).to(dtype),
        w13=draw(load.local_experts, 2 * load.intermediate, load.hidden),
        w2=draw(load.local_experts, load.hidden, load.intermediate),
        topk_weights=torch.rand(ids.shape, generator=generator, device=device) + 0.1,
        topk_ids=ids,
        local_expert_offset=load.offset,
    )


def poisoned(load: Load, device: torch.device, max_tokens: int | None = None) -> Workspace:
    tokens = load.num_tokens if max_tokens is None else max_tokens
    ws = Workspace.allocate(load.shape, load.local_experts, tokens, device, num_sms=2)
    for name in ("permuted", "gate_up", "hidden", "expert_out", "out_f32"):
        getattr(ws, name).fill_(NAN)
    for name in ("row_of_slot", "slot_of_row", "expert_rows", "expert_tiles", "tile_expert", "block_counts"):
        getattr(ws, name).fill_(-(10**9))
    return ws


def check(text: str | Tactic, args: LayerArgs, load: Load, ws: Workspace | None = None) -> CheckedLauncher:
    """Run the layer and compare hidden rows, result and what must stay untouched."""
    tactic = parse_tactic(text) if isinstance(text, str) else text
    ws = ws or poisoned(load, args.x.device)
    wide = torch.full((load.num_tokens, load.hidden + 5), NAN, dtype=args.x.dtype, device=args.x.device)
    out = wide[:, : load.hidden]
    launcher = CheckedLauncher()
    run_layer(tactic, args, ws, out, launcher)

    routing = (args.topk_ids, args.local_expert_offset)
    hidden = reference.gemm1(args.x, args.w13, *routing)
    expected = reference.layer(args.x, args.w13, args.w2, args.topk_weights, *routing)
    close = {"rtol": TOLERANCE[args.x.dtype], "atol": TOLERANCE[args.x.dtype]}
    torch.testing.assert_close(out.float(), expected, **close)
    assert wide[:, load.hidden :].isnan().all(), "columns beside out were written"
    ids = args.topk_ids.long() - args.local_expert_offset
    local = ((ids >= 0) & (ids < load.local_experts)).cpu()
    assert not out[~local.any(dim=1).to(out.device)].any(), "tokens without a local slot are exactly zero"
    if load.num_tokens:
        rows = row_of_slots(tactic.family, args, ws).long()
        assert torch.equal(rows.cpu() >= 0, local.flatten())
        torch.testing.assert_close(ws.hidden[rows[rows >= 0]].float(), hidden[rows >= 0], **close)
        untouched = torch.ones(len(ws.hidden), dtype=torch.bool, device=rows.device)
        untouched[rows[rows >= 0]] = False
        assert ws.hidden[untouched].isnan().all(), "rows that nobody owns were written"
    return launcher


# Classes of tactics: what the kernels branch on, apart from block sizes.


def class_of(stage: Stage) -> tuple[object, ...]:
    gemm = stage.gemm
    return (gemm.schedule, gemm.flatten, gemm.loads, gemm.swap_ab, stage.gather, stage.activation, stage.finalize)


@cache
def smallest_of_each_class(name: StageName, tile_size: int) -> tuple[Stage, ...]:
    """The cheapest stages to interpret, legal on some chip for some load, that between them hold what classes hold.

    How tiles are walked, and where rows come from and go, each meets how blocks are loaded; the two need not meet.
    """
    best: dict[tuple[object, ...], Stage] = {}
    shape = LayerShape(1024, 1024, 8, 2)
    for arch in ("sm_90", "sm_80", "sm_100"):
        for tokens in (1, 32, 128, 512, 2048):
            for stage in space.pool(Problem(shape, 8, tokens), KNOWN_TARGETS[arch], name):
                if stage.family == "grouped_mm":
                    continue
                known = best.get(class_of(stage))
                if stage.tile_size == tile_size and (known is None or cost(stage) < cost(known)):
                    best[class_of(stage)] = stage
    missing = {part for found in best for part in parts_of(found)}
    chosen = []
    while missing:
        found = max(best, key=lambda each: len(missing & parts_of(each)))
        chosen.append(best[found])
        missing -= parts_of(found)
    return tuple(chosen)


def parts_of(found: tuple[object, ...]) -> set[tuple[object, ...]]:
    """(schedule, flatten, loads, swap) and (loads, swap, gather, activation, finalize) of a class."""
    return {found[:4], found[2:]}


def cost(stage: Stage) -> tuple[int, ...]:
    gemm = stage.gemm
    return abs(gemm.block_n - 64), abs(gemm.block_k - 64), gemm.group_m, gemm.num_warps, gemm.num_stages


def tactics_of(tile_size: int) -> list[Tactic]:
    """Tactics that between them hold one stage of every class of the tile size."""
    first, second = (smallest_of_each_class(name, tile_size) for name in STAGES)
    count = max(len(first), len(second))
    pairs = zip(cycle(first), cycle(second), strict=False)
    return [Tactic.of(*pair) for pair, _ in zip(pairs, range(count), strict=False)]


@pytest.mark.parametrize("tile_size", TILE_SIZES)
def test_every_class_of_tactics(tile_size: int, generator: torch.Generator) -> None:
    load = Load(num_tokens=3, intermediate=40, num_experts=4, offset=1)
    for index, tactic in enumerate(tactics_of(tile_size)):
        each = replace(load, dtype=("fp16", "fp32")[index % 2])
        check(tactic, draw_args(each, generator), each)


def test_classes_hold_every_choice() -> None:
    """The classes above are not empty by accident."""
    first = {tile: {class_of(stage) for stage in smallest_of_each_class("gemm1", tile)} for tile in TILE_SIZES}
    second = {tile: {class_of(stage) for stage in smallest_of_each_class("gemm2", tile)} for tile in TILE_SIZES}
    for place, choices in enumerate([("grid", "persistent"), (False, True), ("pointer", "tma"), (False, True)]):
        for classes in (set().union(*first.values()), set().union(*second.values())):
            assert {each[place] for each in classes} >= set(choices)
    assert {each[4:6] for each in set().union(*first.values())} == {
        (gather, act) for gather in ("fused", "permute") for act in ("fused", "separate")
    }
    for tile in TILE_SIZES:
        assert {each[2] for each in first[tile]} == {each[2] for each in second[tile]} == {"pointer", "tma"}
        assert {each[6] for each in second[tile]} == {"fused", "reduce"}


# Loads.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_token_counts(num_tokens: int, form: str, generator: torch.Generator) -> None:
    load = Load(num_tokens)
    launcher = check(FORMS[form], draw_args(load, generator), load)
    assert bool(launcher.launches) == bool(num_tokens)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ids", [-1, 0, 5])
def test_rank_without_rows(ids: int, form: str, generator: torch.Generator) -> None:
    """All slots foreign: below the rank's experts, above them, or nobody's. The result is zeros."""
    load = Load(num_tokens=3, local_experts=2, offset=2)
    args = draw_args(load, generator)
    args.topk_ids[:, 0], args.topk_ids[:, 1] = ids, -1
    check(FORMS[form], args, load)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("local_experts", "offset"), [(1, 6), (3, 0), (5, 2), (7, 0)])
def test_local_experts(local_experts: int, offset: int, form: str, generator: torch.Generator) -> None:
    load = Load(num_experts=7, top_k=3, local_experts=local_experts, offset=offset, num_tokens=5, dtype="fp32")
    check(FORMS[form], draw_args(load, generator), load)


@pytest.mark.parametrize("form", ["pointers", "swapped", "gemv"])
@pytest.mark.parametrize("top_k", [1, 6])
def test_top_k(top_k: int, form: str, generator: torch.Generator) -> None:
    load = Load(top_k=top_k, num_tokens=3, local_experts=6)
    check(FORMS[form], draw_args(load, generator), load)


@pytest.mark.parametrize("form", ["pointers", "atomics", "permuted", "swapped"])
def test_one_expert_takes_all(form: str, generator: torch.Generator) -> None:
    """Several tiles of one expert, groups of tiles that do not come out even, and experts without rows."""
    load = Load(num_tokens=35, hidden=40, intermediate=24, local_experts=3, offset=2)
    args = draw_args(load, generator)
    args.topk_ids[:] = torch.tensor([3, 0], dtype=torch.int32)
    for group in ("g1", "g2"):
        check(FORMS[form].replace("t32", "t16").replace("/g8/", f"/{group}/").replace("/g1/", f"/{group}/"), args, load)


def test_more_slots_than_one_launch_sorts(generator: torch.Generator) -> None:
    load = Load(num_tokens=130, num_experts=9, top_k=8, local_experts=2, offset=4, hidden=24, intermediate=16)
    check(PERMUTED.replace("t16", "t256"), draw_args(load, generator), load)


def test_gemv_on_a_plain_grid(generator: torch.Generator) -> None:
    load = Load(num_tokens=1, top_k=1, num_experts=2, local_experts=2, hidden=24, intermediate=8)
    args = draw_args(load, generator)
    args.topk_ids[:] = 1
    check(GEMV.replace("p2", "grid"), args, load)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(136, 72), (104, 200), (64, 96), (192, 32), (71, 33), (76, 100)])
def test_sizes_beside_the_blocks(hidden: int, intermediate: int, form: str, generator: torch.Generator) -> None:
    """Rows that are no multiple of 16 bytes are read through pointers where the tactic asks for TMA.

    The last expert has a row: nothing lies behind its weights that could be read instead.
    """
    load = Load(num_tokens=3, hidden=hidden, intermediate=intermediate, num_experts=4, local_experts=2)
    args = draw_args(load, generator)
    args.topk_ids[0] = torch.tensor([1, 3], dtype=torch.int32)
    launcher = check(FORMS[form], args, load)
    tma = parse_tactic(FORMS[form]).gemm1.loads == "tma"
    permute = parse_tactic(FORMS[form]).gather == "permute"
    wanted = [
        (tma and permute and hidden % 8 == 0, tma and hidden % 8 == 0),
        (tma and intermediate % 8 == 0,) * 2,
    ]
    assert launcher.loads() == ([] if form == "gemv" else wanted)


def test_gate_rows_that_end_inside_a_block(generator: torch.Generator) -> None:
    """Half a block of up rows lies behind the weights: 48 gate rows in blocks of 32, as 2880 in blocks of 128."""
    load = Load(num_tokens=2, hidden=64, intermediate=48, num_experts=4, local_experts=2)
    args = draw_args(load, generator)
    args.topk_ids[0] = torch.tensor([1, 3], dtype=torch.int32)
    check(POINTERS, args, load)


@pytest.mark.parametrize("form", FORMS)
def test_workspace_larger_than_the_call(form: str, generator: torch.Generator) -> None:
    load = Load(num_tokens=5)
    ws = poisoned(load, generator.device, max_tokens=23)
    check(FORMS[form], draw_args(load, generator), load, ws)
    ws.hidden.fill_(NAN)
    again = replace(load, num_tokens=2)  # the second call meets what the first one left
    check(FORMS[form], draw_args(again, generator), again, ws)


# Strides.


def in_wider(tensor: torch.Tensor, *extra: int) -> torch.Tensor:
    """The same values as a slice of a wider tensor that is NaN around it (zero for whole numbers)."""
    size = [length + more for length, more in zip(tensor.shape, extra, strict=True)]
    wide = torch.full(size, NAN if tensor.is_floating_point() else 0, dtype=tensor.dtype, device=tensor.device)
    view = wide[tuple(slice(0, length) for length in tensor.shape)]
    view.copy_(tensor)
    return view


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the last two dimensions the other way round in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


STRIDES: dict[str, tuple[Callable[[LayerArgs], LayerArgs], bool]] = {
    # How the tensors lie, and whether weights can still be read by TMA.
    "x in wider rows": (lambda args: replace(args, x=in_wider(args.x, 3, 8)), True),
    "x unaligned": (lambda args: replace(args, x=in_wider(args.x, 0, 3)), True),
    "every second x": (lambda args: replace(args, x=args.x.repeat_interleave(2, dim=0)[::2]), True),
    "x transposed": (lambda args: replace(args, x=transposed(args.x)), True),
    "x one row for all": (lambda args: replace(args, x=args.x[:1].expand_as(args.x)), True),
    "weights transposed": (lambda args: replace(args, w13=transposed(args.w13), w2=transposed(args.w2)), False),
    "weights in wider rows": (
        lambda args: replace(args, w13=in_wider(args.w13, 0, 0, 16), w2=in_wider(args.w2, 0, 0, 8)),
        True,
    ),
    "weights in unaligned rows": (
        lambda args: replace(args, w13=in_wider(args.w13, 0, 0, 3), w2=in_wider(args.w2, 0, 0, 1)),
        False,
    ),
    "weights with rows between experts": (
        lambda args: replace(args, w13=in_wider(args.w13, 1, 8, 0), w2=in_wider(args.w2, 0, 4, 0)),
        True,
    ),
    "routing transposed": (
        lambda args: replace(
            args, topk_weights=transposed(args.topk_weights), topk_ids=transposed(args.topk_ids.long())
        ),
        True,
    ),
    "routing in wider rows": (
        lambda args: replace(
            args, topk_weights=in_wider(args.topk_weights, 1, 3), topk_ids=in_wider(args.topk_ids, 0, 2)
        ),
        True,
    ),
    "the same routing for all": (
        lambda args: replace(
            args,
            topk_weights=args.topk_weights[:1].expand_as(args.topk_weights),
            topk_ids=args.topk_ids[:1].expand_as(args.topk_ids),
        ),
        True,
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides: str, form: str, generator: torch.Generator) -> None:
    load = Load(num_tokens=4, num_experts=4, offset=1)
    restride, weights_by_tma = STRIDES[strides]
    args = restride(draw_args(load, generator))
    launcher = check(FORMS[form], args, load)
    if parse_tactic(FORMS[form]).gemm1.loads == "tma":
        assert [weights for _, weights in launcher.loads()] == [weights_by_tma] * 2
    assert can_use_tma(args.w13) == can_use_tma(args.w2) == weights_by_tma


# Offsets beyond 2^31 elements, on memory that is reserved but, apart from the pages touched, not there.

FAR = 2**30 + 8  # a stride that fits 32 bits; twice that is an offset that does not


def far_apart(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """The same values with FAR elements from one index of the first dimension to the next."""
    view = memory.view(tensor.dtype).as_strided(tensor.shape, (FAR, *tensor.stride()[1:]))
    view.copy_(tensor)
    return view


@pytest.fixture
def reserve(tmp_path: Path) -> Callable[[], torch.Tensor]:
    """Gives some 10 GB of memory at a time, mapped to a file that takes no room but for the pages touched."""

    def give() -> torch.Tensor:
        path, size = tmp_path / f"sparse{len(list(tmp_path.iterdir()))}", 5 * FAR * 2
        try:
            with path.open("wb") as file:
                file.truncate(size)
            return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            pytest.skip(f"no sparse files of {size:,} bytes here: {error}")

    return give


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that is reserved without being there")
@pytest.mark.parametrize("form", FORMS)
def test_offsets_beyond_31_bits(form: str, reserve: Callable[[], torch.Tensor], generator: torch.Generator) -> None:
    load = Load(num_tokens=4, hidden=32, intermediate=24, num_experts=4, top_k=1, local_experts=4)
    args = draw_args(load, generator)
    args.topk_ids[:, 0] = torch.tensor([3, 0, 3, 2], dtype=torch.int32)
    args = replace(args, **{name: far_apart(getattr(args, name), reserve()) for name in ("x", "w13", "w2")})
    ws = poisoned(load, generator.device)
    # The interpreter counts loops in 32 bits whatever their bounds, so the three kernels that walk rows in a loop of
    # 64 bits (see test_compile.py) keep their rows near.
    for name in ("hidden", "expert_out") if form not in ("permuted", "gemv") else ("expert_out",):
        setattr(ws, name, far_apart(getattr(ws, name), reserve()))
    assert args.w13.stride(0) < 2**31 < 3 * args.w13.stride(0)
    check(FORMS[form], args, load, ws)


@pytest.mark.skipif(not INTERPRETED, reason="needs memory that is reserved without being there")
@pytest.mark.parametrize("form", ["pointers", "gemv"])
def test_rows_of_one_expert_beyond_31_bits(
    form: str, reserve: Callable[[], torch.Tensor], generator: torch.Generator
) -> None:
    """Weights stored [rows, experts, K]: the rows of one expert are far apart, and there are more than two."""
    load = Load(num_tokens=2, hidden=32, intermediate=16, num_experts=2, top_k=1, local_experts=2)
    args = draw_args(load, generator)
    args.topk_ids[:, 0] = torch.tensor([1, 0], dtype=torch.int32)
    far = {}
    for name in ("w13", "w2"):
        tensor = getattr(args, name)
        room = reserve().view(tensor.dtype)
        step = 2**31 // (tensor.shape[1] - 1) + 8
        assert tensor.shape[1] * step < room.numel()
        far[name] = room.as_strided(tensor.shape, (tensor.shape[2], step, 1)).copy_(tensor)
        assert is_wide(far[name]) and not is_wide(tensor)
    check(FORMS[form], replace(args, **far), load)


@pytest.mark.skipif(not INTERPRETED, reason="addresses are checked in the interpreter only")
def test_reading_outside_a_tensor_is_noticed(generator: torch.Generator) -> None:
    """The check of addresses itself: weights of the last expert are missing."""
    load = Load(num_tokens=2, num_experts=3)
    args = draw_args(load, generator)
    args.topk_ids[:] = torch.tensor([2, 0], dtype=torch.int32)
    check(POINTERS, args, load)
    with pytest.raises(Exception, match="lies in none of its tensors"):
        check(POINTERS, replace(args, w2=args.w2[:2]), load)
