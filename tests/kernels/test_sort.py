"""Slot sort against its reference: order, offsets, tiles; every input a router or a user may pass."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune.kernels import reference, sort
from fitune.tactic import max_tiles

POISON = -77


@dataclass(slots=True)
class Buffers:
    """Output buffers of one call, poisoned, with room behind the part that may be written."""

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    expert_rows: torch.Tensor
    expert_tiles: torch.Tensor
    tile_expert: torch.Tensor
    block_counts: torch.Tensor


def sort_once(ids: torch.Tensor, offset: int, local_experts: int, tile_size: int) -> Buffers:
    def ints(size: int) -> torch.Tensor:
        return torch.full((size,), POISON, dtype=torch.int32, device=ids.device)

    slots = ids.numel()
    buffers = Buffers(
        row_of_slot=ints(slots + 5),
        slot_of_row=ints(slots + 5),
        expert_rows=ints(local_experts + 1),
        expert_tiles=ints(local_experts + 1),
        tile_expert=ints(max_tiles(slots, local_experts, tile_size) + 5),
        block_counts=ints(sort.block_counts_size(slots, local_experts) + 5),
    )
    outputs = {field.name: getattr(buffers, field.name) for field in fields(buffers)}
    sort.sort_slots(ids, offset, local_experts, tile_size, **outputs)
    return buffers


def check(ids: torch.Tensor, offset: int, local_experts: int, tile_size: int) -> Buffers:
    """Sort, compare with the reference, and see that nothing behind the outputs was written."""
    got = sort_once(ids, offset, local_experts, tile_size)
    expected = reference.sort_slots(ids, offset, local_experts, tile_size)
    for field in fields(expected):
        values, wanted = getattr(got, field.name), getattr(expected, field.name)
        assert torch.equal(values[: wanted.numel()], wanted), field.name
        assert (values[wanted.numel() :] == POISON).all(), field.name
    used = sort.block_counts_size(ids.numel(), local_experts)
    assert (got.block_counts[used:] == POISON).all()
    return got


def draw_ids(num_tokens: int, top_k: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    scores = torch.rand((num_tokens, num_experts), generator=generator, device=generator.device)
    return scores.argsort(dim=1)[:, :top_k].to(torch.int32)


@pytest.mark.parametrize("tile_size", [16, 64, 256])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "local_experts", "offset"),
    [
        (1, 1, 1, 1, 0),
        (1, 8, 256, 256, 0),
        (5, 1, 16, 8, 8),
        (16, 8, 256, 16, 240),
        (17, 6, 160, 9, 151),
        (46, 22, 512, 512, 0),
        (128, 8, 256, 32, 32),
        (128, 8, 384, 24, 360),
    ],
)
def test_one_launch(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    local_experts: int,
    offset: int,
    tile_size: int,
    generator: torch.Generator,
) -> None:
    ids = draw_ids(num_tokens, top_k, num_experts, generator)
    assert ids.numel() <= sort.MAX_RANKED_SLOTS
    check(ids, offset, local_experts, tile_size)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "local_experts", "offset"),
    [
        (sort.MAX_RANKED_SLOTS // 8, 8, 256, 16, 16),
        (sort.MAX_RANKED_SLOTS // 8 + 1, 8, 256, 16, 240),
        (sort.MAX_RANKED_SLOTS // 8 + 1, 8, 256, 256, 0),
        (700, 8, 384, 36, 12),
        (1000, 6, 160, 160, 0),
        (250, 22, 512, 100, 412),
        (5000, 1, 16, 1, 3),
    ],
)
def test_around_one_launch(
    num_tokens: int, top_k: int, num_experts: int, local_experts: int, offset: int, generator: torch.Generator
) -> None:
    check(draw_ids(num_tokens, top_k, num_experts, generator), offset, local_experts, 64)


@pytest.mark.parametrize("num_slots", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("local_experts", [1, 16, 256])
def test_two_launches_of_few_slots(
    num_slots: int, local_experts: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sort, "MAX_RANKED_SLOTS", 0)
    check(draw_ids(num_slots, 1, 300, generator), 20, local_experts, 16)


def test_no_tokens(device: torch.device) -> None:
    got = check(torch.empty((0, 8), dtype=torch.int32, device=device), 0, 16, 64)
    assert not got.expert_rows.any()
    assert not got.expert_tiles.any()


@pytest.mark.parametrize("num_tokens", [3, 600])
def test_no_local_rows(num_tokens: int, generator: torch.Generator) -> None:
    got = check(draw_ids(num_tokens, 8, 64, generator), 64, 8, 16)
    assert (got.row_of_slot[: num_tokens * 8] == -1).all()
    assert int(got.expert_tiles[-1]) == 0


@pytest.mark.parametrize("num_tokens", [40, 4500])
def test_all_rows_on_one_expert(num_tokens: int, device: torch.device) -> None:
    got = check(torch.full((num_tokens, 1), 5, dtype=torch.int32, device=device), 4, 3, 16)
    assert got.expert_rows.tolist() == [0, 0, num_tokens, num_tokens]
    assert torch.equal(got.slot_of_row[:num_tokens].cpu(), torch.arange(num_tokens, dtype=torch.int32))


@pytest.mark.parametrize("num_tokens", [50, 600])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_foreign_ids(num_tokens: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    ids = draw_ids(num_tokens, 8, 64, generator).to(dtype)
    ids[::3, ::2] = -1
    ids[1::7, 3] = torch.iinfo(dtype).max
    ids[2::7, 5] = torch.iinfo(dtype).min
    check(ids, 0, 40, 16)
    check(ids, 24, 40, 16)


@pytest.mark.parametrize("num_tokens", [60, 520])
def test_ids_of_any_strides(num_tokens: int, generator: torch.Generator) -> None:
    wide = draw_ids(2 * num_tokens, 16, 64, generator)
    for ids in (
        wide[::2, 1::2],
        wide[:num_tokens, :8],
        wide.T.contiguous().T[:num_tokens, :8],
        wide[:1].expand(num_tokens, 16),
    ):
        check(ids, 8, 32, 16)


@pytest.mark.parametrize("most_programs", [1, 2, 4])
def test_several_blocks_per_program(
    most_programs: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks of slots than programs: each program walks several, the last one perhaps fewer."""
    monkeypatch.setattr(sort, "MAX_RANKED_SLOTS", 0)
    monkeypatch.setattr(sort, "MAX_PROGRAMS", most_programs)
    for num_slots in (sort.SLOTS_PER_BLOCK * most_programs, sort.SLOTS_PER_BLOCK * 4 + 17):
        ids = torch.randint(-1, 7, (num_slots, 1), generator=generator, device=generator.device)
        check(ids, 1, 5, 128)


