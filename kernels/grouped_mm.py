"""The launching half of the `grouped_mm` family: torch's grouped GEMM between our permute, SwiGLU and combine kernels.

    gemm1: permute -> grouped GEMM -> SwiGLU into ws.hidden        gemm2: grouped GEMM -> combine into out

In `fp8_channel` layers permute and SwiGLU quantise each row, and the GEMM takes a scale for each row of both operands.

The number of rows stays on the device: torch gets as many rows as there can be, and where each expert's rows end. Its
result is a fresh tensor that the next kernel reads, never copied; inside a CUDA graph it lies in the graph's own pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from fitune.errors import DispatchError
from fitune.kernels import quantize, rows
from fitune.kernels.buffers import LayerArgs, Workspace, hidden_q, x_q
from fitune.kernels.launch import Launcher
from fitune.kernels.plugin import compiles_only
from fitune.kernels.quantize import Quantized
from fitune.tactic import Stage


def run_stage(stage: Stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    """Run one stage. Raises DispatchError for weights or scales that torch's operator does not take."""
    if stage.stage == "gemm1":
        gate_up = _product(_permuted(args, ws, launch), args.w13, args.w13_scale, "w13", args, ws, launch)
        if args.scales:
            quantize.quantize_sorted(
                gate_up, ws.expert_rows, hidden_q(args, ws), args.scales, ws.num_sms, swiglu=True, launch=launch
            )
        else:
            rows.swiglu(gate_up, ws.expert_rows, ws.hidden, rows.PROGRAMS_PER_SM * ws.num_sms, launch=launch)
    else:
        source = hidden_q(args, ws) if args.scales else ws.hidden
        expert_out = _product(source, args.w2, args.w2_scale, "w2", args, ws, launch)
        rows.combine(expert_out, ws.row_of_slot, args.topk_weights, out, launch=launch)


def _permuted(args: LayerArgs, ws: Workspace, launch: Launcher) -> Tensor | Quantized:
    """The tokens' rows in sorted order, quantised in fp8 layers."""
    if args.scales:
        target = x_q(args, ws)
        quantize.quantize_permuted(
            args.x, ws.slot_of_row, ws.expert_rows, args.top_k, target, args.scales, ws.num_sms, launch=launch
        )
        return target
    programs = rows.PROGRAMS_PER_SM * ws.num_sms
    rows.permute_rows(args.x, ws.slot_of_row, ws.expert_rows, args.top_k, ws.permuted, programs, launch=launch)
    return ws.permuted


def _product(
    source: Tensor | Quantized,
    weights: Tensor,
    scale: Tensor | None,
    name: str,
    args: LayerArgs,
    ws: Workspace,
    launch: Launcher,
) -> Tensor:
    """source [>= max_rows, K] times weights [L, N, K]: [max_rows, N], of which the rows of local slots are written."""
    _check(weights, name)
    if scale is not None:
        _check_scale(scale, name)
    if compiles_only(launch):
        return torch.empty((args.max_rows, weights.shape[1]), dtype=args.x.dtype, device="meta")
    ends, count = ws.expert_rows[1 : args.local_experts + 1], args.max_rows
    if isinstance(source, Tensor):
        result: Tensor = torch.nn.functional.grouped_mm(source[:count], weights.transpose(1, 2), offs=ends)
        return result
    multiply = cast(Callable[..., Tensor], torch._scaled_grouped_mm)
    return multiply(
        source.values[:count], weights.transpose(1, 2), source.scales[0, :count], scale, offs=ends,
        out_dtype=args.x.dtype, use_fast_accum=False,
    )  # fmt: skip


def _check(weights: Tensor, name: str) -> None:
    """Rows of K, or but for fp8 columns of N, must be dense, and each must begin at a multiple of 16 bytes."""
    item, (experts, one, other) = weights.element_size(), weights.stride()
    step = one if other == 1 else other if one == 1 and item > 1 else 1
    if step * item % 16 or experts * item % 16 or weights.data_ptr() % 16:
        raise DispatchError(
            f"{name} has strides {tuple(weights.stride())}; torch's grouped GEMM needs dense rows that begin at "
            "multiples of 16 bytes: pass contiguous weights, or tune without the family grouped_mm"
        )


def _check_scale(scale: Tensor, name: str) -> None:
    """An expert's scales must lie side by side."""
    if scale.stride(1) != 1:
        raise DispatchError(
            f"{name}_scale has strides {tuple(scale.stride())}; torch's grouped GEMM needs an expert's scales side by "
            "side: pass contiguous scales, or tune without the family grouped_mm"
        )
