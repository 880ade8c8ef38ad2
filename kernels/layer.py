"""The MoE layer of one rank: buffers, and the launches that a tactic stands for.

    sort -> gemm1 (permute, grouped GEMM, SwiGLU) -> gemm2 (grouped GEMM, combine)

Nothing here chooses and nothing waits for the GPU. Every launch goes through a `Launcher`, so the same code path
runs a stage, or only compiles it for tensors on the `meta` device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fitune.families.registry import family_named
from fitune.kernels import quantize, reference, rows, sort
from fitune.kernels.gemm import grouped_gemm_kernel
from fitune.kernels.gemv import gemv_kernel
from fitune.kernels.launch import INTERPRETED, Launcher, pdl_options, run
from fitune.kernels.plugin import launching_half
from fitune.kernels.quantize import Quantized, fp8_max, scale_rows
from fitune.problem import LayerShape, Scales
from fitune.tactic import TILE_SIZES, GemmTactic, Stage, Tactic, max_tiles

IO_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_block128": torch.bfloat16,
    "fp8_channel": torch.bfloat16,
    "fp8_tensor": torch.bfloat16,
}
"""By layer dtype: that of x, of the result, and of what passes between kernels unquantised."""


def weight_dtype(dtype: str, fp8: torch.dtype = torch.float8_e4m3fn) -> torch.dtype:
    """The element type of a layer's weights; `fp8` is the form that the chip multiplies (fnuz on gfx942)."""
    return fp8 if dtype.startswith("fp8") else IO_DTYPES[dtype]


def fp8_of(target: str) -> torch.dtype:
    """The e4m3 form of a chip, by its arch name."""
    return torch.float8_e4m3fnuz if target.startswith("gfx94") else torch.float8_e4m3fn


