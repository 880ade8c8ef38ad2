"""What fitune's layer is timed beside: torch's grouped GEMMs with our small kernels around, and a dense GEMM pair.

The grouped GEMMs compute the same layer and are checked like it. In fp8 they know row-wise scales only: under other
schemes they get such scales for the same e4m3 weights, and always a reference made of the scales they have. The dense
pair (as many rows, one expert's weights for all of them) computes another thing: it shows what the arithmetic costs.
"""

# ruff: noqa: N803 - device code names pointers and constants so

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import triton
import triton.language as tl
from layer_rows import is_fp8
from torch import Tensor

from fitune.kernels import reference, rows
from fitune.kernels.layer import LayerArgs, run_sort
from fitune.measure.bench import BOTH, TOLERANCES
from fitune.measure.inputs import ProblemInputs

SORT_TILE: Final = 128
"""The sort lays tiles that nobody here reads; the size hardly matters to its time."""
E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
ROWWISE_TOLERANCE: Final = (0.6, 0.08)
"""As bench.TOLERANCES: both GEMMs' activations are rounded to three bits, which the float32 reference is not."""


class WrongResultError(Exception):
    """An output that is not within tolerance of the reference."""


class Grouped:
    """The layer with two `grouped_mm`: sort, permute, GEMM, SwiGLU, GEMM, combine."""

    def __init__(self, inputs: ProblemInputs) -> None:
        self._inputs = inputs
        self._rows = inputs.load.rows
        self._programs = rows.PROGRAMS_PER_SM * inputs.ws.num_sms
        shape, x = inputs.problem.shape, inputs.args[0].x
        self._hidden = torch.empty((self._rows, shape.intermediate_size), dtype=x.dtype, device=x.device)
        self._multiply: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def __call__(self, args: LayerArgs) -> None:
        ws = self._inputs.ws
        run_sort("tile", SORT_TILE, args, ws)
        gate_up = self._first(args, ws.expert_rows[1:])
        rows.swiglu(gate_up, ws.expert_rows, self._hidden, self._programs)
        expert_out = self._second(args, ws.expert_rows[1:])
        rows.combine(expert_out, ws.row_of_slot, args.topk_weights, self._inputs.out)

    def check(self) -> float:
        """RMS error of one run on poisoned buffers. Raises WrongResultError."""
        inputs = self._inputs
        inputs.poison(*BOTH)
        self._hidden.fill_(float("nan"))
        self(inputs.args[0])
        accuracy, largest = inputs.out_accuracy()
        return judge(accuracy.rms_relative, largest, TOLERANCES[inputs.problem.shape.dtype])

    def _first(self, args: LayerArgs, ends: Tensor) -> Tensor:
        ws = self._inputs.ws
        rows.permute_rows(args.x, ws.slot_of_row, ws.expert_rows, args.top_k, ws.permuted, self._programs)
        return self._multiply(ws.permuted[: self._rows], args.w13.transpose(1, 2), offs=ends)

    def _second(self, args: LayerArgs, ends: Tensor) -> Tensor:
        return self._multiply(self._hidden, args.w2.transpose(1, 2), offs=ends)


