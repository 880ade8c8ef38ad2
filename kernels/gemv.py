"""The streaming matrix-vector kernel for a handful of routed rows: no sort, one row per slot, weights read once.

Each work item is (local slot, block of weight rows). Products are kept elementwise in float32 and reduced once at the
end, so the loop is nothing but wide loads; weights are marked evict-first because nobody reads them again.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _local_experts_of_slots(
    TopkIds, num_slots, offset, local_experts, stride_t, stride_k, TOP_K: tl.constexpr, SLOTS: tl.constexpr
):
    """[SLOTS] local expert of each slot, -1 where the slot belongs to another rank or to nobody."""
    offs = tl.arange(0, SLOTS)
    ids = tl.load(TopkIds + (offs // TOP_K) * stride_t + (offs % TOP_K) * stride_k, mask=offs < num_slots, other=-1)
    expert = ids.to(tl.int32) - offset
    local = (ids >= 0) & (expert >= 0) & (expert < local_experts)
    return tl.where(local, expert, -1)


@triton.jit
def _load_weights(W, offs_n, offs_k, stride_n, stride_k, K: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        offs_k = offs_k.to(tl.int64)
    pointers = W + offs_n[:, None].to(tl.int64) * stride_n + offs_k[None, :] * stride_k
    if K % BLOCK_K == 0:
        w = tl.load(pointers, eviction_policy="evict_first")
    else:
        w = tl.load(pointers, mask=offs_k[None, :] < K, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit(do_not_specialize=["num_slots", "local_expert_offset", "local_experts"])
def gemv_kernel(
    X,  # [tokens, K] (SWIGLU, gemm1) or [slots, K] (gemm2)
    W,  # [local_experts, 2 * WIDTH, K] (SWIGLU) or [local_experts, WIDTH, K]
    Out,  # [slots, WIDTH]
    TopkIds,  # [tokens, TOP_K]
    num_slots,
    local_expert_offset,
    local_experts,
    stride_ids_t,
    stride_ids_k,
    stride_x_m,
    stride_x_k,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_out_m,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    WIDE: tl.constexpr,
):
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    experts = _local_experts_of_slots(
        TopkIds, num_slots, local_expert_offset, local_experts, stride_ids_t, stride_ids_k, TOP_K, SLOTS
    )
    local = (experts >= 0).to(tl.int32)
    order = tl.cumsum(local, 0)
    total = tl.sum(local, 0) * NUM_N
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        chosen = (local > 0) & (order == item // NUM_N + 1)
        slot = tl.sum(tl.where(chosen, tl.arange(0, SLOTS), 0), 0)
        expert = tl.sum(tl.where(chosen, experts, 0), 0)
        n = (item % NUM_N) * ROWS
        offs_n = n + tl.arange(0, ROWS)
        source_n = tl.minimum(offs_n, WIDTH - 1)
        x_row = slot // TOP_K if SWIGLU else slot
        x = X + x_row.to(tl.int64) * stride_x_m
        w = W + expert.to(tl.int64) * stride_w_e
        acc = tl.zeros((ROWS, BLOCK_K), dtype=tl.float32)
        if SWIGLU:
            acc_up = acc
            if WIDE:
                w_up = w + tl.full((), WIDTH, tl.int64) * stride_w_n
            else:
                w_up = w + WIDTH * stride_w_n
        for k in range(0, K, BLOCK_K):
            offs_k = k + tl.arange(0, BLOCK_K)
            if K % BLOCK_K == 0:
                x_k = tl.load(x + offs_k * stride_x_k).to(tl.float32)
            else:
                x_k = tl.load(x + offs_k * stride_x_k, mask=offs_k < K, other=0.0).to(tl.float32)
            acc += _load_weights(w, source_n, offs_k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE) * x_k[None, :]
            if SWIGLU:
                acc_up += _load_weights(w_up, source_n, offs_k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE) * x_k[None, :]
        result = tl.sum(acc, 1)
        if SWIGLU:
            result = result / (1.0 + tl.exp(-result)) * tl.sum(acc_up, 1)
        tl.store(Out + slot.to(tl.int64) * stride_out_m + offs_n, result.to(Out.dtype.element_ty), mask=offs_n < WIDTH)
