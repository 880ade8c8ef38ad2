"""What a problem is measured on: random weights, tokens and routing, buffers, and float32 references.

Weights are drawn once and sliced; several slices whose active experts do not overlap take turns, so that a timed call
finds none of its weights in L2. All tactics of a problem see the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fitune.errors import MeasureError
from fitune.kernels import reference
from fitune.kernels.layer import (
    IO_DTYPES,
    LayerArgs,
    Workspace,
    fp8_of,
    hidden_q,
    row_of_slots,
    weight_dtype,
)
from fitune.kernels.quantize import Quantized, fp8_max, in_lines
from fitune.problem import LayerShape, Problem, weight_scale_shapes
from fitune.record import Accuracy
from fitune.routing import draw_topk_ids, draw_topk_weights, local_rows, representative_ids
from fitune.tactic import StageName
from fitune.target import Target

COLD_L2_MULTIPLE: Final = 4
MAX_ROTATIONS: Final = 32
WEIGHT_MEMORY_SHARE: Final = 0.7
DROPPED_SHARE: Final = 1 / 16
_FP8_NAN: Final = {torch.float8_e4m3fn: 0x7F, torch.float8_e4m3fnuz: 0x80}


class WeightBank:
    """Random weights of one layer shape: w13 [experts, 2I, H], w2 [experts, H, I], O(1) outputs for O(1) inputs.

    Quantised weights come with the scales that `LayerArgs` describes; these differ by a factor of four between
    neighbours, so that a kernel that takes the wrong one is found out.
    """

    def __init__(self, device: str, seed: int, fp8: torch.dtype = torch.float8_e4m3fn) -> None:
        self._device = device
        self._seed = seed
        self._fp8 = fp8
        self._shape: LayerShape | None = None
        self.w13 = self.w2 = torch.empty(0)
        self.w13_scale: Tensor | None = None
        self.w2_scale: Tensor | None = None

    @property
    def experts(self) -> int:
        return int(self.w13.shape[0])

    def fits(self, shape: LayerShape, experts: int) -> int:
        """How many experts, at most `experts`, a bank of this shape may have in this device's memory."""
        if not self._device.startswith("cuda"):
            return experts
        free, _ = torch.cuda.mem_get_info(self._device)
        held = (self.w13.numel() + self.w2.numel()) * self.w13.element_size()
        reserved = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return min(experts, int((free + held + reserved) * WEIGHT_MEMORY_SHARE) // shape.expert_bytes)

    def provide(self, shape: LayerShape, experts: int) -> bool:
        """Hold at least `experts` experts of `shape`; True when weights were drawn anew. Raises MeasureError."""
        if self._shape == shape and self.experts >= experts:
            return False
        if self.fits(shape, experts) < experts:
            needed, have = experts * shape.expert_bytes / 1e9, self.fits(shape, 1 << 30) * shape.expert_bytes / 1e9
            raise MeasureError(
                f"{experts} local experts need {needed:.1f} GB of weights, {have:.1f} GB can be used on this GPU; "
                "measure a larger EP size"
            )
        self._shape = shape
        self.w13 = self.w2 = torch.empty(0)
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()
        generator = torch.Generator(self._device).manual_seed(self._seed)
        hidden, intermediate = shape.hidden_size, shape.intermediate_size
        first, second = weight_scale_shapes(shape.scales, hidden, intermediate) or ((), ())
        self.w13, self.w13_scale = self._draw(generator, shape, experts, 2 * intermediate, hidden, first)
        self.w2, self.w2_scale = self._draw(generator, shape, experts, hidden, intermediate, second)
        return True

    def args(self, shape: LayerShape, first: int, count: int) -> dict[str, Any]:
        """The weights of `count` experts from `first` on, as arguments of a call."""
        experts = slice(first, first + count)
        weights: dict[str, Any] = {"w13": self.w13[experts], "w2": self.w2[experts], "scales": shape.scales}
        if self.w13_scale is not None and self.w2_scale is not None:
            weights |= {"w13_scale": self.w13_scale[experts], "w2_scale": self.w2_scale[experts]}
        return weights

    def _draw(
        self,
        generator: torch.Generator,
        shape: LayerShape,
        experts: int,
        rows: int,
        columns: int,
        scale: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        weights = torch.empty((experts, rows, columns), dtype=weight_dtype(shape.dtype, self._fp8), device=self._device)
        if not shape.scales:
            for expert in weights:
                expert.normal_(0.0, columns**-0.5, generator=generator)
            return weights, None
        values = torch.empty((rows, columns), dtype=torch.float32, device=self._device)
        largest = fp8_max(self._fp8)
        for expert in weights:
            expert.copy_(values.normal_(0.0, largest / 5.0, generator=generator).clamp_(-largest, largest))
        drawn = torch.empty((experts, *scale), dtype=torch.float32, device=self._device)
        drawn.uniform_(-1.0, 1.0, generator=generator).exp2_().mul_(5.0 / largest * columns**-0.5)
        return weights, drawn


def given_scales(shape: LayerShape, device: str) -> dict[str, Tensor | None]:
    """Scales that come with a checkpoint for the rows of x and of hidden, where one serves all."""
    if shape.scales != "tensor":
        return {}
    return {
        name: torch.full((1, 1), most / fp8_max(torch.float8_e4m3fn), dtype=torch.float32, device=device)
        for name, most in (("x_scale", 5.0), ("hidden_scale", 12.0))
    }


def disjoint_offsets(active: Sequence[int], local_experts: int, wanted: int, bank_experts: int) -> list[int]:
    """Offsets of up to `wanted` weight slices of a bank whose active experts are all different. The first is 0."""
    offsets, used = [0], set(active)
    candidate = 1
    while len(offsets) < wanted and candidate + local_experts <= bank_experts:
        moved = {expert + candidate for expert in active}
        if used.isdisjoint(moved):
            offsets.append(candidate)
            used |= moved
        candidate += 1
    return offsets


@dataclass(frozen=True, slots=True)
class Load:
    """What the routing of a problem puts on this rank."""

    rows: int
    active: tuple[int, ...]

    def weight_bytes(self, shape: LayerShape, stages: Sequence[StageName]) -> int:
        """Weight bytes that the stages read: every active expert once."""
        per_stage = {"gemm1": 2, "gemm2": 1}
        matrices = sum(per_stage[name] for name in stages)
        return len(self.active) * matrices * shape.hidden_size * shape.intermediate_size * shape.item_bytes

    def flops(self, shape: LayerShape, stages: Sequence[StageName]) -> int:
        """Multiplications and additions of the stages, without padding."""
        return (
            2
            * self.rows
            * sum({"gemm1": 2, "gemm2": 1}[s] for s in stages)
            * shape.hidden_size
            * shape.intermediate_size
        )


class ProblemInputs:
    """Tensors, buffers and references of one problem. Everything is allocated here and reused by every tactic.

    `round_hidden` rounds the hidden rows to the layer's dtype before the reference's second GEMM, as the kernels do;
    `representative` picks one of several draws of a small problem; `drop_slots` gives some slots the id -1.
    """

    def __init__(
        self,
        problem: Problem,
        target: Target,
        bank: WeightBank,
        device: str,
        seed: int,
        *,
        min_experts: int = 0,
        histogram: NDArray[np.float64] | None = None,
        round_hidden: bool = True,
        representative: bool = True,
        drop_slots: bool = False,
    ) -> None:
        assert problem.num_tokens > 0
        self.problem = problem
        shape = problem.shape
        draw = representative_ids if representative else draw_topk_ids
        ids = draw(problem, seed, histogram)
        if drop_slots:
            dropped = np.random.default_rng(seed).random(ids.shape) < DROPPED_SHARE
            ids = np.where(dropped, np.int32(-1), ids)
        counts = local_rows(ids, problem.local_expert_offset, problem.local_experts)
        self.load = Load(int(counts.sum()), tuple(int(expert) for expert in np.flatnonzero(counts)))
        self._l2_bytes = target.l2_bytes
        bank.provide(shape, self._bank_experts(bank, max(min_experts, problem.local_experts)))
        generator = torch.Generator(device).manual_seed(seed)
        dtype = IO_DTYPES[shape.dtype]
        self._fp8 = fp8_of(target.arch)
        x = torch.empty((problem.num_tokens, shape.hidden_size), dtype=dtype, device=device)
        x.normal_(generator=generator)
        weights = torch.from_numpy(draw_topk_weights(problem, seed)).to(device)
        self.args = self._slices(bank, x, torch.from_numpy(ids).to(device), weights)
        self.ws = Workspace.allocate(
            shape, problem.local_experts, problem.num_tokens, device, num_sms=target.num_sms, fp8=self._fp8
        )
        self.out = torch.empty_like(x)
        self.slots = torch.from_numpy(_local_slots(ids, problem)).to(device)
        first = self.args[0]
        routing = (first.topk_ids, first.local_expert_offset)
        w13, w2 = first.reference_weights()
        by_slot = reference.gemm1(self._rounded(x, first.x_scale), w13, *routing)
        self.hidden_reference = by_slot.index_select(0, self.slots)
        hidden = by_slot.to(dtype) if round_hidden else by_slot
        self.out_reference = reference.gemm2_finalized(self._rounded(hidden, first.hidden_scale), w2, weights, *routing)
        self._hidden_scale = _rms(self.hidden_reference)
        self._out_scale = _rms(self.out_reference)

    def rotations(self, stages: Sequence[StageName]) -> int:
        """Slices that must take turns before a timed call of `stages` meets weights again that L2 may still hold."""
        read = self.load.weight_bytes(self.problem.shape, stages)
        if read == 0:
            return 1
        return min(MAX_ROTATIONS, -(-COLD_L2_MULTIPLE * self._l2_bytes // read))

    def is_cold(self, stages: Sequence[StageName], calls: int) -> bool:
        """Whether `calls` calls over the slices there are leave no weights in L2 for the first of them."""
        turns = min(calls, len(self.args))
        return turns * self.load.weight_bytes(self.problem.shape, stages) >= 2 * self._l2_bytes

    def floor_us(self, stages: Sequence[StageName]) -> float:
        """A time that no chip of today goes under: 6 TB/s and 2,500 TFLOP/s."""
        shape = self.problem.shape
        return max(self.load.weight_bytes(shape, stages) / 6e6, self.load.flops(shape, stages) / 2.5e9, 2.0)

    def restore_hidden(self, family: str) -> None:
        """Put the rounded reference into ws.hidden, in the row order of `family` (sorted before, except gemv)."""
        rows = self._rows(family)
        hidden = self.hidden_reference.to(self.ws.hidden.dtype)
        self.ws.hidden.index_copy_(0, rows, hidden)
        target = self._hidden_q()
        if target is None:
            return
        values, scales = reference.quantize(hidden, self.problem.shape.scales, self.args[0].hidden_scale, self._fp8)
        target.values.view(torch.uint8).index_copy_(0, rows, values.view(torch.uint8))
        if target.scales is not self.args[0].hidden_scale:
            target.scales.index_copy_(1, rows, in_lines(scales) if target.scales.dim() == 3 else scales)

    def poison(self, *stages: StageName) -> None:
        """Fill everything that the stages write with NaN."""
        nan = float("nan")
        if "gemm1" in stages:
            for tensor in (self.ws.permuted, self.ws.gate_up, self.ws.hidden):
                tensor.fill_(nan)
            for quantized in (self.ws.x_q, self.ws.hidden_q):
                if quantized is not None:
                    quantized.values.view(torch.uint8).fill_(_FP8_NAN[self._fp8])
                    quantized.scales.fill_(nan)
        if "gemm2" in stages:
            for tensor in (self.ws.expert_out, self.ws.out_f32, self.out):
                tensor.fill_(nan)

    def hidden_accuracy(self, family: str) -> tuple[Accuracy, float]:
        """Error of ws.hidden, and the largest error of an element over its own size plus the reference's RMS."""
        rows, quantized = self._rows(family), self._hidden_q()
        if quantized is None or (family == "gemv" and self.problem.shape.scales == "block"):
            actual = self.ws.hidden.index_select(0, rows)
        else:
            scales = quantized.scales if quantized.scales.shape[1] == 1 else quantized.scales.index_select(1, rows)
            values = quantized.values.view(torch.uint8).index_select(0, rows).view(self._fp8)
            actual = Quantized(values, scales).dequantized()
        return _accuracy(actual, self.hidden_reference, self._hidden_scale)

    def out_accuracy(self) -> tuple[Accuracy, float]:
        """Error of out, and the largest error of an element over its own size plus the reference's RMS."""
        return _accuracy(self.out, self.out_reference, self._out_scale)

    def _rounded(self, rows: Tensor, given: Tensor | None) -> Tensor:
        """Rows as a GEMM of the layer sees them."""
        return reference.round_trip(rows, self.problem.shape.scales, given, self._fp8)

    def _hidden_q(self) -> Quantized | None:
        """Where gemm2 finds the quantised hidden rows; None where it reads them as they are."""
        return hidden_q(self.args[0], self.ws) if self.problem.shape.scales else None

    def _rows(self, family: str) -> Tensor:
        return row_of_slots(family, self.args[0], self.ws).index_select(0, self.slots).to(torch.int64)

    def _bank_experts(self, bank: WeightBank, least: int) -> int:
        """Experts the bank should hold so that slices can take turns, within what memory allows."""
        local = self.problem.local_experts
        wanted = max(self.rotations(("gemm1",)), self.rotations(("gemm2",)))
        offsets = disjoint_offsets(self.load.active, local, wanted, local * MAX_ROTATIONS)
        experts = max(least, local + offsets[-1])
        return experts if experts <= bank.experts else max(least, bank.fits(self.problem.shape, experts))

    def _slices(self, bank: WeightBank, x: Tensor, ids: Tensor, weights: Tensor) -> list[LayerArgs]:
        local = self.problem.local_experts
        offsets = disjoint_offsets(self.load.active, local, MAX_ROTATIONS, bank.experts)
        wanted = max(self.rotations(("gemm1",)), self.rotations(("gemm2",)))
        shape, offset = self.problem.shape, self.problem.local_expert_offset
        call: dict[str, Any] = {"x": x, "topk_weights": weights, "topk_ids": ids, "local_expert_offset": offset}
        call |= given_scales(shape, str(x.device))
        return [LayerArgs(**call, **bank.args(shape, first, local)) for first in offsets[:wanted]]


def _local_slots(ids: NDArray[np.int32], problem: Problem) -> NDArray[np.int64]:
    """Slots that fall on local experts, in order."""
    local = ids.reshape(-1).astype(np.int64) - problem.local_expert_offset
    return np.flatnonzero((local >= 0) & (local < problem.local_experts) & (ids.reshape(-1) >= 0))


def _rms(tensor: Tensor) -> float:
    norm: float = torch.linalg.vector_norm(tensor).item()
    return norm / math.sqrt(max(1, tensor.numel()))


def _accuracy(actual: Tensor, reference: Tensor, scale: float) -> tuple[Accuracy, float]:
    if reference.numel() == 0:
        return Accuracy(0.0, 0.0), 0.0
    unit = scale or 1.0
    difference = torch.sub(actual, reference)
    sums = [torch.linalg.vector_norm(difference), torch.linalg.vector_norm(difference, float("inf"))]
    difference /= reference.abs().add_(unit)
    norm, largest, relative = torch.stack([*sums, torch.linalg.vector_norm(difference, float("inf"))]).tolist()
    return Accuracy(largest, norm / math.sqrt(reference.numel()) / unit), relative