def test_more_programs_than_are_read_at_once(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort, "MAX_RANKED_SLOTS", 0)
    check(draw_ids(sort.SLOTS_PER_BLOCK * 5 + 1, 1, 512, generator), 0, 500, 16)


@pytest.mark.parametrize("local_experts", [1, 16, 36, 256, 100_000])
def test_counts_fit(local_experts: int) -> None:
    """Buffers are made for the most slots of any call: fewer slots never need more, and programs have their share."""
    sizes = [sort.block_counts_size(num_slots, local_experts) for num_slots in range(0, 2_000_000, 999)]
    assert sizes == sorted(sizes)
    assert sizes[0] == local_experts
    assert sizes[-1] <= max(local_experts, sort.MAX_COUNTS)


def test_tile_size_does_not_change_the_rows(generator: torch.Generator) -> None:
    ids = draw_ids(100, 8, 32, generator)
    first, second = check(ids, 0, 32, 16), check(ids, 0, 32, 128)
    assert torch.equal(first.row_of_slot, second.row_of_slot)
    assert torch.equal(first.slot_of_row, second.slot_of_row)
    assert int(first.expert_tiles[-1]) > int(second.expert_tiles[-1])


@settings(max_examples=10, deadline=None)
@given(data=st.data(), num_tokens=st.integers(0, 90), top_k=st.integers(1, 22), local_experts=st.integers(1, 40))
def test_any_ids(device: torch.device, data: st.DataObject, num_tokens: int, top_k: int, local_experts: int) -> None:
    """Repeated ids too: a token may name an expert twice."""
    offset = data.draw(st.integers(0, 20))
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.randint(-1, 64, (num_tokens, top_k), generator=generator, device=device, dtype=torch.int32)
    check(ids, offset, local_experts, data.draw(st.sampled_from([16, 32, 64, 128, 256])))