class ScaledGrouped(Grouped):
    """The same with two `_scaled_grouped_mm` of e4m3 rows, quantised row by row."""

    def __init__(self, inputs: ProblemInputs) -> None:
        super().__init__(inputs)
        first, shape = inputs.args[0], inputs.problem.shape
        device, count = first.x.device, self._rows
        self._x8 = torch.empty((count, shape.hidden_size), dtype=E4M3, device=device)
        self._hidden8 = torch.empty((count, shape.intermediate_size), dtype=E4M3, device=device)
        self._scales = torch.empty(count, dtype=torch.float32, device=device)
        # All weight slices are of one distribution, so the first one's scales do for the timing of all.
        self._w13_scales = row_scales(first.w13, getattr(first, "w13_scale", None))
        self._w2_scales = row_scales(first.w2, getattr(first, "w2_scale", None))

    def check(self) -> float:
        inputs, first = self._inputs, self._inputs.args[0]
        routing = (first.topk_ids, first.local_expert_offset)
        w13 = cast(Tensor, _Dequantised(first.w13, self._w13_scales))
        w2 = cast(Tensor, _Dequantised(first.w2, self._w2_scales))
        hidden = reference.gemm1(first.x, w13, *routing)
        expected = reference.gemm2_finalized(hidden, w2, first.topk_weights, *routing)
        inputs.poison(*BOTH)
        self._hidden.fill_(float("nan"))
        self(first)
        scale = expected.square().mean().sqrt().clamp_min(1e-30)
        error = inputs.out.float() - expected
        largest = (error.abs() / (expected.abs() + scale)).max().item()
        return judge((error.square().mean().sqrt() / scale).item(), largest, ROWWISE_TOLERANCE)

    def _first(self, args: LayerArgs, ends: Tensor) -> Tensor:
        quantize_rows(args.x, self._x8, self._scales, self._inputs.ws.slot_of_row, args.top_k)
        return self._product(self._x8, args.w13, self._w13_scales, ends)

    def _second(self, args: LayerArgs, ends: Tensor) -> Tensor:
        quantize_rows(self._hidden, self._hidden8, self._scales)
        return self._product(self._hidden8, args.w2, self._w2_scales, ends)

    def _product(self, source: Tensor, weights: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
        multiply = cast(Callable[..., Tensor], torch._scaled_grouped_mm)
        return multiply(
            source, weights.transpose(1, 2), self._scales, scales, offs=ends, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip


def grouped_chain(inputs: ProblemInputs) -> Grouped:
    """torch's grouped GEMM chain for the layer's dtype."""
    return ScaledGrouped(inputs) if is_fp8(inputs.problem.shape.dtype) else Grouped(inputs)


def judge(rms: float, largest: float, tolerance: tuple[float, float]) -> float:
    """The RMS error, if both errors are within `tolerance`; NaN never is. Raises WrongResultError."""
    if largest <= tolerance[0] and rms <= tolerance[1]:
        return rms
    raise WrongResultError(f"error {rms:.2g} RMS, largest {largest:.2g}, relative to the reference")


class _Dequantised:
    """Weights as the references read them: one expert at a time."""

    def __init__(self, weights: Tensor, scales: Tensor) -> None:
        self._weights, self._scales = weights, scales
        self.shape = weights.shape

    def __getitem__(self, expert: int) -> Tensor:
        return self._weights[expert].float() * self._scales[expert][:, None]


def row_scales(weights: Tensor, given: Tensor | None = None) -> Tensor:
    """[L, rows] float32 for e4m3 weights [L, rows, K]: the given ones where there is one for each row.

    Else what brings each row to an RMS of K^-0.5, which is that of the layer's weights.
    """
    if given is not None and given.shape == weights.shape[:2]:
        return given.contiguous()
    scales = torch.empty(weights.shape[:2], dtype=torch.float32, device=weights.device)
    for expert, values in enumerate(weights):
        norms = torch.linalg.vector_norm(values.float(), dim=1)
        scales[expert] = 1.0 / norms.clamp_min(1e-30)
    return scales


@triton.jit  # type: ignore[untyped-decorator]
def quantize_rows_kernel(  # type: ignore[no-untyped-def]
    Source,
    SlotOfRow,
    Out,
    Scales,
    stride,
    top_k,
    LARGEST: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """out[row] = source row / scale, its largest value at the end of e4m3's range. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if GATHER:
        source = tl.load(SlotOfRow + row).to(tl.int64) // top_k
    columns = tl.arange(0, BLOCK)
    values = tl.load(Source + source * stride + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0), 1e-12) / LARGEST
    scaled = tl.clamp(values / scale, -LARGEST, LARGEST)
    tl.store(Out + row * COLUMNS + columns, scaled.to(Out.dtype.element_ty), mask=columns < COLUMNS)
    tl.store(Scales + row, scale)


def quantize_rows(
    source: Tensor, out: Tensor, scales: Tensor, slot_of_row: Tensor | None = None, top_k: int = 1
) -> None:
    """Quantise `out.shape[0]` rows, each with its own scale; with `slot_of_row` gather the tokens' rows as well."""
    count, columns = out.shape
    block = triton.next_power_of_2(columns)
    slots = scales if slot_of_row is None else slot_of_row
    quantize_rows_kernel[(count,)](
        source, slots, out, scales, source.stride(0), top_k,
        LARGEST=E4M3_MAX, COLUMNS=columns, BLOCK=block, GATHER=slot_of_row is not None,
        num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip


class Dense:
    """One dense GEMM pair with as many rows as the layer has, on the weights of one expert after another."""

    def __init__(self, inputs: ProblemInputs) -> None:
        shape, first = inputs.problem.shape, inputs.args[0]
        self._w13, self._w2 = first.w13, first.w2
        generator = torch.Generator(first.x.device).manual_seed(1)
        count, device = inputs.load.rows, first.x.device

        def normal(columns: int) -> Tensor:
            drawn = torch.empty((count, columns), dtype=first.x.dtype, device=device).normal_(generator=generator)
            return drawn.to(E4M3) if is_fp8(shape.dtype) else drawn

        self._x, self._hidden = normal(shape.hidden_size), normal(shape.intermediate_size)
        self._gate_up = torch.empty((count, 2 * shape.intermediate_size), dtype=first.x.dtype, device=device)
        self._out = torch.empty((count, shape.hidden_size), dtype=first.x.dtype, device=device)
        self._multiply = _scaled_product(device) if is_fp8(shape.dtype) else _plain_product

    @property
    def experts(self) -> int:
        """How many experts' weights can take turns."""
        return int(self._w13.shape[0])

    def __call__(self, expert: int) -> None:
        self._multiply(self._x, self._w13[expert], self._gate_up)
        self._multiply(self._hidden, self._w2[expert], self._out)


def _plain_product(source: Tensor, weights: Tensor, out: Tensor) -> None:
    torch.mm(source, weights.t(), out=out)


def _scaled_product(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], None]:
    """An e4m3 product with one scale for each operand."""
    one: Any = torch.ones((), device=device)

    def multiply(source: Tensor, weights: Tensor, out: Tensor) -> None:
        torch._scaled_mm(source, weights.t(), one, one, out_dtype=out.dtype, use_fast_accum=True)

    return multiply
