"""The launching half of the `grouped_mm` family: torch's grouped GEMM between our permute, SwiGLU and combine.

    gemm1: permute -> grouped_mm -> SwiGLU into ws.hidden        gemm2: grouped_mm -> combine into out

The number of rows stays on the device: torch gets as many rows as there can be, and where each expert's rows end. Its
result is a fresh tensor that the next kernel reads, never copied; inside a CUDA graph it lies in the graph's own pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fitune.errors import DispatchError
from fitune.kernels import rows
from fitune.kernels.launch import Launcher
from fitune.kernels.layer import LayerArgs, Workspace
from fitune.kernels.plugin import compiles_only
from fitune.tactic import Stage


def run_stage(stage: Stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    """Run one stage. Raises DispatchError for weights that torch's operator does not take."""
    programs = rows.PROGRAMS_PER_SM * ws.num_sms
    if stage.stage == "gemm1":
        rows.permute_rows(args.x, ws.slot_of_row, ws.expert_rows, args.top_k, ws.permuted, programs, launch=launch)
        gate_up = _grouped_mm(ws.permuted, args.w13, "w13", args, ws, launch)
        rows.swiglu(gate_up, ws.expert_rows, ws.hidden, programs, launch=launch)
    else:
        expert_out = _grouped_mm(ws.hidden, args.w2, "w2", args, ws, launch)
        rows.combine(expert_out, ws.row_of_slot, args.topk_weights, out, launch=launch)


def _grouped_mm(source: Tensor, weights: Tensor, name: str, args: LayerArgs, ws: Workspace, launch: Launcher) -> Tensor:
    """source [>= max_rows, K] times weights [L, N, K]: [max_rows, N], of which the rows of local slots are written."""
    _check(weights, name)
    if compiles_only(launch):
        return torch.empty((args.max_rows, weights.shape[1]), dtype=source.dtype, device="meta")
    ends = ws.expert_rows[1 : args.local_experts + 1]
    result: Tensor = torch.nn.functional.grouped_mm(source[: args.max_rows], weights.transpose(1, 2), offs=ends)
    return result


def _check(weights: Tensor, name: str) -> None:
    """Rows of K, or columns of N, must be dense, and each must begin at a multiple of 16 bytes."""
    item, (experts, one, other) = weights.element_size(), weights.stride()
    step = one if other == 1 else other if one == 1 else 1
    if step * item % 16 or experts * item % 16 or weights.data_ptr() % 16:
        raise DispatchError(
            f"{name} has strides {tuple(weights.stride())}; torch's grouped GEMM needs dense rows that begin at "
            "multiples of 16 bytes: pass contiguous weights, or tune without the family grouped_mm"
        )
