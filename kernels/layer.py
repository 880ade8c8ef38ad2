"""The MoE layer of one rank: buffers, and the launches that a tactic stands for.

    sort -> gemm1 (permute, grouped GEMM, SwiGLU) -> gemm2 (grouped GEMM, combine)

Nothing here chooses and nothing waits for the GPU. Every launch goes through a `Launcher`, so the same code path
runs a stage, or only compiles it for tensors on the `meta` device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fitune.families.registry import family_named
from fitune.kernels import rows, sort
from fitune.kernels.gemm import grouped_gemm_kernel
from fitune.kernels.gemv import gemv_kernel
from fitune.kernels.launch import Launcher, run
from fitune.kernels.plugin import launching_half
from fitune.problem import LayerShape
from fitune.tactic import TILE_SIZES, GemmTactic, Stage, Tactic, max_tiles

TORCH_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@dataclass(slots=True)
class LayerArgs:
    """The tensors of one call.

    x [N, H]; w13 [L, 2I, H], gate rows first; w2 [L, H, I]; topk_weights [N, K] float32; topk_ids [N, K] int32 or
    int64 over all experts of the layer. Ids outside [local_expert_offset, local_expert_offset + L), -1 among them,
    belong to other ranks and contribute nothing. Any strides.
    """

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    local_expert_offset: int = 0

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
    permuted [rows, H]; gate_up [rows, 2I]; hidden [rows, I]; expert_out [rows, H]; out_f32 [max_tokens, H].
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

    @classmethod
    def allocate(
        cls,
        shape: LayerShape,
        local_experts: int,
        max_tokens: int,
        device: torch.device | str,
        *,
        num_sms: int | None = None,
    ) -> Workspace:
        """Allocate for any tactic. `num_sms` defaults to the device's (4 where there is no GPU)."""
        device = torch.device(device)
        slots = max(1, max_tokens * shape.top_k)
        dtype = TORCH_DTYPES[shape.dtype]

        def ints(*size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        def floats(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

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
        )

    @property
    def bytes(self) -> int:
        """Memory held."""
        tensors = (
            self.row_of_slot, self.slot_of_row, self.expert_rows, self.expert_tiles, self.tile_expert,
            self.block_counts, self.permuted, self.gate_up, self.hidden, self.out_f32,
        )  # fmt: skip
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
        _gemv(stage.own_gemm, args.x, args.w13, ws.hidden, args, ws, launch, swiglu=True)
        return
    permute = stage.gather == "permute"
    fused = stage.activation == "fused"
    if permute:
        rows.permute_rows(
            args.x, ws.slot_of_row, ws.expert_rows, args.top_k, ws.permuted, rows.PROGRAMS_PER_SM * ws.num_sms,
            launch=launch,
        )  # fmt: skip
    source = ws.permuted if permute else args.x
    target = ws.hidden if fused else ws.gate_up
    _grouped_gemm(stage, source, args.w13, target, args, ws, launch, gather=not permute, swiglu=fused, atomic=False)
    if not fused:
        rows.swiglu(ws.gate_up, ws.expert_rows, ws.hidden, rows.PROGRAMS_PER_SM * ws.num_sms, launch=launch)


def _run_gemm2(stage: Stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None:
    n = args.num_tokens
    if stage.family == "gemv":
        _gemv(stage.own_gemm, ws.hidden, args.w2, ws.expert_out, args, ws, launch, swiglu=False)
        rows.combine_slots(
            ws.expert_out, args.topk_ids, args.local_expert_offset, args.local_experts, args.topk_weights, out,
            launch=launch,
        )  # fmt: skip
    elif stage.finalize == "reduce":
        _grouped_gemm(
            stage, ws.hidden, args.w2, ws.expert_out, args, ws, launch, gather=False, swiglu=False, atomic=False
        )
        rows.combine(ws.expert_out, ws.row_of_slot, args.topk_weights, out, launch=launch)
    else:
        sums = ws.out_f32[:n]
        rows.zero_fill(sums, launch=launch)
        _grouped_gemm(stage, ws.hidden, args.w2, sums, args, ws, launch, gather=False, swiglu=False, atomic=True)
        rows.cast_rows(sums, out, launch=launch)


def can_use_tma(tensor: Tensor) -> bool:
    """Whether a [rows, K] or [experts, rows, K] tensor can be read through a two-dimensional TMA descriptor.

    The last dimension must be dense, the row stride a multiple of 16 bytes, the base 16-byte aligned, and experts
    must follow one another without gaps.
    """
    rows_dense = tensor.dim() == 2 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return bool(
        rows_dense
        and tensor.stride(-1) == 1
        and tensor.stride(-2) * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
    )


def is_wide(weights: Tensor) -> bool:
    """Whether one expert's weights span 2^31 elements or more, as those of a strided view may."""
    _, n, k = weights.shape
    return bool((n - 1) * weights.stride(1) + (k - 1) * weights.stride(2) >= 2**31)


def _descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    num_rows = tensor.shape[0] if tensor.dim() == 2 else tensor.shape[0] * tensor.shape[1]
    return TensorDescriptor(tensor, [num_rows, tensor.shape[-1]], [tensor.stride(-2), 1], list(block))


def _grouped_gemm(
    stage: Stage,
    source: Tensor,
    weights: Tensor,
    target: Tensor,
    args: LayerArgs,
    ws: Workspace,
    launch: Launcher,
    *,
    gather: bool,
    swiglu: bool,
    atomic: bool,
) -> None:
    gemm, tile = stage.own_gemm, stage.tile_size
    _, n, k = weights.shape
    block_rows = gemm.block_n // 2 if swiglu else gemm.block_n
    # Tensors that no descriptor can describe are read through pointers: same result, another binary.
    w_tma = gemm.loads == "tma" and can_use_tma(weights)
    a_tma = gemm.loads == "tma" and not gather and can_use_tma(source)
    num_blocks = triton.cdiv(n // 2 if swiglu else n, block_rows)
    most_tiles = max_tiles(args.max_rows, args.local_experts, tile) * num_blocks
    persistent = gemm.schedule == "persistent"
    programs = min(most_tiles, ws.num_sms * gemm.programs_per_sm) if persistent else most_tiles
    launch(
        grouped_gemm_kernel,
        (programs,),
        (
            _descriptor(source, (tile, gemm.block_k)) if a_tma else source,
            _descriptor(weights, (block_rows, gemm.block_k)) if w_tma else weights,
            target,
            ws.slot_of_row,
            args.topk_weights.contiguous() if atomic else args.topk_weights,
            ws.expert_rows,
            ws.expert_tiles,
            ws.tile_expert,
            args.local_experts,
            gemm.group_m,
            source.stride(0),
            source.stride(1),
            weights.stride(0),
            weights.stride(1),
            weights.stride(2),
            target.stride(0),
        ),
        {
            "N": n,
            "K": k,
            "TOP_K": args.top_k,
            "TILE": tile,
            "BLOCK_N": gemm.block_n,
            "BLOCK_K": gemm.block_k,
            "GATHER": gather,
            "SWIGLU": swiglu,
            "ATOMIC": atomic,
            "A_TMA": a_tma,
            "W_TMA": w_tma,
            "SWAP": gemm.swap_ab,
            "PERSISTENT": persistent,
            "FLATTEN": gemm.flatten,
            "WIDE": is_wide(weights),
            "UPCAST": INTERPRETED,
            "num_warps": gemm.num_warps,
            "num_stages": gemm.num_stages,
        },
    )


def _gemv(
    gemm: GemmTactic,
    source: Tensor,
    weights: Tensor,
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
    launch(
        gemv_kernel,
        (programs,),
        (
            source,
            weights,
            target,
            ids,
            args.num_slots,
            args.local_expert_offset,
            args.local_experts,
            ids.stride(0),
            ids.stride(1),
            source.stride(0),
            source.stride(1),
            weights.stride(0),
            weights.stride(1),
            weights.stride(2),
            target.stride(0),
        ),
        {
            "WIDTH": width,
            "K": k,
            "TOP_K": args.top_k,
            "SLOTS": triton.next_power_of_2(args.num_slots),
            "ROWS": block_rows,
            "BLOCK_K": gemm.block_k,
            "SWIGLU": swiglu,
            "WIDE": is_wide(weights),
            "num_warps": gemm.num_warps,
            "num_stages": gemm.num_stages,
        },
    )
