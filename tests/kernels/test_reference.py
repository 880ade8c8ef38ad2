"""The references against the plainest loop over tokens and slots."""

from __future__ import annotations

import pytest
import torch

from fitune.kernels import reference


@pytest.fixture
def layer(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """x, w13, w2, topk_weights, topk_ids of a layer with 3 local experts, ids 2 to 4 of 7, and -1 among the ids."""

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    ids = torch.stack([torch.randperm(7, generator=generator, device=generator.device)[:3] for _ in range(11)])
    ids[4] = torch.tensor([0, 1, 6], device=ids.device)
    ids[5, 1] = -1
    return draw(11, 24), draw(3, 20, 24), draw(3, 24, 10), draw(11, 3).abs(), ids


def naive_rows(layer: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden and expert results in slot order, one slot at a time, in float64."""
    x, w13, w2, _, ids = (tensor.double() for tensor in layer)
    hidden = x.new_zeros((ids.numel(), w2.shape[2]))
    result = x.new_zeros((ids.numel(), w2.shape[1]))
    for slot, expert in enumerate(ids.flatten().int().tolist()):
        if 2 <= expert < 5:
            gate, up = (w13[expert - 2] @ x[slot // ids.shape[1]]).chunk(2)
            hidden[slot] = gate / (1.0 + torch.exp(-gate)) * up
            result[slot] = w2[expert - 2] @ hidden[slot]
    return hidden.float(), result.float()


def test_gemms_and_layer(layer: tuple[torch.Tensor, ...]) -> None:
    x, w13, w2, weights, ids = layer
    hidden, result = naive_rows(layer)
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(reference.gemm1(x, w13, ids, 2), hidden, **close)
    torch.testing.assert_close(reference.gemm2(hidden, w2, ids, 2), result, **close)
    expected = (result.view(11, 3, -1) * weights[:, :, None]).sum(dim=1)
    torch.testing.assert_close(reference.combine(result, weights), expected)
    torch.testing.assert_close(reference.gemm2_finalized(hidden, w2, weights, ids, 2), expected, **close)
    got = reference.layer(x, w13, w2, weights, ids, 2)
    torch.testing.assert_close(got, expected, **close)
    assert not got[4].any()


def test_ranks_add_up_to_the_whole(layer: tuple[torch.Tensor, ...]) -> None:
    """Expert parallelism: the ranks' results sum to the layer with all experts."""
    x, w13, w2, weights, ids = layer
    whole = reference.layer(x, w13, w2, weights, ids, 2)
    parts = [reference.layer(x, w13[e : e + 1], w2[e : e + 1], weights, ids, 2 + e) for e in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), whole, rtol=1e-5, atol=1e-5)


def test_low_precision_inputs_are_upcast_first(layer: tuple[torch.Tensor, ...]) -> None:
    x, w13, w2, weights, ids = layer
    low = (x.bfloat16(), w13.bfloat16(), w2.bfloat16())
    got = reference.layer(*low, weights, ids, 2)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, reference.layer(*(t.float() for t in low), weights, ids, 2))


def test_no_tokens(layer: tuple[torch.Tensor, ...]) -> None:
    x, w13, w2, weights, ids = layer
    assert reference.layer(x[:0], w13, w2, weights[:0], ids[:0], 2).shape == (0, 24)


def test_precision_setting_comes_back() -> None:
    matmul = torch.backends.cuda.matmul
    former = matmul.fp32_precision
    with reference.full_float32():
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == former


def test_sorted_slots_by_hand(device: torch.device) -> None:
    ids = torch.tensor([[3, 1], [2, 3], [-1, 3], [0, 2]], device=device)
    got = reference.sort_slots(ids, 2, 2, 2)
    assert got.row_of_slot.tolist() == [2, -1, 0, 3, -1, 4, -1, 1]
    assert got.slot_of_row.tolist() == [2, 7, 0, 3, 5]
    assert got.expert_rows.tolist() == [0, 2, 5]
    assert got.expert_tiles.tolist() == [0, 1, 3]
    assert got.tile_expert.tolist() == [0, 1, 1]
