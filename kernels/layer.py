"""The MoE layer of one rank: buffers, and the launches that a tactic stands for.

    sort -> gemm1 (permute, grouped GEMM, SwiGLU) -> gemm2 (grouped GEMM, combine)

Nothing here chooses and nothing waits for the GPU. Every launch goes through a `Launcher`, so the same code path
runs a stage, or only compiles it for tensors on the `meta` device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fitune.families.registry import family_named
from fitune.kernels import quantize, rows, sort
from fitune.kernels.buffers import (
    IO_DTYPES,
    LayerArgs,
    Workspace,
    device_sms,
    fp8_of,
    hidden_q,
    weight_dtype,
    x_q,
)
from fitune.kernels.launch import INTERPRETED, Launcher, run
from fitune.kernels.launches import can_use_tma, gemv_gemm1, gemv_gemm2, grouped_gemm
from fitune.kernels.plugin import launching_half
from fitune.kernels.quantize import Quantized
from fitune.tactic import Stage, Tactic

__all__ = [
    "INTERPRETED",
    "IO_DTYPES",
    "LayerArgs",
    "Workspace",
    "can_use_tma",
    "device_sms",
    "fp8_of",
    "hidden_q",
    "row_of_slots",
    "run_layer",
    "run_own_stage",
    "run_sort",
    "run_stage",
    "weight_dtype",
]


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
        gemv_gemm1(stage.own_gemm, args, ws, launch)
        return
    permute = stage.gather == "permute"
    fused = stage.activation == "fused"
    in_epilogue = fused and stage.quantize == "fused"
    target: Tensor | Quantized = ws.hidden if fused else ws.gate_up
    if args.scales and in_epilogue:
        target = hidden_q(args, ws)
    grouped_gemm(
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
        target = x_q(args, ws)
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
        gemv_gemm2(stage.own_gemm, args, ws, out, launch)
        return
    source = hidden_q(args, ws) if args.scales else ws.hidden
    atomic = stage.finalize == "fused"
    target = ws.out_f32[: args.num_tokens] if atomic else ws.expert_out
    if atomic:
        rows.zero_fill(target, launch=launch)
    grouped_gemm(
        stage, source, args.w2, args.w2_scale, target, args, ws, launch,
        gather=False, swiglu=False, atomic=atomic, split=args.w2.shape[1],
    )  # fmt: skip
    if atomic:
        rows.cast_rows(target, out, launch=launch)
    else:
        rows.combine(ws.expert_out, ws.row_of_slot, args.topk_weights, out, launch=launch)
