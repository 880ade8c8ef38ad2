"""The grouped GEMM over expert tiles: gemm1 (gather, SwiGLU) and gemm2 (store or weighted atomics) of the layer.

A tile is up to TILE sorted rows of one expert; it meets BLOCK_N weight rows at a time. Either side may take the M side
of the tensor core (SWAP), operands come by pointers or TMA descriptors, and tiles are walked by a fixed grid
(PERSISTENT) or one program each; TAIL cuts the tiles of a thin last round so that more programs share them. The number
of tiles is read on the device, so no launch waits for the routing.

Under SWIGLU a block of weight rows is half gate rows, half the up rows that belong to them, side by side in one
operand: one product, one accumulator, and both halves of a pair end in registers of one thread. Under PAIR they are two
operands and two accumulators (`GemmTactic.reads_gate_and_up_apart` says why).

SCALES of quantised operands: `block` scales every partial product of SCALE_GROUP columns before it is added, `channel`
scales the finished sums by row and by column, `tensor` by one value for all rows and one for gate, up or down columns.
Tensor cores add e4m3 products with some 14 bits, so the sum of each k-step is added in float32 under all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fitune.kernels.numeric import GROUPS_AT_ONCE, place_of_group, quantize_groups, silu, to_e4m3

SCALE_GROUP: tl.constexpr = tl.constexpr(128)
ROW_OF_SCALES: tl.constexpr = tl.constexpr(GROUPS_AT_ONCE)


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
def _weight_rows(n, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """[BLOCK_N] weight rows of a column block; rows past the end repeat the last one and are never stored."""
    offs = tl.arange(0, BLOCK_N)
    if SWIGLU:
        HALF: tl.constexpr = BLOCK_N // 2
        column = n + offs % HALF
        if WIDTH % HALF != 0:
            column = tl.minimum(column, WIDTH - 1)
        rows = column + offs // HALF * WIDTH
    else:
        rows = n + offs
        if WIDTH % BLOCK_N != 0:
            rows = tl.minimum(rows, WIDTH - 1)
    return rows


@triton.jit
def _load_weights(
    W,
    expert,
    n,
    k,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    TMA: tl.constexpr,
    WIDE: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] of one expert's weights, zero beyond K; gate rows before up rows under SWIGLU.

    WIDE: an element of the expert may lie 2^31 or more from its first.
    """
    if TMA:
        if SWIGLU:
            w = W.load([expert, 0, n, k]).reshape(BLOCK_N, BLOCK_K)
        else:
            w = W.load([expert, n, k]).reshape(BLOCK_N, BLOCK_K)
    else:
        offs_n = _weight_rows(n, WIDTH, BLOCK_N, SWIGLU)
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
    """acc + a @ w.T, or its transpose under SWAP."""
    if UPCAST:
        a = a.to(tl.float32)
        w = w.to(tl.float32)
    if SWAP:
        acc = tl.dot(w, a.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, w.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _outer(rows, columns, SWAP: tl.constexpr):
    """Product of a value per row and one per column (or one for all), laid out like the accumulator."""
    if len(columns.shape) == 0:
        if SWAP:
            product = (rows * columns)[None, :]
        else:
            product = (rows * columns)[:, None]
    elif SWAP:
        product = columns[:, None] * rows[None, :]
    else:
        product = rows[:, None] * columns[None, :]
    return product


@triton.jit
def _block_scales(
    Scales,
    n,
    k,
    stride_n,
    stride_k,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    """Scales of a block of weights in the group of column k: (gate, up) under SWIGLU, else one or [BLOCK_N], twice.

    Groups of rows start anew at row SPLIT, the first up row.
    """
    SECOND: tl.constexpr = (SPLIT + SCALE_GROUP - 1) // SCALE_GROUP
    first = Scales + k // SCALE_GROUP * stride_k
    if SWIGLU:
        scale = tl.load(first + n // SCALE_GROUP * stride_n)
        second = tl.load(first + (SECOND + n // SCALE_GROUP) * stride_n)
    elif BLOCK_N <= SCALE_GROUP and SPLIT % BLOCK_N == 0:
        group = tl.where(n < SPLIT, n // SCALE_GROUP, SECOND + (n - SPLIT) // SCALE_GROUP)
        scale = tl.load(first + group * stride_n)
        second = scale
    else:
        rows = _weight_rows(n, WIDTH, BLOCK_N, False)
        group = tl.where(rows < SPLIT, rows // SCALE_GROUP, SECOND + (rows - SPLIT) // SCALE_GROUP)
        scale = tl.load(first + group * stride_n)
        second = scale
    return scale, second


@triton.jit
def _split_gate_up(acc, TILE: tl.constexpr, HALF: tl.constexpr, SWAP: tl.constexpr):
    """The two halves of an accumulator along its weight rows."""
    if SWAP:
        pairs = acc.reshape(2, HALF, TILE).permute(1, 2, 0)
    else:
        pairs = acc.reshape(TILE, 2, HALF).permute(0, 2, 1)
    return pairs.split()


@triton.jit
def _accumulate(
    A,
    W,
    AScale,
    WScale,
    expert,
    row,
    n,
    source,
    stride_a_m,
    stride_a_k,
    stride_w_e,
    stride_w_n,
    stride_w_k,
    stride_as_m,
    stride_as_k,
    stride_ws_e,
    stride_ws_n,
    stride_ws_k,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    PAIR: tl.constexpr,
    SCALES: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """[TILE, ROWS] float32 products of one tile over all of K, scaled, of gate and of up rows; transposed under SWAP.

    Without SWIGLU there is one result, given twice. PAIR: gate and up rows are two operands of BLOCK_N / 2 rows.
    """
    ROWS: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    BOX: tl.constexpr = ROWS if PAIR else BLOCK_N
    TOGETHER: tl.constexpr = SWIGLU and not PAIR
    a_offsets = source.to(tl.int64) * stride_a_m
    if SWAP:
        zeros = tl.zeros((BOX, TILE), dtype=tl.float32)
        acc = tl.zeros((ROWS, TILE), dtype=tl.float32)
    else:
        zeros = tl.zeros((TILE, BOX), dtype=tl.float32)
        acc = tl.zeros((TILE, ROWS), dtype=tl.float32)
    acc_up = acc
    if SCALES == "block":
        tl.static_assert(SCALE_GROUP % BLOCK_K == 0, "a k-step must lie in one group of scales")
        a_scales = AScale + source.to(tl.int64) * stride_as_m
        w_scales = WScale + expert.to(tl.int64) * stride_ws_e
        # Scales are fetched one step ahead: a step's sum would wait for them otherwise.
        a_scale = tl.load(a_scales)
        w_scale, w_second = _block_scales(w_scales, n, 0, stride_ws_n, stride_ws_k, SPLIT, WIDTH, BLOCK_N, SWIGLU)
        for k in range(0, K, BLOCK_K):
            a = _load_rows(A, row, k, a_offsets, stride_a_k, K, BLOCK_K, A_TMA)
            w = _load_weights(
                W, expert, n, k, stride_w_e, stride_w_n, stride_w_k, WIDTH, K, BOX, BLOCK_K, TOGETHER, W_TMA, WIDE
            )
            ahead = tl.minimum(k + BLOCK_K, K - 1)
            next_a_scale = tl.load(a_scales + place_of_group(ahead // SCALE_GROUP, stride_as_k))
            next_w_scale, next_w_second = _block_scales(
                w_scales, n, ahead, stride_ws_n, stride_ws_k, SPLIT, WIDTH, BLOCK_N, SWIGLU
            )
            part = _multiply(a, w, zeros, SWAP, UPCAST)
            if TOGETHER:
                # Apart before they are scaled: one factor for a row of each half, not one for every product.
                part, part_up = _split_gate_up(part, TILE, ROWS, SWAP)
                acc_up += part_up * _outer(a_scale, w_second, SWAP)
            elif PAIR:
                w_up = _load_weights(
                    W, expert, WIDTH + n, k, stride_w_e, stride_w_n, stride_w_k, WIDTH, K, BOX, BLOCK_K, False, W_TMA,
                    WIDE,
                )  # fmt: skip
                acc_up += _multiply(a, w_up, zeros, SWAP, UPCAST) * _outer(a_scale, w_second, SWAP)
            acc += part * _outer(a_scale, w_scale, SWAP)
            a_scale, w_scale, w_second = next_a_scale, next_w_scale, next_w_second
    else:
        acc = zeros
        acc_up = zeros
        for k in range(0, K, BLOCK_K):
            a = _load_rows(A, row, k, a_offsets, stride_a_k, K, BLOCK_K, A_TMA)
            w = _load_weights(
                W, expert, n, k, stride_w_e, stride_w_n, stride_w_k, WIDTH, K, BOX, BLOCK_K, TOGETHER, W_TMA, WIDE
            )
            if SCALES != "":
                acc += _multiply(a, w, zeros, SWAP, UPCAST)
            else:
                acc = _multiply(a, w, acc, SWAP, UPCAST)
            if PAIR:
                w_up = _load_weights(
                    W, expert, WIDTH + n, k, stride_w_e, stride_w_n, stride_w_k, WIDTH, K, BOX, BLOCK_K, False, W_TMA,
                    WIDE,
                )  # fmt: skip
                if SCALES != "":
                    acc_up += _multiply(a, w_up, zeros, SWAP, UPCAST)
                else:
                    acc_up = _multiply(a, w_up, acc_up, SWAP, UPCAST)
        if SCALES != "":
            a_scale = tl.load(AScale + source.to(tl.int64) * stride_as_m)
            rows = _weight_rows(n, WIDTH, BOX, TOGETHER)
            acc *= _outer(a_scale, _row_scales(WScale, expert, rows, stride_ws_e, stride_ws_n, SPLIT, SCALES), SWAP)
            if PAIR:
                up_scales = _row_scales(WScale, expert, WIDTH + rows, stride_ws_e, stride_ws_n, SPLIT, SCALES)
                acc_up *= _outer(a_scale, up_scales, SWAP)
        if TOGETHER:
            acc, acc_up = _split_gate_up(acc, TILE, ROWS, SWAP)
    return acc, acc_up


@triton.jit
def _row_scales(WScale, expert, rows, stride_ws_e, stride_ws_n, SPLIT: tl.constexpr, SCALES: tl.constexpr):
    """Scales of weight rows that hold for all of K."""
    if SCALES == "tensor":
        rows = rows // SPLIT
    return tl.load(WScale + expert.to(tl.int64) * stride_ws_e + rows * stride_ws_n)


@triton.jit
def _compute_tile(
    tile,
    part,
    A,
    W,
    Out,
    AScale,
    WScale,
    OutScale,
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
    stride_as_m,
    stride_as_k,
    stride_ws_e,
    stride_ws_n,
    stride_ws_k,
    stride_os_k,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    GATHER: tl.constexpr,
    SWIGLU: tl.constexpr,
    PAIR: tl.constexpr,
    ATOMIC: tl.constexpr,
    SCALES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile, or one of the PARTS blocks of BLOCK_N weight rows that it is cut into."""
    ROWS: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if SWIGLU else N
    NUM_N: tl.constexpr = (WIDTH + ROWS * PARTS - 1) // (ROWS * PARTS)
    expert, row, row_end, n_block = _decode_tile(tile, ExpertRows, ExpertTiles, TileExpert, group_m, NUM_N, TILE)
    n = (n_block * PARTS + part) * ROWS
    width = WIDTH
    if PARTS > 1 and WIDTH % (ROWS * PARTS) != 0:
        # A part that lies wholly behind the last column computes the first ones and stores nothing.
        width = tl.where(n < WIDTH, WIDTH, 0)
        n = tl.where(n < WIDTH, n, 0)

    # Rows past the expert's end are computed from some valid row and never stored.
    offs_row = row + tl.arange(0, TILE)
    source = tl.minimum(offs_row, row_end - 1)
    if GATHER:
        source = tl.load(SlotOfRow + source) // TOP_K
    result, up = _accumulate(
        A, W, AScale, WScale, expert, row, n, source, stride_a_m, stride_a_k, stride_w_e, stride_w_n, stride_w_k,
        stride_as_m, stride_as_k, stride_ws_e, stride_ws_n, stride_ws_k, WIDTH, K, SPLIT, TILE, BLOCK_N, BLOCK_K,
        SWIGLU, PAIR, SCALES, A_TMA, W_TMA, SWAP, WIDE, UPCAST,
    )  # fmt: skip
    if SWIGLU:
        result = silu(result) * up

    offs_n = n + tl.arange(0, ROWS)
    if ATOMIC:
        slot = tl.load(SlotOfRow + tl.minimum(offs_row, row_end - 1))
        weight = tl.load(SlotWeights + slot)
        out_offsets = (slot // TOP_K).to(tl.int64) * stride_out_m
        if SWAP:
            pointers = Out + out_offsets[None, :] + offs_n[:, None]
            mask = (offs_row < row_end)[None, :] & (offs_n < width)[:, None]
            tl.atomic_add(pointers, result * weight[None, :], mask=mask, sem="relaxed")
        else:
            pointers = Out + out_offsets[:, None] + offs_n[None, :]
            mask = (offs_row < row_end)[:, None] & (offs_n < width)[None, :]
            tl.atomic_add(pointers, result * weight[:, None], mask=mask, sem="relaxed")
    else:
        if QUANTIZE == "block":
            # ROWS is one group of columns, or what a row has of it.
            tl.static_assert(ROWS == SCALE_GROUP, "a tile must hold one group of scales")
            if WIDTH % ROWS != 0:
                if SWAP:
                    result = tl.where((offs_n < WIDTH)[:, None], result, 0.0)
                else:
                    result = tl.where((offs_n < WIDTH)[None, :], result, 0.0)
            result, scale = quantize_groups(result, 0 if SWAP else 1, FP8_MAX)
            place = offs_row * ROW_OF_SCALES + place_of_group(n_block, stride_os_k)
            tl.store(OutScale + place, scale, mask=offs_row < row_end)
        elif QUANTIZE == "tensor":
            result = tl.clamp(result / tl.load(OutScale), -FP8_MAX, FP8_MAX)
        if QUANTIZE != "":
            value = to_e4m3(result, Out.dtype.element_ty, UPCAST)
        else:
            value = result.to(Out.dtype.element_ty)
        out_offsets = offs_row.to(tl.int64) * stride_out_m
        if SWAP:
            pointers = Out + out_offsets[None, :] + offs_n[:, None]
            mask = (offs_row < row_end)[None, :] & (offs_n < width)[:, None]
        else:
            pointers = Out + out_offsets[:, None] + offs_n[None, :]
            mask = (offs_row < row_end)[:, None] & (offs_n < width)[None, :]
        tl.store(pointers, value, mask=mask)


@triton.jit(do_not_specialize=["local_experts", "group_m"])
def grouped_gemm_kernel(
    A,  # [tokens, K] (GATHER) or [rows, K]: pointer, or descriptor of [TILE, BLOCK_K] blocks
    W,  # [local_experts, N, K]: pointer, or descriptor of [1, BLOCK_N, BLOCK_K] blocks; under SWIGLU of
    #     [1, 2, BLOCK_N / 2, BLOCK_K] blocks over [local_experts, 2, N / 2, K]
    WTail,  # the same for blocks of BLOCK_N / TAIL rows
    Out,  # [rows, width], or [tokens, N] float32 (ATOMIC)
    AScale,  # float32 [groups of K / 8, rows of A, 8] (block), [1, rows of A] (channel), [1, 1] (tensor), or None
    WScale,  # float32 [local_experts, groups of N, groups of K] (block), [local_experts, N] (channel),
    #          [local_experts, N / SPLIT] (tensor); None without scales
    OutScale,  # [groups of width / 8, rows, 8] that QUANTIZE "block" writes, the one that "tensor" reads, or None
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
    stride_as_m,
    stride_as_k,
    stride_ws_e,
    stride_ws_n,
    stride_ws_k,
    stride_os_k,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,  # first up row of W in gemm1, else N
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATHER: tl.constexpr,
    SWIGLU: tl.constexpr,
    PAIR: tl.constexpr,
    ATOMIC: tl.constexpr,
    SCALES: tl.constexpr,
    QUANTIZE: tl.constexpr,
    FP8_MAX: tl.constexpr,
    A_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    SWAP: tl.constexpr,
    PERSISTENT: tl.constexpr,
    FLATTEN: tl.constexpr,
    TAIL: tl.constexpr,
    WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    WIDTH: tl.constexpr = N // 2 if SWIGLU else N
    NUM_N: tl.constexpr = (WIDTH + ROWS - 1) // ROWS
    total = tl.load(ExpertTiles + local_experts) * NUM_N
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    if PERSISTENT:
        whole = total
        if TAIL > 1:
            # Tiles of a last round that would leave most programs idle are cut, if their parts fit one round.
            left = total % programs
            whole -= tl.where(left * TAIL <= programs, left, 0)
        for tile in tl.range(first, whole, programs, flatten=FLATTEN):
            _compute_tile(
                tile, 0, A, W, Out, AScale, WScale, OutScale, SlotOfRow, SlotWeights, ExpertRows, ExpertTiles,
                TileExpert, group_m, stride_a_m, stride_a_k, stride_w_e, stride_w_n, stride_w_k, stride_out_m,
                stride_as_m, stride_as_k, stride_ws_e, stride_ws_n, stride_ws_k, stride_os_k,
                N, K, SPLIT, TOP_K, TILE, BLOCK_N, BLOCK_K, 1, GATHER, SWIGLU, PAIR, ATOMIC, SCALES, QUANTIZE, FP8_MAX,
                A_TMA, W_TMA, SWAP, WIDE, UPCAST,
            )  # fmt: skip
        if TAIL > 1:  # noqa: SIM102 - decided when compiling
            if first < (total - whole) * TAIL:
                _compute_tile(
                    whole + first // TAIL, first % TAIL, A, WTail, Out, AScale, WScale, OutScale, SlotOfRow,
                    SlotWeights, ExpertRows, ExpertTiles, TileExpert, group_m, stride_a_m, stride_a_k, stride_w_e,
                    stride_w_n, stride_w_k, stride_out_m, stride_as_m, stride_as_k, stride_ws_e, stride_ws_n,
                    stride_ws_k, stride_os_k,
                    N, K, SPLIT, TOP_K, TILE, BLOCK_N // TAIL, BLOCK_K, TAIL, GATHER, SWIGLU, PAIR, ATOMIC, SCALES,
                    QUANTIZE, FP8_MAX, A_TMA, W_TMA, SWAP, WIDE, UPCAST,
                )  # fmt: skip
    else:
        if first < total:
            _compute_tile(
                first, 0, A, W, Out, AScale, WScale, OutScale, SlotOfRow, SlotWeights, ExpertRows, ExpertTiles,
                TileExpert, group_m, stride_a_m, stride_a_k, stride_w_e, stride_w_n, stride_w_k, stride_out_m,
                stride_as_m, stride_as_k, stride_ws_e, stride_ws_n, stride_ws_k, stride_os_k,
                N, K, SPLIT, TOP_K, TILE, BLOCK_N, BLOCK_K, 1, GATHER, SWIGLU, PAIR, ATOMIC, SCALES, QUANTIZE, FP8_MAX,
                A_TMA, W_TMA, SWAP, WIDE, UPCAST,
            )  # fmt: skip
