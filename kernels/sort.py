"""Slot sort: groups the (token, expert) slots of local experts and lays tiles over each expert's rows.

Rows are ordered by local expert, then by slot, without padding between experts, so the order does not depend on the
tile size. A tile is up to `tile_size` rows of one expert. Everything, the tile count included, stays on the device.

One launch does it all for up to `MAX_RANKED_SLOTS` slots: a slot's row is the number of slots with a smaller (expert,
slot), counted by comparing it with all of them. Beyond that there are two launches whose programs share out the slots
evenly. The first counts the slots of each (program, local expert). In the second a slot's row is the number of slots of
lower experts, of its expert's in earlier programs, and of its expert's before it in the same program, which are counted
by comparing all pairs of a block. Rows never depend on the order of atomics, so the result is the same in every run.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fitune.kernels.launch import Launcher, run

MAX_RANKED_SLOTS: Final = 1024
"""An H200 takes 3.3 µs for 2,048 slots in one launch and 3.2 in two at EP 16, 9.7 and 5.6 at EP 1."""
SLOTS_PER_BLOCK: Final = 128
"""Each slot is compared with all of its block: some 450 instructions a thread, four times as many for 256 slots."""
MAX_PROGRAMS: Final = 512
MAX_COUNTS: Final = 16384
"""Every placing program reads the counts of all of them: 16,384 are 128 loads a thread."""
_SLOTS_PER_RANK_PROGRAM: Final = 16
_SLOTS_AT_ONCE: Final = (128, 512)
_RUNTIME_INTS: Final = ["stride_n", "stride_k", "top_k", "num_slots", "offset", "num_local"]


def _most_programs(local_experts: int) -> int:
    """Programs of the two launches at most; more slots than they have blocks for make them walk several blocks each."""
    return max(1, min(MAX_PROGRAMS, MAX_COUNTS // local_experts))


def block_counts_size(num_slots: int, local_experts: int) -> int:
    """Elements of the int32 scratch that `sort_slots` needs for up to `num_slots` slots."""
    num_blocks = max(1, -(-num_slots // SLOTS_PER_BLOCK))
    return min(num_blocks, _most_programs(local_experts)) * local_experts


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


@triton.jit(
    do_not_specialize=[*_RUNTIME_INTS, "blocks_per_program"],
    do_not_specialize_on_alignment=["Ids", "Counts"],
)
def count_kernel(
    Ids,
    Counts,
    stride_n,
    stride_k,
    top_k,
    num_slots,
    offset,
    num_local,
    blocks_per_program,
    LOCAL_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAT: tl.constexpr,
):
    """counts[p, e] = slots of program p, `blocks_per_program` blocks of them, that fall on local expert e."""
    pid = tl.program_id(0)
    experts = tl.arange(0, LOCAL_PAD)
    counts = tl.zeros((LOCAL_PAD,), tl.int32)
    for step in range(blocks_per_program):
        slots = (pid * blocks_per_program + step) * BLOCK + tl.arange(0, BLOCK)
        local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)
        counts += tl.histogram(local, LOCAL_PAD, mask=local < num_local)
    tl.store(Counts + pid * num_local + experts, counts, mask=experts < num_local)


@triton.jit
def _sum_counts(Counts, num_local, LOCAL_PAD: tl.constexpr, PROGRAMS_AT_ONCE: tl.constexpr):
    """Slots per local expert over all programs, and over those before this one."""
    pid, num_programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, LOCAL_PAD)
    total = tl.zeros((PROGRAMS_AT_ONCE, LOCAL_PAD), tl.int32)
    before = tl.zeros((PROGRAMS_AT_ONCE, LOCAL_PAD), tl.int32)
    for start in range(0, num_programs, PROGRAMS_AT_ONCE):
        programs = start + tl.arange(0, PROGRAMS_AT_ONCE)
        mask = (programs < num_programs)[:, None] & (experts < num_local)[None, :]
        counts = tl.load(Counts + programs[:, None] * num_local + experts[None, :], mask=mask, other=0)
        total += counts
        before += tl.where((programs < pid)[:, None], counts, 0)
    return tl.sum(total, axis=0), tl.sum(before, axis=0)


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
    do_not_specialize=[*_RUNTIME_INTS, "blocks_per_program", "tile_size"],
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
    blocks_per_program,
    tile_size,
    LOCAL_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS_AT_ONCE: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Rows of all slots, slots of all rows, and the tile map. The grid is that of `count_kernel`."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    slots = pid * blocks_per_program * BLOCK + lane
    # Loaded ahead of its use, so that this and the counts come at the same time.
    local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)
    total, earlier = _sum_counts(Counts, num_local, LOCAL_PAD, PROGRAMS_AT_ONCE)
    if pid == 0:
        _write_prefixes(ExpertRows, ExpertTiles, total, tile_size, num_local, LOCAL_PAD)
    _write_tile_experts(TileExpert, total, tile_size, pid, tl.num_programs(0), LOCAL_PAD, TILES_AT_ONCE)

    next_row = tl.cumsum(total, axis=0) - total + earlier
    for step in range(blocks_per_program):
        is_local = local < num_local
        # The xor is the other slot's lane if both are of one expert, else at least BLOCK. Sums of comparisons would do,
        # but LLVM packs those into bits to count them, which takes more instructions and registers.
        first_key = local * BLOCK
        before = (((first_key + lane)[:, None] ^ first_key[None, :]) - lane[None, :]) >> 31
        row = tl.gather(next_row, tl.minimum(local, num_local - 1), 0) - tl.sum(before, axis=0)
        tl.store(RowOfSlot + slots, tl.where(is_local, row, -1), mask=slots < num_slots)
        tl.store(SlotOfRow + row, slots, mask=is_local)
        if step + 1 < blocks_per_program:
            next_row += tl.histogram(local, LOCAL_PAD, mask=is_local)
            slots += BLOCK
            local = _load_local_experts(Ids, slots, stride_n, stride_k, top_k, num_slots, offset, num_local, FLAT)


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
                "CHUNK": _SLOTS_AT_ONCE[num_slots > 128],
                "MAX_SLOTS": MAX_RANKED_SLOTS,
                "TILES_AT_ONCE": at_once,
                "FLAT": flat,
                "num_warps": 4,
            },
        )
        return
    num_blocks = triton.cdiv(num_slots, SLOTS_PER_BLOCK)
    blocks_per_program = triton.cdiv(num_blocks, _most_programs(local_experts))
    grid = (triton.cdiv(num_blocks, blocks_per_program),)
    constants = {"LOCAL_PAD": local_pad, "BLOCK": SLOTS_PER_BLOCK, "FLAT": flat, "num_warps": 4}
    launch(count_kernel, grid, (topk_ids, block_counts, *ids, blocks_per_program), constants)
    launch(
        place_kernel,
        grid,
        (topk_ids, block_counts, *outputs, *ids, blocks_per_program, tile_size),
        {**constants, "PROGRAMS_AT_ONCE": max(1, 2048 // local_pad), "TILES_AT_ONCE": 16},
    )
