"""Launching the GEMM kernels of a tactic: descriptors, strides, constants and the size of the grid."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fitune.kernels import quantize
from fitune.kernels.buffers import LayerArgs, Workspace, hidden_q, x_q
from fitune.kernels.gemm import grouped_gemm_kernel
from fitune.kernels.gemv import gemv_combine_kernel, gemv_swiglu_kernel
from fitune.kernels.launch import INTERPRETED, Launcher, pdl_options
from fitune.kernels.quantize import Quantized, fp8_max
from fitune.tactic import GemmTactic, Stage, max_tiles


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


def _weights_descriptor(weights: Tensor, block_n: int, block_k: int, *, together: bool) -> TensorDescriptor:
    """Blocks of one expert's weights; of gate rows and their up rows at once where they go `together`."""
    experts, n, k = weights.shape
    row, expert = _row_stride(weights), weights.stride(0) if experts > 1 else n * _row_stride(weights)
    if together:
        half = n // 2
        return TensorDescriptor(
            weights, [experts, 2, half, k], [expert, half * row, row, 1], [1, 2, block_n // 2, block_k]
        )
    return TensorDescriptor(weights, [experts, n, k], [expert, row, 1], [1, block_n, block_k])


def _row_stride(tensor: Tensor) -> int:
    """Elements from row to row; of a single row, where torch lets any number stand, what a dense tensor has."""
    return int(tensor.stride(-2)) if tensor.shape[-2] > 1 else int(tensor.shape[-1])


def grouped_gemm(
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
    pair = swiglu and w_tma and gemm.reads_gate_and_up_apart

    def weights_of(rows_at_once: int) -> TensorDescriptor:
        box = rows_at_once // 2 if pair else rows_at_once
        return _weights_descriptor(weights, box, gemm.block_k, together=swiglu and not pair)

    num_blocks = triton.cdiv(n, gemm.block_n)
    most_tiles = max_tiles(args.max_rows, args.local_experts, tile) * num_blocks
    persistent = gemm.schedule == "persistent"
    programs = min(most_tiles, ws.num_sms * gemm.programs_per_sm) if persistent else most_tiles
    launch(
        grouped_gemm_kernel,
        (programs,),
        (
            _rows_descriptor(a, (tile, gemm.block_k)) if a_tma else a,
            weights_of(gemm.block_n) if w_tma else weights,
            weights_of(gemm.block_n // gemm.tail) if w_tma else weights,
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
            "PAIR": pair,
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


def gemv_gemm1(gemm: GemmTactic, args: LayerArgs, ws: Workspace, launch: Launcher) -> None:
    by_kernel = args.scales in ("channel", "tensor")
    source: Tensor | Quantized = args.x
    if by_kernel:
        source = x_q(args, ws)
        quantize.quantize_tokens(args.x, source, args.scales, launch=launch)
    width, rows_at_once = args.w13.shape[1] // 2, gemm.block_n // 2
    call = (args.num_slots, args.local_expert_offset, args.local_experts, *args.topk_ids.stride())
    _gemv(
        gemv_swiglu_kernel, args.max_rows * triton.cdiv(width, rows_at_once), gemm, source, args.w13, args.w13_scale,
        ws.hidden, (args.topk_ids, *call), ws, launch,
        {
            "SLOTS": triton.next_power_of_2(args.num_slots), "WIDTH": width, "TOP_K": args.top_k, "ROWS": rows_at_once,
            "SCALES": args.scales,
        },
    )  # fmt: skip
    if by_kernel:
        quantize.quantize_tokens(ws.hidden[: args.num_slots], hidden_q(args, ws), args.scales, launch=launch)


def gemv_gemm2(gemm: GemmTactic, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    source: Tensor | Quantized = hidden_q(args, ws) if args.scales in ("channel", "tensor") else ws.hidden
    width = args.w2.shape[1]
    call = (
        args.num_tokens, args.local_expert_offset, args.local_experts, *args.topk_ids.stride(),
        *args.topk_weights.stride(),
    )  # fmt: skip
    _gemv(
        gemv_combine_kernel, args.num_tokens * triton.cdiv(width, gemm.block_n), gemm, source, args.w2, args.w2_scale,
        out, (args.topk_ids, args.topk_weights, *call), ws, launch,
        {
            "SLOTS": triton.next_power_of_2(args.top_k), "TOKENS": triton.next_power_of_2(args.num_tokens),
            "WIDTH": width, "TOP_K": args.top_k, "ROWS": gemm.block_n, "SCALES": args.scales,
        },
    )  # fmt: skip


def _gemv(
    kernel: Any,
    items: int,
    gemm: GemmTactic,
    source: Tensor | Quantized,
    weights: Tensor,
    weight_scale: Tensor | None,
    target: Tensor,
    call: tuple[Any, ...],
    ws: Workspace,
    launch: Launcher,
    constants: dict[str, Any],
) -> None:
    """Launch one of the two kernels. `call` are the arguments that belong to one of them only, routing first."""
    k = weights.shape[2]
    programs = min(items, ws.num_sms * gemm.programs_per_sm) if gemm.schedule == "persistent" else items
    x, x_scale, x_strides = _parts(source)
    strides = (*x.stride(), *weights.stride(), target.stride(0), x_strides[0], *_weight_scale_strides(weight_scale))
    launch(
        kernel,
        (programs,),
        (x, weights, target, x_scale, weight_scale, *call, *strides),
        {
            **constants,
            "K": k,
            "BLOCK_K": gemm.block_k,
            "FOLD": 16 // weights.element_size(),
            "AHEAD": gemm.num_stages > 1 and gemm.block_k < k,
            "FP8_MAX": fp8_max(weights.dtype) if constants["SCALES"] else 0.0,
            "WIDE": is_wide(weights),
            "UPCAST": INTERPRETED,
            "num_warps": gemm.num_warps,
            "num_stages": 1,
            **pdl_options(gemm.pdl),
        },
    )
