"""Memory-bound kernels around the GEMMs: gather rows, SwiGLU, weighted sum of each token's slots, cast, zero.

Kernels whose number of rows is known only on the device (`permute_rows`, `swiglu`) run a fixed number of programs
that walk (row, block of columns) pairs up to that number. The others run one program per such pair. All arithmetic
is float32.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fitune.kernels.launch import Launcher, run
from fitune.kernels.numeric import silu

PROGRAMS_PER_SM: Final = 32
"""Programs per SM for `permute_rows` and `swiglu`: some twice what an SM holds, so that the load evens out."""

_NUM_WARPS: Final = 4
_LARGEST_BLOCK: Final = 2048
_SMALLEST_WIDE_BLOCK: Final = 1024
_ELEMENTS_PER_PROGRAM: Final = 4096


def column_block(num_columns: int) -> int:
    """Columns one program handles at once: 2048, or 1024 where that wastes more than 15 % of the lanes, or fewer.

    Wide blocks keep more loads in flight; an idle lane costs no memory traffic, so some are accepted.
    """
    block = _LARGEST_BLOCK
    if -(-num_columns // block) * block > 1.15 * num_columns:
        block = _SMALLEST_WIDE_BLOCK
    return min(block, max(32, 1 << (num_columns - 1).bit_length()))


@triton.jit(do_not_specialize=["num_local"], do_not_specialize_on_alignment=["SlotOfRow", "ExpertRows"])
def permute_kernel(
    X,
    SlotOfRow,
    ExpertRows,
    Out,
    stride_x_n,
    stride_x_h,
    stride_out,
    num_local,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = x[slot_of_row[row] // TOP_K] for all rows there are."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    num_items = tl.load(ExpertRows + num_local).to(tl.int64) * blocks
    for item in range(tl.program_id(0).to(tl.int64), num_items, tl.num_programs(0)):
        row = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        token = (tl.load(SlotOfRow + row) // TOP_K).to(tl.int64)
        values = tl.load(X + token * stride_x_n + cols.to(tl.int64) * stride_x_h, mask=cols < COLUMNS)
        tl.store(Out + row * stride_out + cols, values, mask=cols < COLUMNS)


@triton.jit(do_not_specialize=["num_local"], do_not_specialize_on_alignment=["ExpertRows"])
def swiglu_kernel(
    GateUp,
    ExpertRows,
    Out,
    stride_in,
    stride_out,
    num_local,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row, c] = silu(gate_up[row, c]) * gate_up[row, COLUMNS + c] for all rows there are."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    num_items = tl.load(ExpertRows + num_local).to(tl.int64) * blocks
    for item in range(tl.program_id(0).to(tl.int64), num_items, tl.num_programs(0)):
        row = item // blocks
        cols = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < COLUMNS
        gate = tl.load(GateUp + row * stride_in + cols, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(GateUp + row * stride_in + COLUMNS + cols, mask=mask, other=0.0).to(tl.float32)
        hidden = silu(gate) * up
        tl.store(Out + row * stride_out + cols, hidden.to(Out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=["stride_weights_n", "stride_weights_k"],
    do_not_specialize_on_alignment=["RowOfSlot", "Weights"],
)
def combine_kernel(
    Rows,
    RowOfSlot,
    Weights,
    Out,
    stride_rows,
    stride_out,
    stride_weights_n,
    stride_weights_k,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[token] = sum over its local slots, in slot order, of weight * row. One program per (token, column block)."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < COLUMNS
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        # A branch for each slot: under expert parallelism most are foreign, and the load of none is worth its issue.
        row = tl.load(RowOfSlot + token * TOP_K + k).to(tl.int64)
        if row >= 0:
            weight = tl.load(Weights + token * stride_weights_n + k * stride_weights_k).to(tl.float32)
            total += weight * tl.load(Rows + row * stride_rows + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(Out + token * stride_out + cols, total.to(Out.dtype.element_ty), mask=mask)


@triton.jit
def cast_kernel(Src, Out, stride_src, stride_out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = src[row] in out's dtype. One program per (row, column block)."""
    blocks: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(Src + row * stride_src + cols, mask=cols < COLUMNS, other=0.0).to(tl.float32)
    tl.store(Out + row * stride_out + cols, values.to(Out.dtype.element_ty), mask=cols < COLUMNS)


