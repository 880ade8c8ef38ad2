"""The streaming matrix-vector kernels for a handful of routed rows: no sort, one row per slot, weights read once.

An item of gemm1 is (block of weight rows, local slot), of gemm2 (block of weight rows, token): it sums over the token's
slots, so that neither atomics nor a kernel that combines are needed. Rows that chose one expert meet a block of its
weights at about the same time: only the first reads it from memory, the others find it in L2. Products are summed in
float32, within a thread at once and over threads at the end, so the loop is little but wide loads (AHEAD: one step
before their use); weights are marked evict-first because nobody reads them again later.

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
def _rounded_groups(x, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr, FP8_MAX: tl.constexpr, UPCAST: tl.constexpr):
    """(values [BLOCK_K] rounded to e4m3 but not scaled back, float32 scale of each group)."""
    quantized, scales = quantize_groups(x.reshape(BLOCK_K // SCALE_GROUP, SCALE_GROUP), 1, FP8_MAX)
    return to_e4m3(quantized, DTYPE, UPCAST).to(tl.float32).reshape(BLOCK_K), scales


@triton.jit
def _scaled(values, scales, scale_w, k, stride_k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """values [BLOCK_K] times the scale of their group and of the weights that they meet."""
    GROUPS: tl.constexpr = BLOCK_K // SCALE_GROUP
    group = k // SCALE_GROUP + tl.arange(0, GROUPS)
    weight = tl.load(scale_w + group * stride_k, mask=group < (K + SCALE_GROUP - 1) // SCALE_GROUP, other=0.0)
    return (values.reshape(GROUPS, SCALE_GROUP) * (scales * weight)[:, None]).reshape(BLOCK_K)


@triton.jit
def _products(
    x,
    w,
    w_scale,
    offs_n,
    stride_x_k,
    stride_w_n,
    stride_w_k,
    stride_ws_k,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FOLD: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[ROWS] products of ROWS rows of w [.., K] with the row x [K], which is read after `gdc_wait` under PDL."""
    EARLY: tl.constexpr = AHEAD or BLOCK_K >= K
    acc = tl.zeros((ROWS, BLOCK_K // FOLD), dtype=tl.float32)
    if EARLY:
        block = _load_weights(w, offs_n, 0, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
    if PDL:
        # The first weights are on their way; only now wait for the row they meet.
        gdc_wait()
    if EARLY:
        row = _load_row(x, 0, stride_x_k, K, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        if not EARLY:
            block = _load_weights(w, offs_n, k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
            row = _load_row(x, k, stride_x_k, K, BLOCK_K)
        if AHEAD:
            next_block = _load_weights(w, offs_n, k + BLOCK_K, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
            next_row = _load_row(x, k + BLOCK_K, stride_x_k, K, BLOCK_K)
        x_k = row.to(tl.float32)
        if SCALES == "block":
            rounded, x_scales = _rounded_groups(x_k, w.dtype.element_ty, BLOCK_K, FP8_MAX, UPCAST)
            x_k = _scaled(rounded, x_scales, w_scale, k, stride_ws_k, K, BLOCK_K)
        acc += _folded(block, x_k, ROWS, BLOCK_K, FOLD)
        if AHEAD:
            block, row = next_block, next_row
    return tl.sum(acc, 1)


@triton.jit
def _busy_tokens(
    TopkIds,
    num_tokens,
    offset,
    local_experts,
    stride_t,
    stride_k,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """(1 where a token has a local slot, else 0; how many of its kind stand before it; how many have one)."""
    tokens = tl.arange(0, TOKENS)
    slots = tl.arange(0, SLOTS)
    ids = tl.load(
        TopkIds + tokens[:, None] * stride_t + slots[None, :] * stride_k,
        mask=(tokens < num_tokens)[:, None] & (slots < TOP_K)[None, :],
        other=-1,
    )
    experts = ids.to(tl.int32) - offset
    local = ((ids >= 0) & (experts >= 0) & (experts < local_experts)).to(tl.int32)
    busy = tl.max(local, 1)
    before = tl.cumsum(busy, 0) - busy
    return busy, tl.where(busy > 0, before, tokens - before), tl.sum(busy, 0)


@triton.jit
def _item_of_token(item, busy, rank, num_busy, num_tokens, NUM_N: tl.constexpr, TOKENS: tl.constexpr):
    """(token, block of weight rows) of an item: those with work first, so that they are spread over all programs."""
    works = item < num_busy * NUM_N
    inside = tl.where(works, item, item - num_busy * NUM_N)
    count = tl.where(works, num_busy, num_tokens - num_busy)
    chosen = ((busy > 0) == works) & (rank == inside % count)
    token = tl.sum(tl.where(chosen, tl.arange(0, TOKENS), 0), 0)
    return token.to(tl.int64), inside // count


@triton.jit(do_not_specialize=["num_tokens", "local_expert_offset", "local_experts"])
def gemv_combine_kernel(
    X,  # [slots, K]; not yet quantised under block scales
    W,  # [local_experts, WIDTH, K]
    Out,  # [tokens, WIDTH]
    XScale,  # as in gemv_swiglu_kernel
    WScale,
    TopkIds,  # [tokens, TOP_K]
    TopkWeights,  # [tokens, TOP_K] float32
    num_tokens,
    local_expert_offset,
    local_experts,
    stride_ids_t,
    stride_ids_k,
    stride_tw_t,
    stride_tw_k,
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
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FOLD: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """gemm2 and the weighted sum over a token's local slots, in slot order. An item is (weight rows, token)."""
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    offs = tl.arange(0, SLOTS)
    busy, rank, num_busy = _busy_tokens(
        TopkIds, num_tokens, local_expert_offset, local_experts, stride_ids_t, stride_ids_k, TOP_K, SLOTS, TOKENS
    )
    for item in range(tl.program_id(0), num_tokens * NUM_N, tl.num_programs(0)):
        token, block = _item_of_token(item, busy, rank, num_busy, num_tokens, NUM_N, TOKENS)
        n = block * ROWS
        offs_n = n + tl.arange(0, ROWS)
        source_n = tl.minimum(offs_n, WIDTH - 1)
        ids = tl.load(TopkIds + token * stride_ids_t + offs * stride_ids_k, mask=offs < TOP_K, other=-1)
        experts = ids.to(tl.int32) - local_expert_offset
        local = ((ids >= 0) & (experts >= 0) & (experts < local_experts)).to(tl.int32)
        weights = tl.load(TopkWeights + token * stride_tw_t + offs * stride_tw_k, mask=local > 0, other=0.0)
        order = tl.cumsum(local, 0)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        for step in range(tl.sum(local, 0)):
            chosen = (local > 0) & (order == step + 1)
            slot = token * TOP_K + tl.sum(tl.where(chosen, offs, 0), 0)
            expert = tl.sum(tl.where(chosen, experts, 0), 0).to(tl.int64)
            weight = tl.sum(tl.where(chosen, weights, 0.0), 0)
            w_scales = WScale
            if SCALES != "":
                w_scales = WScale + expert * stride_ws_e
            if SCALES == "block":
                w_scales += n // SCALE_GROUP * stride_ws_n
            result = _products(
                X + slot * stride_x_m, W + expert * stride_w_e, w_scales, source_n, stride_x_k, stride_w_n, stride_w_k,
                stride_ws_k, K, ROWS, BLOCK_K, FOLD, AHEAD, SCALES, FP8_MAX, WIDE, PDL, UPCAST,
            )  # fmt: skip
            if SCALES == "channel":
                result *= tl.load(XScale + slot * stride_xs_m) * tl.load(w_scales + source_n * stride_ws_n)
            elif SCALES == "tensor":
                result *= tl.load(XScale) * tl.load(w_scales)
            total += weight * result
        tl.store(Out + token * stride_out_m + offs_n, total.to(Out.dtype.element_ty), mask=offs_n < WIDTH)
    if PDL:
        gdc_wait()


@triton.jit(do_not_specialize=["num_slots", "local_expert_offset", "local_experts"])
def gemv_swiglu_kernel(
    X,  # [tokens, K]; not yet quantised under block scales
    W,  # [local_experts, 2 * WIDTH, K], gate rows first
    Out,  # [slots, WIDTH]
    XScale,  # float32 [tokens] (channel), [1] (tensor), or None
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
    FOLD: tl.constexpr,
    AHEAD: tl.constexpr,
    SCALES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """gemm1 and SwiGLU. An item is (block of gate rows with their up rows, local slot)."""
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    UP_GROUP: tl.constexpr = (WIDTH + SCALE_GROUP - 1) // SCALE_GROUP
    EARLY: tl.constexpr = AHEAD or BLOCK_K >= K
    if PDL:
        # The router may have written ids and rows just now. gemm2 starts after that, so there ids are known.
        gdc_wait()
        gdc_launch_dependents()
    experts = _local_experts_of_slots(
        TopkIds, num_slots, local_expert_offset, local_experts, stride_ids_t, stride_ids_k, TOP_K, SLOTS
    )
    local = (experts >= 0).to(tl.int32)
    order = tl.cumsum(local, 0)
    num_local = tl.sum(local, 0)
    for item in range(tl.program_id(0), num_local * NUM_N, tl.num_programs(0)):
        chosen = (local > 0) & (order == item % num_local + 1)
        slot = tl.sum(tl.where(chosen, tl.arange(0, SLOTS), 0), 0)
        expert = tl.sum(tl.where(chosen, experts, 0), 0).to(tl.int64)
        n = item // num_local * ROWS
        offs_n = n + tl.arange(0, ROWS)
        source_n = tl.minimum(offs_n, WIDTH - 1)
        token = (slot // TOP_K).to(tl.int64)
        x = X + token * stride_x_m
        w = W + expert * stride_w_e
        if WIDE:
            w_up = w + tl.full((), WIDTH, tl.int64) * stride_w_n
        else:
            w_up = w + WIDTH * stride_w_n
        if SCALES == "block":
            w_scale = WScale + expert * stride_ws_e + n // SCALE_GROUP * stride_ws_n
            w_scale_up = w_scale + UP_GROUP * stride_ws_n
        acc = tl.zeros((ROWS, BLOCK_K // FOLD), dtype=tl.float32)
        acc_up = acc
        if EARLY:
            block = _load_weights(w, source_n, 0, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
            block_up = _load_weights(w_up, source_n, 0, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
            row = _load_row(x, 0, stride_x_k, K, BLOCK_K)
        for k in range(0, K, BLOCK_K):
            if not EARLY:
                block = _load_weights(w, source_n, k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                block_up = _load_weights(w_up, source_n, k, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                row = _load_row(x, k, stride_x_k, K, BLOCK_K)
            if AHEAD:
                next_block = _load_weights(w, source_n, k + BLOCK_K, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                next_up = _load_weights(w_up, source_n, k + BLOCK_K, stride_w_n, stride_w_k, K, BLOCK_K, WIDE)
                next_row = _load_row(x, k + BLOCK_K, stride_x_k, K, BLOCK_K)
            x_gate = row.to(tl.float32)
            x_up = x_gate
            if SCALES == "block":
                rounded, x_scales = _rounded_groups(x_gate, W.dtype.element_ty, BLOCK_K, FP8_MAX, UPCAST)
                x_gate = _scaled(rounded, x_scales, w_scale, k, stride_ws_k, K, BLOCK_K)
                x_up = _scaled(rounded, x_scales, w_scale_up, k, stride_ws_k, K, BLOCK_K)
            acc += _folded(block, x_gate, ROWS, BLOCK_K, FOLD)
            acc_up += _folded(block_up, x_up, ROWS, BLOCK_K, FOLD)
            if AHEAD:
                block, block_up, row = next_block, next_up, next_row
        gate = tl.sum(acc, 1)
        up = tl.sum(acc_up, 1)
        if SCALES == "channel" or SCALES == "tensor":
            x_scale = tl.load(XScale + token * stride_xs_m)
            w_scales = WScale + expert * stride_ws_e
            if SCALES == "channel":
                rows, first_up = source_n, WIDTH
            else:
                rows, first_up = source_n * 0, 1
            gate *= x_scale * tl.load(w_scales + rows * stride_ws_n)
            up *= x_scale * tl.load(w_scales + (rows + first_up) * stride_ws_n)
        result = (silu(gate) * up).to(Out.dtype.element_ty)
        tl.store(Out + slot.to(tl.int64) * stride_out_m + offs_n, result, mask=offs_n < WIDTH)
