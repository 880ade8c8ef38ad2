"""Float32 torch references for every kernel of the layer, on any device.

Weights are upcast one expert at a time, so a layer of 256 large experts fits beside its float32 results. Products
are true float32 (no TF32). The references are slow and may copy to the host; nothing in the hot path calls them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional

from fitune.problem import SCALE_GROUP, Scales
from fitune.tactic import num_tiles


@dataclass(frozen=True, slots=True)
class SortedSlots:
    """What `fitune.kernels.sort.sort_slots` must write; int32, the arrays cut to their used length."""

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    expert_rows: torch.Tensor
    expert_tiles: torch.Tensor
    tile_expert: torch.Tensor


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products in true float32 inside the block; the former setting comes back after it."""
    matmul = torch.backends.cuda.matmul
    former = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = former


def softmax_topk(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the top-k of each row: (weights f32 [N, K], ids int32 [N, K])."""
    scores = torch.softmax(logits.float(), dim=1)
    ids = _topk(logits.float(), top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, ids.int()


def softmax_over_topk(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The top-k logits of each row, then softmax over these alone (gpt-oss)."""
    ids = _topk(logits.float(), top_k)
    return torch.softmax(logits.float().gather(1, ids), dim=1), ids.int()


def grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    top_k: int,
    scale: float = 1.0,
    renormalize: bool = True,
    score: str = "sigmoid",
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's routing; see `fitune.kernels.router.sigmoid_grouped_topk`."""
    values = logits.float()
    scores = torch.sigmoid(values) if score == "sigmoid" else functional.softplus(values).sqrt()
    biased = scores if bias is None else scores + bias.float()
    if bias is None and topk_groups == num_groups:
        biased = values
    if topk_groups < num_groups:
        rows, num_experts = logits.shape
        groups = biased.view(rows, num_groups, num_experts // num_groups)
        best_two = groups.topk(min(2, groups.shape[2]), dim=2).values.sum(dim=2)
        chosen = torch.zeros_like(best_two).scatter_(1, _topk(best_two, topk_groups), 1.0).bool()
        biased = groups.masked_fill(~chosen[:, :, None], -torch.inf).view(rows, num_experts)
    ids = _topk(biased, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
    return weights * scale, ids.int()


def sort_slots(topk_ids: torch.Tensor, local_expert_offset: int, local_experts: int, tile_size: int) -> SortedSlots:
    """Slots by local expert, then by slot; tiles of up to `tile_size` rows over each expert's rows."""
    local = _local_experts(topk_ids, local_expert_offset, local_experts).cpu()
    row_of_slot = torch.full(local.shape, -1, dtype=torch.int32)
    slots: list[int] = []
    expert_rows, expert_tiles, tile_expert = [0], [0], list[int]()
    for expert in range(local_experts):
        mine = torch.nonzero(local == expert).flatten().tolist()
        slots += mine
        tiles = num_tiles(len(mine), tile_size)
        tile_expert += [expert] * tiles
        expert_rows.append(len(slots))
        expert_tiles.append(expert_tiles[-1] + tiles)
    slot_of_row = torch.tensor(slots, dtype=torch.int32)
    row_of_slot[slot_of_row.long()] = torch.arange(len(slots), dtype=torch.int32)
    rest = (torch.tensor(values, dtype=torch.int32) for values in (expert_rows, expert_tiles, tile_expert))
    return SortedSlots(*(tensor.to(topk_ids.device) for tensor in (row_of_slot, slot_of_row, *rest)))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of each row, float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """Quantised weights [L, rows, K] with their scales, as `LayerArgs` describes them; `split` is the first up row."""

    values: torch.Tensor
    scale: torch.Tensor
    scales: Scales
    split: int

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __getitem__(self, expert: int) -> torch.Tensor:
        """One expert's weights, float32 [rows, K]."""
        rows, columns = self.values.shape[1:]
        scale = self.scale[expert]
        if self.scales == "tensor":
            return self.values[expert].float() * scale.repeat_interleave(self.split, 0)[:, None]
        if self.scales == "channel":
            return self.values[expert].float() * scale[:, None]
        of_row = torch.arange(rows, device=scale.device)
        groups_before = torch.where(of_row < self.split, 0, -(-self.split // SCALE_GROUP))
        of_row = groups_before + of_row % self.split // SCALE_GROUP
        of_column = torch.arange(columns, device=scale.device) // SCALE_GROUP
        return self.values[expert].float() * scale[of_row][:, of_column]


Weights = torch.Tensor | ScaledWeights


def quantize(
    rows: torch.Tensor, scales: Scales, given: torch.Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [rows, C], float32 scales [groups, rows]: `fitune.kernels.quantize.Quantized.scales_by_group`)."""
    columns = rows.shape[1]
    largest = torch.finfo(dtype).max
    values = rows.float()
    if scales == "tensor":
        assert given is not None
        return (values / given).clamp(-largest, largest).to(dtype), given
    group = SCALE_GROUP if scales == "block" else columns
    padded = functional.pad(values, (0, -columns % group)).unflatten(1, (-(-columns // group), group))
    most = padded.abs().amax(dim=2)
    scale = torch.where(most > 0, most / largest, 1.0)
    quantized = (padded / scale[:, :, None]).clamp(-largest, largest).to(dtype)
    return quantized.flatten(1)[:, :columns], scale.T.contiguous()


def round_trip(
    rows: torch.Tensor, scales: Scales, given: torch.Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """Rows quantised and back, float32; as they are where nothing is quantised."""
    if not scales:
        return rows
    values, scale = quantize(rows, scales, given, dtype)
    of_column = scale.T
    if of_column.shape[1] > 1:
        of_column = of_column.repeat_interleave(SCALE_GROUP, 1)[:, : rows.shape[1]]
    return values.float() * of_column


def gemm1(x: torch.Tensor, w13: Weights, topk_ids: torch.Tensor, local_expert_offset: int = 0) -> torch.Tensor:
    """Hidden rows in slot order: float32 [N*K, I], zeros for foreign slots.

    x [N, H] as the GEMM sees it, w13 [L, 2I, H] (gate rows first), topk_ids [N, K].
    """
    hidden = x.new_zeros((topk_ids.numel(), w13.shape[1] // 2), dtype=torch.float32)
    with full_float32():
        for expert, slots in _slots_by_expert(topk_ids, local_expert_offset, w13.shape[0]):
            weight = w13[expert].float()
            hidden[slots] = swiglu(x[slots // topk_ids.shape[1]].float() @ weight.T)
    return hidden


def gemm2(hidden: torch.Tensor, w2: Weights, topk_ids: torch.Tensor, local_expert_offset: int = 0) -> torch.Tensor:
    """Expert results in slot order: float32 [N*K, H], zeros for foreign slots.

    hidden [N*K, I] in slot order, any float dtype; w2 [L, H, I].
    """
    result = hidden.new_zeros((topk_ids.numel(), w2.shape[1]), dtype=torch.float32)
    with full_float32():
        for expert, slots in _slots_by_expert(topk_ids, local_expert_offset, w2.shape[0]):
            result[slots] = hidden[slots].float() @ w2[expert].float().T
    return result


def gemm2_finalized(
    hidden: torch.Tensor,
    w2: Weights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    local_expert_offset: int = 0,
) -> torch.Tensor:
    """`combine(gemm2(...))` without its [N*K, H] intermediate: float32 [N, H]."""
    num_tokens, top_k = topk_ids.shape
    result = hidden.new_zeros((num_tokens, w2.shape[1]), dtype=torch.float32)
    weights = topk_weights.float().reshape(-1)
    with full_float32():
        for expert, slots in _slots_by_expert(topk_ids, local_expert_offset, w2.shape[0]):
            rows = hidden[slots].float() @ w2[expert].float().T
            result.index_add_(0, slots // top_k, rows * weights[slots, None])
    return result


def combine(slot_rows: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of each token's slots: slot_rows [N*K, H] in slot order, zeros where foreign -> float32 [N, H]."""
    num_tokens, top_k = topk_weights.shape
    return (slot_rows.float().view(num_tokens, top_k, -1) * topk_weights.float()[:, :, None]).sum(dim=1)


def layer(
    x: torch.Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    local_expert_offset: int = 0,
) -> torch.Tensor:
    """The whole layer on one rank, nothing rounded between: float32 [N, H]. No local slot gives zeros."""
    hidden = gemm1(x, w13, topk_ids, local_expert_offset)
    return gemm2_finalized(hidden, w2, topk_weights, topk_ids, local_expert_offset)


def _topk(values: torch.Tensor, top_k: int) -> torch.Tensor:
    """Columns of the `top_k` largest values of each row, largest first, the lowest column first where equal."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :top_k]


def _local_experts(topk_ids: torch.Tensor, offset: int, local_experts: int) -> torch.Tensor:
    """Local expert of each slot, int64 [N*K]; -1 for foreign slots."""
    local = topk_ids.reshape(-1).long() - offset
    return torch.where((local >= 0) & (local < local_experts), local, -1)


def _slots_by_expert(topk_ids: torch.Tensor, offset: int, local_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(local expert, its slots in order) for every local expert that has any."""
    local = _local_experts(topk_ids, offset, local_experts)
    order = torch.argsort(local, stable=True)
    counts = torch.bincount(local + 1, minlength=local_experts + 1).tolist()
    start = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            yield expert, order[start : start + count]
        start += count
