"""Quantising rows to e4m3 for the GEMMs of fp8 layers: of tokens, of gathered rows, of SwiGLU's result.

One kernel serves all: where rows come from (each in its place, or gathered through `slot_of_row`), whether they pass
through SwiGLU first, and how scales are taken (a group of 128 columns, a row, or given). Rows of tokens are known to
the host; sorted rows are counted on the device and walked by a fixed number of programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from fitune.kernels.launch import INTERPRETED, Launcher, run
from fitune.kernels.numeric import GROUPS_AT_ONCE, place_of_group, quantize_groups, silu, to_e4m3
from fitune.kernels.rows import column_block
from fitune.problem import SCALE_GROUP as GROUP_SIZE
from fitune.problem import Scales

SCALE_GROUP: tl.constexpr = tl.constexpr(GROUP_SIZE)
FP8_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_NUM_WARPS: Final = 4
_ROW_WARPS: Final = 8
_PROGRAMS_PER_SM: Final = 32


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows in e4m3 and their scales.

    values [rows, C] e4m3. scales float32: [ceil(C / 1024), rows, 8] under `block`, where those of a row for 8 groups
    of 128 columns lie side by side; [1, rows] under `channel`; [1, 1] under `tensor`.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def scale_strides(self) -> tuple[int, int]:
        """Strides from row to row and from one line of groups to the next; 0 where one scale serves all."""
        lines, rows = self.scales.shape[:2]
        return (self.scales.stride(1) if rows > 1 else 0), (self.scales.stride(0) if lines > 1 else 0)

    def scales_by_group(self) -> torch.Tensor:
        """float32 [ceil(C / 128), rows] under `block`, else as they are."""
        if self.scales.dim() == 2:
            return self.scales
        return self.scales.permute(0, 2, 1).flatten(0, 1)[: -(-self.values.shape[1] // GROUP_SIZE)]

    def dequantized(self) -> torch.Tensor:
        """float32 [rows, C]."""
        scales = self.scales_by_group().T
        if self.scales.dim() == 3:
            scales = scales.repeat_interleave(GROUP_SIZE, 1)[:, : self.values.shape[1]]
        return self.values.float() * scales


def scales_shape(scales: Scales, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the scales of [rows, columns] values, as `Quantized` has them."""
    if scales == "block":
        return -(-columns // (GROUP_SIZE * GROUPS_AT_ONCE)), rows, GROUPS_AT_ONCE
    return 1, rows if scales == "channel" else 1


def in_lines(by_group: torch.Tensor) -> torch.Tensor:
    """Scales [groups, rows] of `block` laid out as `Quantized` has them; NaN behind the last group."""
    groups, rows = by_group.shape
    lines = -(-groups // GROUPS_AT_ONCE)
    padded = by_group.new_full((lines * GROUPS_AT_ONCE, rows), float("nan"))
    padded[:groups] = by_group
    return padded.unflatten(0, (lines, GROUPS_AT_ONCE)).permute(0, 2, 1).contiguous()


def fp8_max(dtype: torch.dtype) -> float:
    """The largest value of an e4m3 form: 448, or 240 in AMD's fnuz."""
    return float(torch.finfo(dtype).max)


@triton.jit(
    do_not_specialize=["num_rows", "num_local"], do_not_specialize_on_alignment=["SlotOfRow", "ExpertRows", "Scale"]
)
def quantize_kernel(
    X,  # [rows or tokens, COLUMNS], or [rows, 2 * COLUMNS] (SWIGLU)
    SlotOfRow,  # [rows] int32 (GATHER)
    ExpertRows,  # [num_local + 1] int32; the last is the number of rows (COUNTED)
    Out,  # [rows, COLUMNS] e4m3
    Scale,  # float32 [lines, rows, 8] (block), [1, rows] (channel), or [1, 1], which is read
    num_rows,
    num_local,
    stride_x_m,
    stride_x_k,
    stride_out,
    stride_s_m,
    stride_s_k,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    SWIGLU: tl.constexpr,
    COUNTED: tl.constexpr,
    SCALES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """out[row] = x[source of row] / scale. One item is a row and BLOCK of its columns."""
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK - 1) // BLOCK
    if COUNTED:
        rows = tl.load(ExpertRows + num_local)
    else:
        rows = num_rows
    for item in range(tl.program_id(0).to(tl.int64), rows.to(tl.int64) * BLOCKS, tl.num_programs(0)):
        row = item // BLOCKS
        block = item % BLOCKS
        cols = block * BLOCK + tl.arange(0, BLOCK)
        mask = cols < COLUMNS
        if GATHER:
            source = (tl.load(SlotOfRow + row) // TOP_K).to(tl.int64)
        else:
            source = row
        x = X + source * stride_x_m
        values = tl.load(x + cols * stride_x_k, mask=mask, other=0.0).to(tl.float32)
        if SWIGLU:
            up = tl.load(x + (COLUMNS + cols) * stride_x_k, mask=mask, other=0.0).to(tl.float32)
            values = silu(values) * up
        if SCALES == "block":
            GROUPS: tl.constexpr = BLOCK // SCALE_GROUP
            quantized, scale = quantize_groups(values.reshape(GROUPS, SCALE_GROUP), 1, FP8_MAX)
            result = to_e4m3(quantized, Out.dtype.element_ty, UPCAST).reshape(BLOCK)
            group = block * GROUPS + tl.arange(0, GROUPS)
            place = row * stride_s_m + place_of_group(group, stride_s_k)
            tl.store(Scale + place, scale, mask=group * SCALE_GROUP < COLUMNS)
        elif SCALES == "channel":
            tl.static_assert(BLOCKS == 1, "a row's scale needs the whole row")
            quantized, scale = quantize_groups(values, 0, FP8_MAX)
            result = to_e4m3(quantized, Out.dtype.element_ty, UPCAST)
            tl.store(Scale + row * stride_s_m + tl.zeros((1,), tl.int32), scale)
        else:
            result = to_e4m3(tl.clamp(values / tl.load(Scale), -FP8_MAX, FP8_MAX), Out.dtype.element_ty, UPCAST)
        tl.store(Out + row * stride_out + cols, result, mask=mask)


def quantize_tokens(x: torch.Tensor, out: Quantized, scales: Scales, *, launch: Launcher = run) -> None:
    """Quantise every row of x [N, C], any strides, into out (its first N rows)."""
    if x.shape[0] == 0:
        return
    programs = x.shape[0] * triton.cdiv(x.shape[1], _block(x.shape[1], scales))
    _launch(x, out, scales, launch, programs, rows=x.shape[0])


def quantize_permuted(
    x: torch.Tensor,
    slot_of_row: torch.Tensor,
    expert_rows: torch.Tensor,
    top_k: int,
    out: Quantized,
    scales: Scales,
    num_sms: int,
    *,
    launch: Launcher = run,
) -> None:
    """Gather the tokens' rows into sorted order, quantised: row r is `x[slot_of_row[r] // top_k]`."""
    if x.shape[0] == 0:
        return
    _launch(
        x, out, scales, launch, _PROGRAMS_PER_SM * num_sms, slot_of_row=slot_of_row, expert_rows=expert_rows,
        top_k=top_k,
    )  # fmt: skip


def quantize_sorted(
    x: torch.Tensor,
    expert_rows: torch.Tensor,
    out: Quantized,
    scales: Scales,
    num_sms: int,
    *,
    swiglu: bool,
    launch: Launcher = run,
) -> None:
    """Quantise the sorted rows of x [>= rows, C], or silu(gate) * up of x [>= rows, 2C]."""
    if out.values.shape[0] == 0:
        return
    _launch(x, out, scales, launch, _PROGRAMS_PER_SM * num_sms, expert_rows=expert_rows, swiglu=swiglu)


def _block(columns: int, scales: Scales) -> int:
    """Columns of one item: whole rows where a row has one scale, whole groups where groups have."""
    if scales == "channel":
        return max(GROUP_SIZE, triton.next_power_of_2(columns))
    return max(GROUP_SIZE, column_block(columns))


def _launch(
    x: torch.Tensor,
    out: Quantized,
    scales: Scales,
    launch: Launcher,
    programs: int,
    *,
    rows: int = 0,
    slot_of_row: torch.Tensor | None = None,
    expert_rows: torch.Tensor | None = None,
    top_k: int = 1,
    swiglu: bool = False,
) -> None:
    columns = out.values.shape[1]
    block = _block(columns, scales)
    launch(
        quantize_kernel,
        (programs,),
        (
            x,
            slot_of_row,
            expert_rows,
            out.values,
            out.scales,
            rows,
            0 if expert_rows is None else expert_rows.shape[0] - 1,
            x.stride(0),
            x.stride(1),
            out.values.stride(0),
            *out.scale_strides(),
        ),
        {
            "TOP_K": top_k,
            "COLUMNS": columns,
            "BLOCK": block,
            "GATHER": slot_of_row is not None,
            "SWIGLU": swiglu,
            "COUNTED": expert_rows is not None,
            "SCALES": scales,
            "FP8_MAX": fp8_max(out.values.dtype),
            "UPCAST": INTERPRETED,
            "num_warps": _ROW_WARPS if scales == "channel" else _NUM_WARPS,
        },
    )