@triton.jit
def zero_kernel(Out, num_elements, BLOCK: tl.constexpr):
    """out[:num_elements] = 0."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    zeros = tl.zeros((BLOCK,), Out.dtype.element_ty)
    tl.store(Out + offs, zeros, mask=offs < num_elements)


def permute_rows(
    x: torch.Tensor,
    slot_of_row: torch.Tensor,
    expert_rows: torch.Tensor,
    top_k: int,
    out: torch.Tensor,
    num_programs: int,
    *,
    launch: Launcher = run,
) -> None:
    """Gather the tokens' rows into sorted order: `out[row] = x[slot_of_row[row] // top_k]`.

    x [N, H] any strides and out [>= rows, H] of one dtype; slot_of_row int32; expert_rows int32 [L + 1], whose last
    entry is the number of rows. Rows of `out` beyond it are left as they were. `num_programs` is the size of the
    fixed launch: `PROGRAMS_PER_SM` times the number of SMs keeps the memory busy. As everywhere here, the columns of
    the result are contiguous, its row stride is free.
    """
    if x.shape[0] == 0:
        return
    columns = x.shape[1]
    launch(
        permute_kernel,
        (num_programs,),
        (x, slot_of_row, expert_rows, out, x.stride(0), x.stride(1), out.stride(0), expert_rows.shape[0] - 1),
        {"TOP_K": top_k, "COLUMNS": columns, "BLOCK": column_block(columns), "num_warps": _NUM_WARPS},
    )


def swiglu(
    gate_up: torch.Tensor,
    expert_rows: torch.Tensor,
    out: torch.Tensor,
    num_programs: int,
    *,
    launch: Launcher = run,
) -> None:
    """`out = silu(gate) * up` of all sorted rows, `gate` being the first half of each row of `gate_up`.

    gate_up [>= rows, 2I] any float dtype, columns contiguous; out [>= rows, I]; expert_rows and num_programs as in
    `permute_rows`. Rows beyond the number of rows are left as they were.
    """
    if out.shape[0] == 0:
        return
    columns = out.shape[1]
    launch(
        swiglu_kernel,
        (num_programs,),
        (gate_up, expert_rows, out, gate_up.stride(0), out.stride(0), expert_rows.shape[0] - 1),
        {"COLUMNS": columns, "BLOCK": column_block(columns), "num_warps": _NUM_WARPS},
    )


def combine(
    expert_out: torch.Tensor,
    row_of_slot: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor,
    *,
    launch: Launcher = run,
) -> None:
    """Sum each token's local slots, weighted, in slot order: the same bits in every run.

    expert_out [rows, H] any float dtype, columns contiguous; row_of_slot int32 [N*K] contiguous, negative for foreign
    slots; topk_weights [N, K] any strides; out [N, H]. Tokens with no local slot give zeros.
    """
    num_tokens, columns = out.shape
    if num_tokens == 0:
        return
    block = column_block(columns)
    strides = (expert_out.stride(0), out.stride(0), topk_weights.stride(0), topk_weights.stride(1))
    launch(
        combine_kernel,
        (num_tokens * triton.cdiv(columns, block),),
        (expert_out, row_of_slot, topk_weights, out, *strides),
        {"TOP_K": topk_weights.shape[1], "COLUMNS": columns, "BLOCK": block, "num_warps": _NUM_WARPS},
    )


def cast_rows(src: torch.Tensor, out: torch.Tensor, *, launch: Launcher = run) -> None:
    """`out = src` in out's dtype; both [N, H], columns contiguous, any row strides."""
    num_rows, columns = out.shape
    if num_rows == 0:
        return
    block = column_block(columns)
    launch(
        cast_kernel,
        (num_rows * triton.cdiv(columns, block),),
        (src, out, src.stride(0), out.stride(0)),
        {"COLUMNS": columns, "BLOCK": block, "num_warps": _NUM_WARPS},
    )


def zero_fill(out: torch.Tensor, *, launch: Launcher = run) -> None:
    """`out = 0`; contiguous, any shape and dtype."""
    num_elements = out.numel()
    if num_elements == 0:
        return
    launch(
        zero_kernel,
        (triton.cdiv(num_elements, _ELEMENTS_PER_PROGRAM),),
        (out, num_elements),
        {"BLOCK": _ELEMENTS_PER_PROGRAM, "num_warps": _NUM_WARPS},
    )