@dataclass(slots=True)
class LayerArgs:
    """The tensors of one call.

    x [N, H]; w13 [L, 2I, H], gate rows first; w2 [L, H, I]; topk_weights [N, K] float32; topk_ids [N, K] int32 or
    int64 over all experts of the layer. Ids outside [local_expert_offset, local_expert_offset + L), -1 among them,
    belong to other ranks and contribute nothing. Any strides.

    fp8 layers have e4m3 weights and float32 scales. `fp8_block128`: w13_scale [L, 2 * ceil(I / 128), ceil(H / 128)],
    gate blocks first, w2_scale [L, ceil(H / 128), ceil(I / 128)]. `fp8_channel`: [L, 2I] and [L, H]. `fp8_tensor`:
    [L, 2] (gate, up) and [L, 1], with x_scale and hidden_scale [1, 1] for the rows.
    """

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    local_expert_offset: int = 0
    scales: Scales = ""
    w13_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    x_scale: Tensor | None = None
    hidden_scale: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.x.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.topk_ids.shape[1])

    @property
    def num_slots(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def local_experts(self) -> int:
        return int(self.w13.shape[0])

    def reference_weights(self) -> tuple[reference.Weights, reference.Weights]:
        """(w13, w2) as the reference takes them."""
        if not self.scales:
            return self.w13, self.w2
        assert self.w13_scale is not None and self.w2_scale is not None
        first = reference.ScaledWeights(self.w13, self.w13_scale, self.scales, self.w13.shape[1] // 2)
        return first, reference.ScaledWeights(self.w2, self.w2_scale, self.scales, self.w2.shape[1])

    @property
    def max_rows(self) -> int:
        """The most rows the routing can send here."""
        return self.num_tokens * min(self.top_k, self.local_experts)


@dataclass(slots=True)
class Workspace:
    """Buffers for calls of up to `max_tokens` tokens; their contents do not outlive a call.

    Sorted rows are local slots in order of (local expert, slot), without padding. `permuted` and `expert_out` share
    memory: the first is dead once gemm1 is done.

    row_of_slot [max_tokens * K] int32, -1 for foreign slots; slot_of_row [rows] int32; expert_rows and expert_tiles
    [L + 1] int32 prefix sums (the last of expert_tiles is the number of tiles); tile_expert [max tiles] int32;
    permuted [rows, H]; gate_up [rows, 2I]; hidden [rows, I]; expert_out [rows, H]; out_f32 [max_tokens, H]. fp8 layers
    have quantised rows beside them: x_q [rows, H] of tokens or of permuted rows, and hidden_q [rows, I].
    """

    max_tokens: int
    num_sms: int
    row_of_slot: Tensor
    slot_of_row: Tensor
    expert_rows: Tensor
    expert_tiles: Tensor
    tile_expert: Tensor
    block_counts: Tensor
    permuted: Tensor
    gate_up: Tensor
    hidden: Tensor
    expert_out: Tensor
    out_f32: Tensor
    x_q: Quantized | None = None
    hidden_q: Quantized | None = None

    @classmethod
    def allocate(
        cls,
        shape: LayerShape,
        local_experts: int,
        max_tokens: int,
        device: torch.device | str,
        *,
        num_sms: int | None = None,
        fp8: torch.dtype = torch.float8_e4m3fn,
    ) -> Workspace:
        """Allocate for any tactic. `num_sms` defaults to the device's (4 where there is no GPU)."""
        device = torch.device(device)
        slots = max(1, max_tokens * shape.top_k)
        dtype = IO_DTYPES[shape.dtype]

        def ints(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def floats(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def quantized(columns: int) -> Quantized | None:
            if not shape.scales:
                return None
            groups, scaled = scale_rows(shape.scales, columns), 1 if shape.scales == "tensor" else slots
            return Quantized(
                torch.empty((slots, columns), dtype=fp8, device=device),
                torch.empty((groups, scaled), dtype=torch.float32, device=device),
            )

        wide = floats(slots, shape.hidden_size)
        return cls(
            max_tokens=max_tokens,
            num_sms=num_sms or device_sms(device),
            row_of_slot=ints(slots),
            slot_of_row=ints(slots),
            expert_rows=ints(local_experts + 1),
            expert_tiles=ints(local_experts + 1),
            tile_expert=ints(max(1, max_tiles(slots, local_experts, min(TILE_SIZES)))),
            block_counts=ints(max(1, sort.block_counts_size(slots, local_experts))),
            permuted=wide,
            gate_up=floats(slots, 2 * shape.intermediate_size),
            hidden=floats(slots, shape.intermediate_size),
            expert_out=wide,
            out_f32=torch.empty((max(1, max_tokens), shape.hidden_size), dtype=torch.float32, device=device),
            x_q=quantized(shape.hidden_size),
            hidden_q=quantized(shape.intermediate_size),
        )

    @property
    def bytes(self) -> int:
        """Memory held."""
        tensors = [
            self.row_of_slot, self.slot_of_row, self.expert_rows, self.expert_tiles, self.tile_expert,
            self.block_counts, self.permuted, self.gate_up, self.hidden, self.out_f32,
        ]  # fmt: skip
        for pair in (self.x_q, self.hidden_q):
            if pair is not None:
                tensors += [pair.values, pair.scales]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def device_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA or HIP device; 4 elsewhere, where kernels are interpreted."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def run_layer(tactic: Tactic, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher = run) -> None:
    """Run the whole layer into out [N, H]. N = 0 does nothing."""
    if args.num_tokens == 0:
        return
    run_sort(tactic.family, tactic.tile_size, args, ws, launch)
    run_stage(tactic.stage("gemm1"), args, ws, out, launch)
    run_stage(tactic.stage("gemm2"), args, ws, out, launch)


def run_sort(family: str, tile_size: int, args: LayerArgs, ws: Workspace, launch: Launcher = run) -> None:
    """Sort the slots by local expert and cut each expert's rows into tiles, for a family that needs it."""
    if args.num_tokens == 0 or not family_named(family).sorts:
        return
    sort.sort_slots(
        args.topk_ids,
        args.local_expert_offset,
        args.local_experts,
        tile_size,
        row_of_slot=ws.row_of_slot,
        slot_of_row=ws.slot_of_row,
        expert_rows=ws.expert_rows,
        expert_tiles=ws.expert_tiles,
        tile_expert=ws.tile_expert,
        block_counts=ws.block_counts,
        launch=launch,
    )


def run_stage(stage: Stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher = run) -> None:
    """Run one stage. gemm1 fills ws.hidden; gemm2 reads it and fills out [N, H]. Raises InputError."""
    if args.num_tokens == 0:
        return
    launching_half(family_named(stage.family).launching)(stage, args, ws, out, launch)


def run_own_stage(stage: Stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    """The launching half of the families tile and gemv."""
    if stage.stage == "gemm1":
        _run_gemm1(stage, args, ws, launch)
    else:
        _run_gemm2(stage, args, ws, out, launch)


def row_of_slots(family: str, args: LayerArgs, ws: Workspace) -> Tensor:
    """[N * K] row of `hidden` that holds each slot, -1 for foreign slots. After run_sort, if the family sorts."""
    if family_named(family).sorts:
        return ws.row_of_slot[: args.num_slots]
    ids = args.topk_ids.reshape(-1).to(torch.int64) - args.local_expert_offset
    local = (ids >= 0) & (ids < args.local_experts) & (args.topk_ids.reshape(-1) >= 0)
    slots = torch.arange(args.num_slots, device=ids.device, dtype=torch.int32)
    return torch.where(local, slots, torch.full_like(slots, -1))


def _run_gemm1(stage: Stage, args: LayerArgs, ws: Workspace, launch: Launcher) -> None:
    if stage.family == "gemv":
        _gemv_gemm1(stage.own_gemm, args, ws, launch)
        return
    permute = stage.gather == "permute"
    fused = stage.activation == "fused"
    in_epilogue = fused and stage.quantize == "fused"
    target: Tensor | Quantized = ws.hidden if fused else ws.gate_up
    if args.scales and in_epilogue:
        target = hidden_q(args, ws)
    _grouped_gemm(
        stage, _gathered(args, ws, launch, permute=permute), args.w13, args.w13_scale, target, args, ws, launch,
        gather=not permute, swiglu=fused, atomic=False, split=args.w13.shape[1] // 2,
    )  # fmt: skip
    if args.scales and not in_epilogue:
        quantize.quantize_sorted(
            ws.hidden if fused else ws.gate_up, ws.expert_rows, hidden_q(args, ws), args.scales, ws.num_sms,
            swiglu=not fused, launch=launch,
        )  # fmt: skip
    elif not fused:
        rows.swiglu(ws.gate_up, ws.expert_rows, ws.hidden, rows.PROGRAMS_PER_SM * ws.num_sms, launch=launch)


def _gathered(args: LayerArgs, ws: Workspace, launch: Launcher, *, permute: bool) -> Tensor | Quantized:
    """The rows that gemm1 reads: tokens, or a copy of them in sorted order; quantised in fp8 layers."""
    if args.scales:
        target = _x_q(args, ws)
        if permute:
            quantize.quantize_permuted(
                args.x, ws.slot_of_row, ws.expert_rows, args.top_k, target, args.scales, ws.num_sms, launch=launch
            )
        else:
            quantize.quantize_tokens(args.x, target, args.scales, launch=launch)
        return target
    if not permute:
        return args.x
    rows.permute_rows(
        args.x, ws.slot_of_row, ws.expert_rows, args.top_k, ws.permuted, rows.PROGRAMS_PER_SM * ws.num_sms,
        launch=launch,
    )  # fmt: skip
    return ws.permuted


def _run_gemm2(stage: Stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    if stage.family == "gemv":
        _gemv_gemm2(stage.own_gemm, args, ws, out, launch)
        return
    source = hidden_q(args, ws) if args.scales else ws.hidden
    atomic = stage.finalize == "fused"
    target = ws.out_f32[: args.num_tokens] if atomic else ws.expert_out
    if atomic:
        rows.zero_fill(target, launch=launch)
    _grouped_gemm(
        stage, source, args.w2, args.w2_scale, target, args, ws, launch,
        gather=False, swiglu=False, atomic=atomic, split=args.w2.shape[1],
    )  # fmt: skip
    if atomic:
        rows.cast_rows(target, out, launch=launch)
    else:
        rows.combine(ws.expert_out, ws.row_of_slot, args.topk_weights, out, launch=launch)


def _x_q(args: LayerArgs, ws: Workspace) -> Quantized:
    """Where x goes quantised. One scale for all rows is the caller's, not the workspace's."""
    assert ws.x_q is not None
    return ws.x_q if args.x_scale is None else Quantized(ws.x_q.values, args.x_scale)


def hidden_q(args: LayerArgs, ws: Workspace) -> Quantized:
    """Where the hidden rows go quantised; as for x."""
    assert ws.hidden_q is not None
    return ws.hidden_q if args.hidden_scale is None else Quantized(ws.hidden_q.values, args.hidden_scale)


def can_use_tma(tensor: Tensor) -> bool:
    """Whether a [rows, K] or [experts, rows, K] tensor can be read through a TMA descriptor.

    The last dimension must be dense, the other strides positive multiples of 16 bytes, the base 16-byte aligned.
    """
    item = tensor.element_size()
    return bool(
        tensor.stride(-1) == 1
        and all(
            stride > 0 and stride * item % 16 == 0
            for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if size > 1
        )
        and tensor.data_ptr() % 16 == 0
    )


def is_wide(weights: Tensor) -> bool:
    """Whether one expert's weights span 2^31 elements or more, as those of a strided view may."""
    _, n, k = weights.shape
    return bool((n - 1) * weights.stride(1) + (k - 1) * weights.stride(2) >= 2**31)


def _rows_descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Blocks of a [rows, K] tensor."""
    return TensorDescriptor(tensor, list(tensor.shape), [_row_stride(tensor), 1], list(block))


def _weights_descriptor(weights: Tensor, block_n: int, block_k: int, *, swiglu: bool) -> TensorDescriptor:
    """Blocks of one expert's weights; of gate rows and their up rows at once for SwiGLU."""
    experts, n, k = weights.shape
    row, expert = _row_stride(weights), weights.stride(0) if experts > 1 else n * _row_stride(weights)
    if swiglu:
        half = n // 2
        return TensorDescriptor(
            weights, [experts, 2, half, k], [expert, half * row, row, 1], [1, 2, block_n // 2, block_k]
        )
    return TensorDescriptor(weights, [experts, n, k], [expert, row, 1], [1, block_n, block_k])


def _row_stride(tensor: Tensor) -> int:
    """Elements from row to row; of a single row, where torch lets any number stand, what a dense tensor has."""
    return int(tensor.stride(-2)) if tensor.shape[-2] > 1 else int(tensor.shape[-1])


def _grouped_gemm(
    stage: Stage,
    source: Tensor | Quantized,
    weights: Tensor,
    weight_scale: Tensor | None,
    target: Tensor | Quantized,
    args: LayerArgs,
    ws: Workspace,
    launch: Launcher,
    *,
    gather: bool,
    swiglu: bool,
    atomic: bool,
    split: int,
) -> None:
    gemm, tile = stage.own_gemm, stage.tile_size
    _, n, k = weights.shape
    a, a_scale, a_strides = _parts(source)
    out, out_scale, out_strides = _parts(target)
    # Tensors that no descriptor can describe are read through pointers: same result, another binary.
    w_tma = gemm.loads == "tma" and can_use_tma(weights)
    a_tma = gemm.loads == "tma" and not gather and can_use_tma(a)
    num_blocks = triton.cdiv(n, gemm.block_n)
    most_tiles = max_tiles(args.max_rows, args.local_experts, tile) * num_blocks
    persistent = gemm.schedule == "persistent"
    programs = min(most_tiles, ws.num_sms * gemm.programs_per_sm) if persistent else most_tiles
    launch(
        grouped_gemm_kernel,
        (programs,),
        (
            _rows_descriptor(a, (tile, gemm.block_k)) if a_tma else a,
            _weights_descriptor(weights, gemm.block_n, gemm.block_k, swiglu=swiglu) if w_tma else weights,
            _weights_descriptor(weights, gemm.block_n // gemm.tail, gemm.block_k, swiglu=swiglu) if w_tma else weights,
            out,
            a_scale,
            weight_scale,
            out_scale,
            ws.slot_of_row,
            args.topk_weights.contiguous() if atomic else args.topk_weights,
            ws.expert_rows,
            ws.expert_tiles,
            ws.tile_expert,
            args.local_experts,
            gemm.group_m,
            a.stride(0),
            a.stride(1),
            weights.stride(0),
            weights.stride(1),
            weights.stride(2),
            out.stride(0),
            *a_strides,
            *_weight_scale_strides(weight_scale),
            out_strides[1],
        ),
        {
            "N": n,
            "K": k,
            "SPLIT": split,
            "TOP_K": args.top_k,
            "TILE": tile,
            "BLOCK_N": gemm.block_n,
            "BLOCK_K": gemm.block_k,
            "GATHER": gather,
            "SWIGLU": swiglu,
            "ATOMIC": atomic,
            "SCALES": args.scales,
            "QUANTIZE": args.scales if out_scale is not None else "",
            "FP8_MAX": fp8_max(out.dtype) if out_scale is not None else 0.0,
            "A_TMA": a_tma,
            "W_TMA": w_tma,
            "SWAP": gemm.swap_ab,
            "PERSISTENT": persistent,
            "FLATTEN": gemm.flatten,
            "TAIL": gemm.tail,
            "WIDE": is_wide(weights),
            "UPCAST": INTERPRETED,
            "num_warps": gemm.num_warps,
            "num_stages": gemm.num_stages,
        },
    )


def _parts(rows_of: Tensor | Quantized) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
    """(values, scales, scale strides from row to row and from group to group)."""
    if isinstance(rows_of, Quantized):
        return rows_of.values, rows_of.scales, rows_of.scale_strides()
    return rows_of, None, (0, 0)


def _weight_scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """Strides over experts, groups of rows or rows, and groups of K."""
    if scale is None:
        return 0, 0, 0
    return scale.stride(0), scale.stride(1), scale.stride(2) if scale.dim() == 3 else 0


def _gemv_gemm1(gemm: GemmTactic, args: LayerArgs, ws: Workspace, launch: Launcher) -> None:
    source: Tensor | Quantized = args.x
    if args.scales in ("channel", "tensor"):
        source = _x_q(args, ws)
        quantize.quantize_tokens(args.x, source, args.scales, launch=launch)
    _gemv(gemm, source, args.w13, args.w13_scale, ws.hidden, args, ws, launch, swiglu=True)
    if args.scales in ("channel", "tensor"):
        hidden = ws.hidden[: args.num_slots]
        quantize.quantize_tokens(hidden, hidden_q(args, ws), args.scales, launch=launch)


def _gemv_gemm2(gemm: GemmTactic, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    source: Tensor | Quantized = hidden_q(args, ws) if args.scales in ("channel", "tensor") else ws.hidden
    _gemv(gemm, source, args.w2, args.w2_scale, ws.expert_out, args, ws, launch, swiglu=False)
    rows.combine_slots(
        ws.expert_out, args.topk_ids, args.local_expert_offset, args.local_experts, args.topk_weights, out,
        pdl=gemm.pdl, launch=launch,
    )  # fmt: skip


def _gemv(
    gemm: GemmTactic,
    source: Tensor | Quantized,
    weights: Tensor,
    weight_scale: Tensor | None,
    target: Tensor,
    args: LayerArgs,
    ws: Workspace,
    launch: Launcher,
    *,
    swiglu: bool,
) -> None:
    _, n, k = weights.shape
    width = n // 2 if swiglu else n
    block_rows = gemm.block_n // 2 if swiglu else gemm.block_n
    items = args.max_rows * triton.cdiv(width, block_rows)
    programs = min(items, ws.num_sms * gemm.programs_per_sm) if gemm.schedule == "persistent" else items
    ids = args.topk_ids
    x, x_scale, x_strides = _parts(source)
    launch(
        gemv_kernel,
        (programs,),
        (
            x,
            weights,
            target,
            x_scale,
            weight_scale,
            ids,
            args.num_slots,
            args.local_expert_offset,
            args.local_experts,
            ids.stride(0),
            ids.stride(1),
            x.stride(0),
            x.stride(1),
            weights.stride(0),
            weights.stride(1),
            weights.stride(2),
            target.stride(0),
            x_strides[0],
            *_weight_scale_strides(weight_scale),
        ),
        {
            "WIDTH": width,
            "K": k,
            "TOP_K": args.top_k,
            "SLOTS": triton.next_power_of_2(args.num_slots),
            "ROWS": block_rows,
            "BLOCK_K": gemm.block_k,
            "SWIGLU": swiglu,
            "FOLD": 16 // weights.element_size(),
            "AHEAD": gemm.num_stages > 1 and gemm.block_k < k,
            "SCALES": args.scales,
            "FP8_MAX": fp8_max(weights.dtype) if args.scales else 0.0,
            "WIDE": is_wide(weights),
            "UPCAST": INTERPRETED,
            "num_warps": gemm.num_warps,
            "num_stages": 1,
            **pdl_options(gemm.pdl),
        },
    )
