"""The streaming matrix-vector kernel for a handful of routed rows: no sort, one row per slot, weights read once.

Each work item is (local slot, block of weight rows). Products are summed in float32, within a thread at once and over
threads at the end, so the loop is little but wide loads (AHEAD: one step before their use); weights are marked
evict-first because nobody reads them again.

Under `block` scales the row of activations is quantised here, group by group, as it is read: that costs less than a
kernel of its own. Under PDL the kernel may start before its forerunner has ended; what the forerunner writes is read
after `gdc_wait` only, and every program waits, so that whoever waits for this kernel waits for that one too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fitune.kernels.numeric import quantize_groups, silu, to_e4m3

SCALE_GROUP: tl.constexpr = tl.constexpr(128)


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
def _load_weights(W, offs_n, k, stride_n, stride_k, K: tl.constexpr, BLOCK_K: tl.constexpr, WIDE: tl.constexpr):
    """[rows, BLOCK_K] of one expert's weights from column k on, zero from column K on."""
    offs_k = k + tl.arange(0, BLOCK_K)
    inside = offs_k < K
    if WIDE:
        offs_k = offs_k.to(tl.int64)
    pointers = W + offs_n[:, None].to(tl.int64) * stride_n + offs_k[None, :] * stride_k
    if K == BLOCK_K:
        w = tl.load(pointers, eviction_policy="evict_first")
    elif K % BLOCK_K == 0:
        w = tl.load(pointers, mask=k < K, other=0.0, eviction_policy="evict_first")
    else:
        w = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _load_row(x, k, stride_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_K] of one row of activations from column k on, zero from column K on."""
    offs_k = k + tl.arange(0, BLOCK_K)
    if K == BLOCK_K:
        values = tl.load(x + offs_k * stride_k)
    elif K % BLOCK_K == 0:
        values = tl.load(x + offs_k * stride_k, mask=k < K, other=0.0)
    else:
        values = tl.load(x + offs_k * stride_k, mask=offs_k < K, other=0.0)
    return values


@triton.jit
def _folded(w, x, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, FOLD: tl.constexpr):
    """[ROWS, BLOCK_K / FOLD] sums of the products of FOLD neighbours, those that one load brings to one thread."""
    products = w.to(tl.float32) * x[None, :]
    return tl.sum(products.reshape(ROWS, BLOCK_K // FOLD, FOLD), 2)


@triton.jit
def _scaled(values, scales, scale_w, k, stride_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """values [BLOCK_K] times the scale of their group and of the weights that they meet."""
    GROUPS: tl.constexpr = BLOCK_K // SCALE_GROUP
    group = k // SCALE_GROUP + tl.arange(0, GROUPS)
    weight = tl.load(scale_w + group * stride_k, mask=group < (K + SCALE_GROUP - 1) // SCALE_GROUP, other=0.0)
    return (values.reshape(GROUPS, SCALE_GROUP) * (scales * weight)[:, None]).reshape(BLOCK_K)


@triton.jit(do_not_specialize=["num_slots", "local_expert_offset", "local_experts"])
def gemv_kernel(
    X,  # [tokens, K] (SWIGLU, gemm1) or [slots, K] (gemm2); not yet quantised under block scales
    W,  # [local_experts, 2 * WIDTH, K] (SWIGLU) or [local_experts, WIDTH, K]
    Out,  # [slots, WIDTH]
    XScale,  # float32 [rows of X] (channel), [1] (tensor), or None
    WScale,  # float32 [local_experts, groups of rows, groups of K] (block), [local_experts, rows] (channel),
    #          [local_experts, 2 or 1] (tensor), or None
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
    stride_xs_m,
    stride_ws_e,
    stride_ws_n,
    stride_ws_k,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    FOLD: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    UP_GROUP: tl.constexpr = (WIDTH + SCALE_GROUP - 1) // SCALE_GROUP
    EARLY: tl.constexpr = AHEAD or BLOCK_K >= K
    if PDL and SWIGLU:
        # The router may have written ids and rows just now.
        gdc_wait()
        gdc_launch_dependents()
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
        if SWIGLU:
            if WIDE:
                w_up = w + tl.full((), WIDTH, tl.int64) * stride_w_n
            else:
                w_up = w + WIDTH * stride_w_n
        if SCALES == "block":
            w_scale = WScale + expert.to(tl.int64) * stride_ws_e + n // SCALE_GROUP * stride_ws_n
            w_scale_up = w_scale + UP_GROUP * stride_ws_n
        acc = tl.zeros((ROWS, BLOCK_K // FOLD), dtype=tl.float32)
        if SWIGLU:
            acc_up = acc
        if EARLY:
            block = _load_weights(w, source_n, 0, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
            if SWIGLU:
                block_up = _load_weights(w_up, source_n, 0, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
        if PDL and not SWIGLU:
            # The first weights are on their way; only now wait for the rows they meet.
            gdc_wait()
        if EARLY:
            row = _load_row(x, 0, stride_x_k, K, BLOCK_K)
        for k in range(0, K, BLOCK_K):
            if not EARLY:
                block = _load_weights(w, source_n, k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                if SWIGLU:
                    block_up = _load_weights(w_up, source_n, k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                row = _load_row(x, k, stride_x_k, K, BLOCK_K)
            if AHEAD:
                next_block = _load_weights(w, source_n, k + BLOCK_K, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                if SWIGLU:
                    next_up = _load_weights(w_up, source_n, k + BLOCK_K, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                next_row = _load_row(x, k + BLOCK_K, stride_x_k, K, BLOCK_K)
            x_k = row.to(tl.float32)
            if SCALES == "block":
                quantized, x_scales = quantize_groups(x_k.reshape(BLOCK_K // SCALE_GROUP, SCALE_GROUP), 1, FP8_MAX)
                x_k = to_e4m3(quantized, W.dtype.element_ty, UPCAST).to(tl.float32).reshape(BLOCK_K)
                acc += _folded(block, _scaled(x_k, x_scales, w_scale, k, stride_ws_k, K, BLOCK_K), ROWS, BLOCK_K, FOLD)
                if SWIGLU:
                    acc_up += _folded(
                        block_up, _scaled(x_k, x_scales, w_scale_up, k, stride_ws_k, K, BLOCK_K), ROWS, BLOCK_K, FOLD
                    )
            else:
                acc += _folded(block, x_k, ROWS, BLOCK_K, FOLD)
                if SWIGLU:
                    acc_up += _folded(block_up, x_k, ROWS, BLOCK_K, FOLD)
            if AHEAD:
                block, row = next_block, next_row
                if SWIGLU:
                    block_up = next_up
        result = tl.sum(acc, 1)
        if SWIGLU:
            up = tl.sum(acc_up, 1)
        if SCALES == "channel" or SCALES == "tensor":
            x_scale = tl.load(XScale + x_row.to(tl.int64) * stride_xs_m)
            w_scales = WScale + expert.to(tl.int64) * stride_ws_e
            if SCALES == "channel":
                rows, first_up = source_n, WIDTH
            else:
                rows, first_up = source_n * 0, 1
            result *= x_scale * tl.load(w_scales + rows * stride_ws_n)
            if SWIGLU:
                up *= x_scale * tl.load(w_scales + (rows + first_up) * stride_ws_n)
        if SWIGLU:
            result = silu(result) * up
        tl.store(Out + slot.to(tl.int64) * stride_out_m + offs_n, result.to(Out.dtype.element_ty), mask=offs_n < WIDTH)
    if PDL and not SWIGLU:
        gdc_wait()
