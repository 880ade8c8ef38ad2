"""What a call of the layer works on: its arguments, the buffers between its kernels, and their element types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from fitune.kernels import reference, sort
from fitune.kernels.quantize import Quantized, scales_shape
from fitune.problem import LayerShape, Scales
from fitune.tactic import TILE_SIZES, max_tiles

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
            return Quantized(
                torch.empty((slots, columns), dtype=fp8, device=device),
                torch.empty(scales_shape(shape.scales, slots, columns), dtype=torch.float32, device=device),
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


def x_q(args: LayerArgs, ws: Workspace) -> Quantized:
    """Where x goes quantised. One scale for all rows is the caller's, not the workspace's."""
    assert ws.x_q is not None
    return ws.x_q if args.x_scale is None else Quantized(ws.x_q.values, args.x_scale)


def hidden_q(args: LayerArgs, ws: Workspace) -> Quantized:
    """Where the hidden rows go quantised; as for x."""
    assert ws.hidden_q is not None
    return ws.hidden_q if args.hidden_scale is None else Quantized(ws.hidden_q.values, args.hidden_scale)
