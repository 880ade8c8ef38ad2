"""Gather, SwiGLU, combine, cast and zero against torch; rows that are not there stay untouched and unread."""

from __future__ import annotations

import pytest
import torch

from fitune.kernels import reference, rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def draw(*size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(size, generator=generator, device=generator.device).to(dtype)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """bf16 stores truncate in the interpreter, hence one whole unit in the last place and a little."""
    return {"rtol": {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype], "atol": 1e-5}


def expert_rows(num_rows: int, device: torch.device, local_experts: int = 3) -> torch.Tensor:
    values = [0] * local_experts + [num_rows]
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 80, 704, 1056, 2880, 4096])
def test_permute(columns: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    x = draw(7, columns, dtype=dtype, generator=generator)
    slots = torch.randperm(21, generator=generator, device=x.device)[:9].to(torch.int32)
    out = torch.full((12, columns), NAN, dtype=dtype, device=x.device)
    rows.permute_rows(x, slots, expert_rows(9, x.device), 3, out, num_programs=4)
    assert torch.equal(out[:9], x[slots.long() // 3])
    assert out[9:].isnan().all()


def test_permute_any_strides(generator: torch.Generator) -> None:
    slots = torch.tensor([3, 0, 5], dtype=torch.int32, device=generator.device)
    wide = draw(8, 300, dtype=torch.float32, generator=generator)
    for x in (wide[::2, :100], wide[:, 50:], wide[:, ::3], wide.T.contiguous().T):
        out = torch.full((3, x.shape[1] + 7), NAN, device=x.device)[:, : x.shape[1]]
        rows.permute_rows(x, slots, expert_rows(3, x.device), 2, out, num_programs=5)
        assert torch.equal(out, x[slots.long() // 2])


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_fixed_launch_walks_all_rows(num_rows: int, num_programs: int, generator: torch.Generator) -> None:
    gate_up = draw(6, 2 * 1500, dtype=torch.float32, generator=generator)
    gate_up[num_rows:] = NAN
    out = torch.full((6, 1500), 5.0, device=gate_up.device)
    rows.swiglu(gate_up, expert_rows(num_rows, gate_up.device), out, num_programs)
    torch.testing.assert_close(out[:num_rows], reference.swiglu(gate_up[:num_rows]))
    assert (out[num_rows:] == 5.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 80, 704, 768, 2048])
def test_swiglu(columns: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    gate_up = draw(5, 2 * columns, dtype=dtype, generator=generator)
    gate_up[0, 0] = -60.0  # silu is finite far out on both sides
    gate_up[1, 0] = 60.0
    out = torch.empty((5, columns), dtype=dtype, device=gate_up.device)
    rows.swiglu(gate_up, expert_rows(5, gate_up.device, 1), out, num_programs=2)
    torch.testing.assert_close(out.float(), reference.swiglu(gate_up), **tolerance(dtype))


def slots_of(num_tokens: int, top_k: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids [N, K] over 4 experts of which 1 and 2 are local, and the local slots in a shuffled order."""
    ids = torch.randint(-1, 4, (num_tokens, top_k), generator=generator, device=generator.device)
    ids[0] = 3
    local = torch.nonzero(((ids >= 1) & (ids < 3)).flatten()).flatten()
    return ids, local[torch.randperm(local.numel(), generator=generator, device=generator.device)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("top_k", "columns"), [(1, 64), (2, 2880), (8, 136), (22, 80)])
def test_combine(top_k: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    num_tokens = 6
    ids, local = slots_of(num_tokens, top_k, generator)
    device = ids.device
    by_slot = torch.full((num_tokens * top_k, columns), NAN, dtype=dtype, device=device)
    by_slot[local] = draw(local.numel(), columns, dtype=dtype, generator=generator)
    weights = torch.rand((num_tokens, top_k), generator=generator, device=device)
    weights[0] = NAN  # the weight of a foreign slot has no say
    row_of_slot = torch.full((num_tokens * top_k,), -1, dtype=torch.int32, device=device)
    row_of_slot[local] = torch.arange(local.numel(), dtype=torch.int32, device=device)
    expected = reference.combine(by_slot.nan_to_num(0.0), weights.nan_to_num(0.0))

    out = torch.full((num_tokens, columns), NAN, dtype=dtype, device=device)
    rows.combine(by_slot[local], row_of_slot, weights, out)
    torch.testing.assert_close(out.float(), expected, **tolerance(dtype))
    assert not out[0].any()

    again = torch.full((num_tokens, columns), NAN, dtype=dtype, device=device)
    rows.combine(by_slot[local], row_of_slot, weights.T.contiguous().T, again)
    assert torch.equal(again, out)


def test_combine_from_float32(generator: torch.Generator) -> None:
    source = draw(4, 96, dtype=torch.float32, generator=generator)
    weights = torch.rand((2, 2), generator=generator, device=source.device)
    out = torch.empty((2, 96), dtype=torch.float16, device=source.device)
    rows.combine(source, torch.arange(4, dtype=torch.int32, device=source.device), weights, out)
    torch.testing.assert_close(out.float(), reference.combine(source, weights), **tolerance(torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [3, 1056, 2880])
def test_cast(columns: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    source = draw(3, columns, dtype=torch.float32, generator=generator)
    out = torch.full((3, columns + 5), NAN, dtype=dtype, device=source.device)
    rows.cast_rows(source, out[:, :columns])
    torch.testing.assert_close(out[:, :columns].float(), source, **tolerance(dtype))
    assert out[:, columns:].isnan().all()


@pytest.mark.parametrize("num_elements", [1, 4096, 5000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero(num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
    out = torch.full((num_elements + 3,), NAN, dtype=dtype, device=device)
    rows.zero_fill(out[:num_elements])
    assert not out[:num_elements].any()
    assert out[num_elements:].isnan().all()


def test_no_tokens(device: torch.device) -> None:
    empty = torch.empty((0, 64), device=device)
    ints = torch.empty((0,), dtype=torch.int32, device=device)
    weights = torch.empty((0, 8), device=device)
    rows.permute_rows(empty, ints, expert_rows(0, device), 8, empty, num_programs=2)
    rows.swiglu(torch.empty((0, 128), device=device), expert_rows(0, device), empty, num_programs=2)
    rows.combine(empty, ints, weights, empty)
    rows.cast_rows(empty, empty)
    rows.zero_fill(empty)


@pytest.mark.parametrize("columns", [1, 31, 80, 192, 704, 1856, 2688, 2816, 2880, 4096, 5120, 7168, 16384])
def test_column_blocks(columns: int) -> None:
    block = rows.column_block(columns)
    assert block & (block - 1) == 0
    assert 32 <= block <= 2048
    padded = -(-columns // block) * block
    assert padded <= 1.15 * columns or block == 1024 or (block < 1024 and padded < 2 * max(columns, 32))
