"""Slot sort: groups the (token, expert) slots of local experts and lays tiles over each expert's rows.

Rows are ordered by local expert, then by slot, without padding between experts, so the order does not depend on the
tile size. A tile is up to `tile_size` rows of one expert. Everything, the tile count included, stays on the device.

One launch does it all for up to `MAX_RANKED_SLOTS` slots: a slot's row is the number of slots with a smaller (expert,
slot), counted by comparing it with all of them. Beyond that a first launch counts slots per (block of slots, local
expert) and the second places them: each block sorts its own slots by expert in registers and adds the rows of lower
experts and of earlier blocks. Rows never depend on the order of atomics, so the result is the same in every run.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fitune.kernels.launch import Launcher, run

MAX_RANKED_SLOTS: Final = 4096
"""An H200 takes 3.8 µs for 2,048 slots and 6.7 for 4,096 (EP 16) in one launch, 11.3 in two; for 8,192 17 and 11."""
SLOTS_PER_BLOCK: Final = 1024
_SLOTS_PER_RANK_PROGRAM: Final = 16
_SLOTS_AT_ONCE: Final = (128, 512, 2048)
MAX_PROGRAMS: Final = 256
_RUNTIME_INTS: Final = ["stride_n", "stride_k", "top_k", "num_slots", "offset", "num_local"]


def block_counts_size(num_slots: int, local_experts: int) -> int:
    """Elements of the int32 scratch that `sort_slots` needs for `num_slots` slots."""
    return max(1, -(-num_slots // SLOTS_PER_BLOCK)) * local_experts


@triton.jit
def _load_local_experts(
    Ids,
    slots,
    stride_n,
    stride_k,
    top_k,
    num_slots,
    offset,
    num_local,
    FLAT: tl.constexpr,
):
    """Local expert of each slot, int32; `num_local` for slots of other ranks, of no expert, and beyond the end.

    FLAT: ids are contiguous, which saves a division per slot.
    """
    inside = slots < num_slots
    if FLAT:
        offs = slots
    else:
        offs = (slots // top_k).to(tl.int64) * stride_n + (slots % top_k).to(tl.int64) * stride_k
    ids = tl.load(Ids + offs, mask=inside, other=-1)
    is_local = inside & (ids >= offset) & (ids < offset + num_local)
    return tl.where(is_local, (ids - offset).to(tl.int32), num_local)


@triton.jit(do_not_specialize=_RUNTIME_INTS, do_not_specialize_on_alignment=["Ids", "Counts"])
def count_kernel(
    Ids,
    Counts,
    stride_n,
    stride_k,
    top_k,
    num_slots,
    offset,
    num_local,
    LOCAL_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
):
    """counts[block, e] = slots of the block that fall on local expert e. One program per block."""
    block = tl.program_id(0)
    slots = block * BLOCK + tl.arange(0, BLOCK)
    local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)
    counts = tl.histogram(local, LOCAL_PAD, mask=local < num_local)
    experts = tl.arange(0, LOCAL_PAD)
    tl.store(Counts + block.to(tl.int64) * num_local + experts, counts, mask=experts < num_local)


@triton.jit
def _sum_blocks(
    Counts,
    num_local,
    num_blocks,
    first_block,
    LOCAL_PAD: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
):
    """Slots per local expert over all blocks, and over the blocks before `first_block`."""
    experts = tl.arange(0, LOCAL_PAD)
    total = tl.zeros((BLOCKS_AT_ONCE, LOCAL_PAD), tl.int32)
    before = tl.zeros((BLOCKS_AT_ONCE, LOCAL_PAD), tl.int32)
    for start in range(0, num_blocks, BLOCKS_AT_ONCE):
        blocks = start + tl.arange(0, BLOCKS_AT_ONCE)
        mask = (blocks < num_blocks)[:, None] & (experts < num_local)[None, :]
        offs = blocks.to(tl.int64)[:, None] * num_local + experts[None, :]
        counts = tl.load(Counts + offs, mask=mask, other=0)
        total += counts
        before += tl.where((blocks < first_block)[:, None], counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


@triton.jit
def _sort_keys(keys, LOG_BLOCK: tl.constexpr):
    """Bitonic sort of 2^LOG_BLOCK int32 keys, ascending, on a hypercube whose axes are the bits of the position.

    Does what `tl.sort` does; that one takes seconds in Triton's interpreter, for want of a fast xor reduction there.
    """
    cube = tl.reshape(keys, [2] * LOG_BLOCK)
    place = tl.reshape(tl.arange(0, 2**LOG_BLOCK), [2] * LOG_BLOCK)
    for stage in tl.static_range(1, LOG_BLOCK + 1):
        descending = (place >> stage) & 1
        for step in tl.static_range(stage):
            # Position bit `stage - 1 - step`; axis 0 of the cube is the highest bit.
            partner = tl.sum(cube, axis=LOG_BLOCK - stage + step, keep_dims=True) - cube
            is_right = (place >> (stage - 1 - step)) & 1
            cube = tl.where((cube > partner) != (descending != is_right), partner, cube)
    return tl.reshape(cube, [2**LOG_BLOCK])


@triton.jit
def _write_prefixes(ExpertRows, ExpertTiles, total, tile_size, num_local, LOCAL_PAD: tl.constexpr):
    """First row and first tile of each expert, and behind them the number of rows and tiles."""
    experts = tl.arange(0, LOCAL_PAD)
    is_expert = experts < num_local
    tiles = (total + tile_size - 1) // tile_size
    tl.store(ExpertRows + experts, tl.cumsum(total, axis=0) - total, mask=is_expert)
    tl.store(ExpertTiles + experts, tl.cumsum(tiles, axis=0) - tiles, mask=is_expert)
    tl.store(ExpertRows + num_local, tl.sum(total, axis=0))
    tl.store(ExpertTiles + num_local, tl.sum(tiles, axis=0))


@triton.jit
def _write_tile_experts(
    TileExpert, total, tile_size, program, num_programs, LOCAL_PAD: tl.constexpr, TILES_AT_ONCE: tl.constexpr
):
    """Expert of every tile: how many experts end at or before it. Tiles are spread over `num_programs`."""
    tiles_of_expert = (total + tile_size - 1) // tile_size
    tile_ends = tl.cumsum(tiles_of_expert, axis=0)
    num_tiles = tl.sum(tiles_of_expert, axis=0)
    for start in range(program * TILES_AT_ONCE, num_tiles, num_programs * TILES_AT_ONCE):
        tiles = start + tl.arange(0, TILES_AT_ONCE)
        ended = tile_ends[None, :] <= tiles[:, None]
        tl.store(TileExpert + tiles, tl.sum(ended.to(tl.int32), axis=1), mask=tiles < num_tiles)


@triton.jit(
    do_not_specialize=[*_RUNTIME_INTS, "tile_size", "num_rank_programs"],
    do_not_specialize_on_alignment=[
        "Ids",
        "Counts",
        "RowOfSlot",
        "SlotOfRow",
        "ExpertRows",
        "ExpertTiles",
        "TileExpert",
    ],
)
def rank_kernel(
    Ids,
    Counts,
    RowOfSlot,
    SlotOfRow,
    ExpertRows,
    ExpertTiles,
    TileExpert,
    stride_n,
    stride_k,
    top_k,
    num_slots,
    offset,
    num_local,
    tile_size,
    num_rank_programs,
    LOCAL_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_SLOTS: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """The whole sort of up to MAX_SLOTS slots: `num_rank_programs` place BLOCK slots each, the last one lays tiles.

    That last program counts with atomics on `Counts`, which for some hundred slots is faster than a histogram.
    """
    pid = tl.program_id(0)
    if pid < num_rank_programs:
        slots = pid * BLOCK + tl.arange(0, BLOCK)
        local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)
        key = local * MAX_SLOTS + slots
        row = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_slots, CHUNK):
            others = start + tl.arange(0, CHUNK)
            other_local = _load_local_experts(
                Ids, others, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT
            )
            smaller = (other_local * MAX_SLOTS + others)[None, :] < key[:, None]
            row += tl.sum(smaller.to(tl.int32), axis=1)
        is_local = local < num_local
        tl.store(RowOfSlot + slots, tl.where(is_local, row, -1), mask=slots < num_slots)
        tl.store(SlotOfRow + row, slots, mask=is_local)
    else:
        experts = tl.arange(0, LOCAL_PAD)
        tl.store(Counts + experts, tl.zeros((LOCAL_PAD,), tl.int32), mask=experts < num_local)
        tl.debug_barrier()
        for start in range(0, num_slots, CHUNK):
            slots = start + tl.arange(0, CHUNK)
            local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)
            tl.atomic_add(Counts + local, 1, mask=local < num_local, sem="relaxed")
        tl.debug_barrier()
        total = tl.load(Counts + experts, mask=experts < num_local, other=0, cache_modifier=".cg")
        _write_prefixes(ExpertRows, ExpertTiles, total, tile_size, num_local, LOCAL_PAD)
        _write_tile_experts(TileExpert, total, tile_size, 0, 1, LOCAL_PAD, TILES_AT_ONCE)


@triton.jit(
    do_not_specialize=[*_RUNTIME_INTS, "num_blocks", "blocks_per_program", "tile_size"],
    do_not_specialize_on_alignment=[
        "Ids",
        "Counts",
        "RowOfSlot",
        "SlotOfRow",
        "ExpertRows",
        "ExpertTiles",
        "TileExpert",
    ],
)
def place_kernel(
    Ids,
    Counts,
    RowOfSlot,
    SlotOfRow,
    ExpertRows,
    ExpertTiles,
    TileExpert,
    stride_n,
    stride_k,
    top_k,
    num_slots,
    offset,
    num_local,
    num_blocks,
    blocks_per_program,
    tile_size,
    LOCAL_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Rows of all slots, slots of all rows, and the tile map. One program per `blocks_per_program` blocks of slots."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    experts = tl.arange(0, LOCAL_PAD)
    first_block = pid * blocks_per_program
    total, before = _sum_blocks(Counts, num_local, num_blocks, first_block, LOCAL_PAD, BLOCKS_AT_ONCE)
    row_ends = tl.cumsum(total, axis=0)
    if pid == 0:
        _write_prefixes(ExpertRows, ExpertTiles, total, tile_size, num_local, LOCAL_PAD)
    _write_tile_experts(TileExpert, total, tile_size, pid, tl.num_programs(0), LOCAL_PAD, TILES_AT_ONCE)

    next_row = row_ends - total + before
    for step in range(blocks_per_program):
        block = first_block + step
        slots = block * BLOCK + lane
        local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)
        mask = (experts < num_local) & (block < num_blocks)
        counts = tl.load(Counts + block.to(tl.int64) * num_local + experts, mask=mask, other=0)
        # Keys are distinct, so the order inside an expert is the order of slots; foreign slots come last.
        keys = _sort_keys(local * BLOCK + lane, LOG_BLOCK)
        expert = keys // BLOCK
        slot = block * BLOCK + keys % BLOCK
        is_local = expert < num_local
        first_lane = tl.cumsum(counts, axis=0) - counts
        row = lane + tl.gather(next_row - first_lane, tl.minimum(expert, num_local - 1), 0)
        tl.store(RowOfSlot + slot, tl.where(is_local, row, -1), mask=slot < num_slots)
        tl.store(SlotOfRow + row, slot, mask=is_local)
        next_row += counts


def sort_slots(
    topk_ids: torch.Tensor,
    local_expert_offset: int,
    local_experts: int,
    tile_size: int,
    *,
    row_of_slot: torch.Tensor,
    slot_of_row: torch.Tensor,
    expert_rows: torch.Tensor,
    expert_tiles: torch.Tensor,
    tile_expert: torch.Tensor,
    block_counts: torch.Tensor,
    launch: Launcher = run,
) -> None:
    """Sort slots by local expert and lay tiles over the experts' rows. No host sync; nothing is checked.

    topk_ids     [N, K] int32 or int64, any strides; the ids of one token are distinct. A slot is local where
                 `local_expert_offset <= id < local_expert_offset + local_experts`; all others, -1 too, are foreign.

    All outputs are int32 and contiguous:
    row_of_slot  [>= N*K]    sorted row of each slot, -1 for foreign ones
    slot_of_row  [>= rows]   slot of each sorted row; `N * min(K, local_experts)` entries are always enough
    expert_rows  [L + 1]     first row of each local expert; the last entry is the number of rows
    expert_tiles [L + 1]     first tile of each local expert; the last entry is the number of tiles
    tile_expert  [>= tiles]  local expert of each tile (`fitune.tactic.max_tiles` entries are always enough); entries
                             from the number of tiles on are left as they were
    block_counts scratch of `block_counts_size(N*K, L)` elements or more
    """
    num_tokens, top_k = topk_ids.shape
    num_slots = num_tokens * top_k
    local_pad = max(16, triton.next_power_of_2(local_experts))
    ids = (topk_ids.stride(0), topk_ids.stride(1), top_k, num_slots, local_expert_offset, local_experts)
    flat = topk_ids.is_contiguous()
    at_once = max(16, min(128, 8192 // local_pad))
    outputs = (row_of_slot, slot_of_row, expert_rows, expert_tiles, tile_expert)
    if num_slots <= MAX_RANKED_SLOTS:
        num_rank_programs = triton.cdiv(num_slots, _SLOTS_PER_RANK_PROGRAM)
        launch(
            rank_kernel,
            (num_rank_programs + 1,),
            (topk_ids, block_counts, *outputs, *ids, tile_size, num_rank_programs),
            {
                "LOCAL_PAD": local_pad,
                "BLOCK": _SLOTS_PER_RANK_PROGRAM,
                "CHUNK": _SLOTS_AT_ONCE[(num_slots > 128) + (num_slots > 1024)],
                "MAX_SLOTS": MAX_RANKED_SLOTS,
                "TILES_AT_ONCE": at_once,
                "FLAT": flat,
                "num_warps": 4,
            },
        )
        return
    block = SLOTS_PER_BLOCK
    num_blocks = triton.cdiv(num_slots, block)
    blocks_per_program = triton.cdiv(num_blocks, MAX_PROGRAMS)
    counting = {"LOCAL_PAD": local_pad, "BLOCK": block, "FLAT": flat, "num_warps": 8}
    launch(count_kernel, (num_blocks,), (topk_ids, block_counts, *ids), counting)
    launch(
        place_kernel,
        (triton.cdiv(num_blocks, blocks_per_program),),
        (topk_ids, block_counts, *outputs, *ids, num_blocks, blocks_per_program, tile_size),
        {
            "LOCAL_PAD": local_pad,
            "BLOCK": block,
            "LOG_BLOCK": block.bit_length() - 1,
            "BLOCKS_AT_ONCE": at_once,
            "TILES_AT_ONCE": at_once,
            "FLAT": flat,
            "num_warps": 8,
        },
    )
