"""Routers against their references, and what a router owes for any logits: distinct ids, ties to the lowest."""

from __future__ import annotations

import pytest
import torch

from fitune.errors import ShapeError
from fitune.kernels import reference, router

Pair = tuple[torch.Tensor, torch.Tensor]
SIZES = [(1, 8, 2), (37, 160, 8), (5, 384, 8), (9, 512, 22), (3, 1, 1), (70, 16, 1), (6, 128, 4), (4, 60, 6)]


def draw_logits(num_tokens: int, num_experts: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    size = (num_tokens, num_experts)
    return (3.0 * torch.randn(size, generator=generator, device=generator.device)).to(dtype)


def check(got: Pair, expected: Pair) -> None:
    assert got[0].dtype is torch.float32
    assert got[1].dtype is torch.int32
    assert torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[0], expected[0], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_softmax(
    num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, renormalize: bool, generator: torch.Generator
) -> None:
    logits = draw_logits(num_tokens, num_experts, dtype, generator)
    got = router.softmax_topk(logits, top_k, renormalize)
    check(got, reference.softmax_topk(logits, top_k, renormalize))
    if renormalize:
        torch.testing.assert_close(got[0].sum(dim=1), torch.ones_like(got[0][:, 0]))


def test_softmax_over_the_chosen(generator: torch.Generator) -> None:
    logits = draw_logits(20, 128, torch.bfloat16, generator)
    check(router.softmax_over_topk(logits, 4), reference.softmax_over_topk(logits, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups", "scale"),
    [
        (256, 8, 8, 4, 2.5),
        (160, 6, 8, 3, 16.0),
        (384, 8, 1, 1, 2.827),
        (512, 22, 1, 1, 5.0),
        (60, 4, 6, 2, 1.0),
        (12, 3, 12, 5, 1.0),
        (64, 8, 4, 4, 1.0),
    ],
)
def test_grouped(
    num_experts: int,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    scale: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    logits = draw_logits(21, num_experts, dtype, generator)
    bias = 0.3 * torch.randn(num_experts, generator=generator, device=generator.device)
    for given in (bias, None):
        options = (num_groups, topk_groups, top_k, scale)
        check(
            router.sigmoid_grouped_topk(logits, given, *options),
            reference.grouped_topk(logits, given, *options),
        )


def test_bias_chooses_but_does_not_weigh(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], device=device)
    weights, ids = router.sigmoid_grouped_topk(logits, bias, 1, 1, 2, renormalize=False)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, torch.sigmoid(logits[:, [3, 0]]))


def test_groups_count_their_two_best(device: torch.device) -> None:
    """Group 0 has the single best expert, group 1 the best two: group 1 stays."""
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.8, 0.7, 0.1]], device=device)
    _, ids = router.sigmoid_grouped_topk(torch.logit(scores), None, 2, 1, 2)
    assert ids.tolist() == [[3, 4]]


@pytest.mark.parametrize("score", router.SCORES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_scores(score: str, renormalize: bool, generator: torch.Generator) -> None:
    logits = draw_logits(10, 256, torch.float32, generator)
    bias = torch.rand(256, generator=generator, device=generator.device)
    got = router.sigmoid_grouped_topk(logits, bias, 1, 1, 6, 1.5, renormalize, score=score)
    check(got, reference.grouped_topk(logits, bias, 1, 1, 6, 1.5, renormalize, score))


def test_sigmoid_of_the_best_alone(device: torch.device) -> None:
    """Llama-4. Logits whose sigmoids are both 1.0 in float32 are still told apart."""
    logits = torch.tensor([[0.0, 30.0, 40.0, -2.0], [-3.0, -1.0, -2.0, -9.0]], device=device)
    weights, ids = router.sigmoid_grouped_topk(logits, None, 1, 1, 1, renormalize=False)
    assert ids.tolist() == [[2], [1]]
    torch.testing.assert_close(weights, torch.sigmoid(torch.tensor([[40.0], [-1.0]], device=device)))


def test_equal_logits_go_to_the_lowest_ids(device: torch.device) -> None:
    logits = torch.zeros((3, 40), device=device)
    logits[1, 17] = logits[1, 30] = 1.0
    logits[2, 0] = -0.0  # equal to 0.0, so still the first
    expected = [list(range(5)), [17, 30, 0, 1, 2], list(range(5))]
    assert router.softmax_topk(logits, 5, True)[1].tolist() == expected
    bias = torch.zeros(40, device=device)
    assert router.sigmoid_grouped_topk(logits, bias, 1, 1, 5)[1].tolist() == expected
    assert router.sigmoid_grouped_topk(logits[:1], bias, 8, 2, 5)[1].tolist() == expected[:1]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_ids_are_distinct_whatever_the_logits(device: torch.device) -> None:
    logits = torch.full((3, 20), -torch.inf, device=device)
    logits[1] = torch.nan
    logits[2, 7] = 1.0
    for _, ids in (router.softmax_topk(logits, 6, True), router.sigmoid_grouped_topk(logits, None, 4, 2, 6)):
        assert all(len(set(row)) == 6 and set(row) <= set(range(20)) for row in ids.tolist())
    assert router.softmax_topk(logits, 6, True)[1][2].tolist() == [7, 0, 1, 2, 3, 4]


def test_logits_of_any_strides(generator: torch.Generator) -> None:
    wide = draw_logits(30, 96, torch.float32, generator)
    for logits in (wide[::2, ::3], wide.T.contiguous().T[:, :32], wide[:, 64:]):
        check(router.softmax_topk(logits, 4, False), reference.softmax_topk(logits, 4, False))
        check(router.sigmoid_grouped_topk(logits, None, 4, 2, 4), reference.grouped_topk(logits, None, 4, 2, 4))


def test_no_tokens(device: torch.device) -> None:
    logits = torch.empty((0, 64), device=device)
    for weights, ids in (router.softmax_topk(logits, 8, True), router.sigmoid_grouped_topk(logits, None, 8, 4, 8)):
        assert weights.shape == ids.shape == (0, 8)


@pytest.mark.parametrize(
    ("num_groups", "topk_groups", "top_k", "score", "says"),
    [
        (3, 1, 2, "sigmoid", "64 experts do not split into 3 groups"),
        (8, 9, 2, "sigmoid", "topk_groups is 9"),
        (8, 2, 17, "sigmoid", "top_k is 17"),
        (1, 1, 65, "sigmoid", "top_k is 65"),
        (1, 1, 0, "sigmoid", "top_k is 0"),
        (1, 1, 1, "tanh", "'tanh' is not known"),
    ],
)
def test_impossible_sizes(
    num_groups: int, topk_groups: int, top_k: int, score: str, says: str, device: torch.device
) -> None:
    logits = torch.zeros((2, 64), device=device)
    with pytest.raises(ShapeError, match=says):
        router.sigmoid_grouped_topk(logits, None, num_groups, topk_groups, top_k, score=score)
    if num_groups == 1 and score == "sigmoid":
        with pytest.raises(ShapeError, match=says):
            router.softmax_topk(logits, top_k, True)
