"""The grouped GEMM over expert tiles: gemm1 (gather, SwiGLU) and gemm2 (store or weighted atomics) of the layer.

A tile is up to TILE sorted rows of one expert; it meets BLOCK_N weight rows at a time. Either side may take the M side
of the tensor core (SWAP), operands come by pointers or TMA descriptors, and tiles are walked by a fixed grid
(PERSISTENT) or one program each. The number of tiles is read on the device, so no launch waits for the routing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decode_tile(tile, ExpertRows, ExpertTiles, TileExpert, group_m, NUM_N: tl.constexpr, TILE: tl.constexpr):
    """Flat tile id -> (expert, first row, end of the expert's rows, column block).

    Experts follow one another; inside an expert, groups of `group_m` row tiles walk all column blocks together, so
    a weight block is read once per group and then found in L2.
    """
    expert = tl.load(TileExpert + tile // NUM_N)
    first = tl.load(ExpertTiles + expert)
    count = tl.load(ExpertTiles + expert + 1) - first
    inside = tile - first * NUM_N
    group = inside // (group_m * NUM_N)
    group_first = group * group_m
    group_size = min(count - group_first, group_m)
    inside -= group_first * NUM_N
    n_block = inside // group_size
    m_block = group_first + inside % group_size
    row = tl.load(ExpertRows + expert) + m_block * TILE
    row_end = tl.load(ExpertRows + expert + 1)
    return expert, row, row_end, n_block


@triton.jit
def _load_rows(A, row, k, a_offsets, stride_a_k, K: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """[TILE, BLOCK_K] of the activations, zero beyond K."""
    if TMA:
        a = A.load([row, k])
    else:
        offs_k = k + tl.arange(0, BLOCK_K)
        pointers = A + a_offsets[:, None] + offs_k[None, :] * stride_a_k
        if K % BLOCK_K == 0:
            a = tl.load(pointers)
        else:
            a = tl.load(pointers, mask=offs_k[None, :] < K, other=0.0)
    return a


@triton.jit
def _load_weights(
    W,
    expert,
    n,
    k,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    N: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """[ROWS, BLOCK_K] of one expert's weights, zero beyond K. Rows beyond N hold other weights: never stored.

    WIDE: an element of the expert may lie 2^31 or more from its first.
    """
    if TMA:
        w = W.load([expert * N + n, k])
    else:
        offs_n = n + tl.arange(0, ROWS)
        if WIDTH % ROWS != 0:
            offs_n = tl.minimum(offs_n, N - 1)
        offs_k = k + tl.arange(0, BLOCK_K)
        if WIDE:
            offs_n = offs_n.to(tl.int64)
            offs_k = offs_k.to(tl.int64)
        pointers = W + expert.to(tl.int64) * stride_w_e + offs_n[:, None] * stride_w_n + offs_k[None, :] * stride_w_k
        if K % BLOCK_K == 0:
            w = tl.load(pointers)
        else:
            w = tl.load(pointers, mask=offs_k[None, :] < K, other=0.0)
    return w


@triton.jit
def _multiply(a, w, acc, SWAP: tl.constexpr, UPCAST: tl.constexpr):
    """acc += a @ w.T, or its transpose under SWAP."""
    if UPCAST:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    if SWAP:
        acc = tl.dot(w, a.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _compute_tile(
    tile,
    A,
    W,
    Out,
    SlotOfRow,
    SlotWeights,
    ExpertRows,
    ExpertTiles,
    TileExpert,
    group_m,
    stride_a_m,
    stride_a_k,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_out_m,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    SWIGLU: tl.constexpr,
    ATOMIC: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # SWIGLU: BLOCK_N weight rows are half gate, half up; the output is half as wide as the weights.
    ROWS: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if SWIGLU else N
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    expert, row, row_end, n_block = _decode_tile(tile, ExpertRows, ExpertTiles, TileExpert, group_m, NUM_N, TILE)
    n = n_block * ROWS

    # Rows past the expert's end are computed from some valid row and never stored.
    offs_row = row + tl.arange(0, TILE)
    source = tl.minimum(offs_row, row_end - 1)
    if GATHER:
        source = tl.load(SlotOfRow + source) // TOP_K
    a_offsets = source.to(tl.int64) * stride_a_m

    if SWAP:
        acc = tl.zeros((ROWS, TILE), dtype=tl.float32)
    else:
        acc = tl.zeros((TILE, ROWS), dtype=tl.float32)
    if SWIGLU:
        acc_up = acc
    for k in range(0, K, BLOCK_K):
        a = _load_rows(A, row, k, a_offsets, stride_a_k, K, BLOCK_K, A_TMA)
        w = _load_weights(W, expert, n, k, stride_w_e, stride_w_n, stride_w_k, N, K, WIDTH, ROWS, BLOCK_K, W_TMA, WIDE)
        acc = _multiply(a, w, acc, SWAP, UPCAST)
        if SWIGLU:
            up = _load_weights(
                W, expert, WIDTH + n, k, stride_w_e, stride_w_n, stride_w_k, N, K, WIDTH, ROWS, BLOCK_K, W_TMA, WIDE
            )
            acc_up = _multiply(a, up, acc_up, SWAP, UPCAST)
    if SWIGLU:
        acc = _silu(acc) * acc_up

    offs_n = n + tl.arange(0, ROWS)
    if ATOMIC:
        slot = tl.load(SlotOfRow + tl.minimum(offs_row, row_end - 1))
        scale = tl.load(SlotWeights + slot)
        out_offsets = (slot // TOP_K).to(tl.int64) * stride_out_m
        if SWAP:
            pointers = Out + out_offsets[None, :] + offs_n[:, None]
            mask = (offs_row < row_end)[None, :] & (offs_n < WIDTH)[:, None]
            tl.atomic_add(pointers, acc * scale[None, :], mask=mask, sem="relaxed")
        else:
            pointers = Out + out_offsets[:, None] + offs_n[None, :]
            mask = (offs_row < row_end)[:, None] & (offs_n < WIDTH)[None, :]
            tl.atomic_add(pointers, acc * scale[:, None], mask=mask, sem="relaxed")
    else:
        out_offsets = offs_row.to(tl.int64) * stride_out_m
        if SWAP:
            pointers = Out + out_offsets[None, :] + offs_n[:, None]
            mask = (offs_row < row_end)[None, :] & (offs_n < WIDTH)[:, None]
        else:
            pointers = Out + out_offsets[:, None] + offs_n[None, :]
            mask = (offs_row < row_end)[:, None] & (offs_n < WIDTH)[None, :]
        tl.store(pointers, acc.to(Out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["local_experts", "group_m"])
def grouped_gemm_kernel(
    A,  # [tokens, K] (GATHER) or [rows, K]: pointer, or descriptor of [TILE, BLOCK_K] blocks
    W,  # [local_experts, N, K]: pointer, or descriptor of [ROWS, BLOCK_K] blocks over [local_experts * N, K]
    Out,  # [rows, width], or [tokens, N] float32 (ATOMIC)
    SlotOfRow,  # [rows] int32
    SlotWeights,  # [slots] float32
    ExpertRows,  # [local_experts + 1] int32
    ExpertTiles,  # [local_experts + 1] int32; the last is the number of tiles
    TileExpert,  # [max tiles] int32
    local_experts,
    group_m,
    stride_a_m,
    stride_a_k,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_out_m,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    SWIGLU: tl.constexpr,
    ATOMIC: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    FLATTEN: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if SWIGLU else N
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    total = tl.load(ExpertTiles + local_experts) * NUM_N
    first = tl.program_id(0)
    if PERSISTENT:
        for tile in tl.range(first, total, tl.num_programs(0), flatten=FLATTEN):
            _compute_tile(
                tile, A, W, Out, SlotOfRow, SlotWeights, ExpertRows, ExpertTiles, TileExpert, group_m,
                stride_a_m, stride_a_k, stride_w_e, stride_w_n, stride_w_k, stride_out_m,
                N, K, TOP_K, TILE, BLOCK_N, BLOCK_K, GATHER, SWIGLU, ATOMIC, A_TMA, W_TMA, SWAP, WIDE, UPCAST,
            )  # fmt: skip
    else:
        if first < total:
            _compute_tile(
                first, A, W, Out, SlotOfRow, SlotWeights, ExpertRows, ExpertTiles, TileExpert, group_m,
                stride_a_m, stride_a_k, stride_w_e, stride_w_n, stride_w_k, stride_out_m,
                N, K, TOP_K, TILE, BLOCK_N, BLOCK_K, GATHER, SWIGLU, ATOMIC, A_TMA, W_TMA, SWAP, WIDE, UPCAST,
            )  # fmt: skip
