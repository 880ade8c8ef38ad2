"""Routers: from logits [N, E] to the weights and ids of each token's experts.

Experts are chosen one after another by the largest key; among equal keys the lowest id goes first, so the result is
the same in every run, and a token's ids are distinct whatever the logits (NaN counts as the lowest value).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from fitune.errors import ShapeError
from fitune.kernels.launch import Launcher, run

SCORES: Final = ("sigmoid", "sqrt_softplus")

_NUM_WARPS: Final = 4
_ELEMENTS_PER_PROGRAM: Final = 2048


@triton.jit
def _ordered(values):
    """int32 keys in the order of float32 `values`; NaN as -inf, -0.0 as 0.0. All are above the least int32."""
    values = tl.where(values == values, values, float("-inf"))
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _values_of(keys):
    """The float32 values of `_ordered` keys."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_largest(keys, cols, AXIS: tl.constexpr):
    """Largest key along AXIS and the lowest column that has it."""
    best = tl.max(keys, axis=AXIS, keep_dims=True)
    return best, tl.min(tl.where(keys == best, cols, 0x7FFFFFFF), axis=AXIS, keep_dims=True)


@triton.jit
def _choose(keys, cols, TOP_K: tl.constexpr, K_PAD: tl.constexpr):
    """Columns of the TOP_K largest keys of each row, largest first: int32 [ROWS, K_PAD]."""
    places = tl.arange(0, K_PAD)[None, :]
    chosen = tl.zeros((keys.shape[0], K_PAD), tl.int32)
    for k in range(TOP_K):
        _, col = _first_largest(keys, cols, 1)
        chosen = tl.where(places == k, col, chosen)
        keys = tl.where(cols == col, -0x80000000, keys)
    return chosen


@triton.jit
def _keep_best_groups(keys, cols, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE: tl.constexpr, TOPK_GROUPS):
    """Keys of experts outside the TOPK_GROUPS best groups become the least int32.

    keys [ROWS, GROUPS_PAD * padded group size]; a group scores the sum of its two largest values.
    """
    rows: tl.constexpr = keys.shape[0]
    size_pad: tl.constexpr = keys.shape[1] // GROUPS_PAD
    grouped = tl.reshape(keys, (rows, GROUPS_PAD, size_pad))
    members = tl.arange(0, size_pad)[None, None, :]
    best, member = _first_largest(grouped, members, 2)
    score = _values_of(best)
    if SIZE > 1:
        rest = tl.where(members == member, -0x80000000, grouped)
        score += _values_of(tl.max(rest, axis=2, keep_dims=True))
    groups = tl.arange(0, GROUPS_PAD)[None, :, None]
    group_keys = tl.where(groups < GROUPS, _ordered(score), -0x80000000)
    kept = tl.zeros((rows, GROUPS_PAD, 1), tl.int32)
    for _ in range(TOPK_GROUPS):
        _, group = _first_largest(group_keys, groups, 1)
        kept = tl.where(groups == group, 1, kept)
        group_keys = tl.where(groups == group, -0x80000000, group_keys)
    return tl.reshape(tl.where(kept > 0, grouped, -0x80000000), (rows, GROUPS_PAD * size_pad))


@triton.jit
def _score(values, SCORE: tl.constexpr):
    """A router's score of float32 logits."""
    if SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-values))
    # softplus in the form that neither overflows nor loses small results
    return tl.sqrt(tl.maximum(values, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(values))))


@triton.jit(do_not_specialize=["num_tokens", "stride_n"], do_not_specialize_on_alignment=["Logits", "Weights", "Ids"])
def softmax_kernel(
    Logits,
    Weights,
    Ids,
    stride_n,
    stride_e,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Softmax over all experts and the top-k of it; RENORMALIZE: the chosen weights sum to 1. ROWS tokens a program."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    base = tokens.to(tl.int64) * stride_n
    cols = tl.arange(0, EXPERTS_PAD)[None, :]
    is_expert = (cols < NUM_EXPERTS) & (tokens < num_tokens)
    values = tl.load(Logits + base + cols * stride_e, mask=is_expert, other=0.0).to(tl.float32)
    keys = tl.where(cols < NUM_EXPERTS, _ordered(values), -0x80000000)
    chosen = _choose(keys, cols, TOP_K, K_PAD)

    places = tl.arange(0, K_PAD)[None, :]
    mask = (places < TOP_K) & (tokens < num_tokens)
    picked = tl.load(Logits + base + chosen * stride_e, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(cols < NUM_EXPERTS, values, float("-inf")), axis=1, keep_dims=True)
    weights = tl.where(places < TOP_K, tl.exp(picked - largest), 0.0)
    if RENORMALIZE:
        total = tl.sum(weights, axis=1, keep_dims=True)
    else:
        total = tl.sum(tl.where(cols < NUM_EXPERTS, tl.exp(values - largest), 0.0), axis=1, keep_dims=True)
    offs = tokens.to(tl.int64) * TOP_K + places
    tl.store(Weights + offs, weights / total, mask=mask)
    tl.store(Ids + offs, chosen, mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens", "stride_n", "scale"],
    do_not_specialize_on_alignment=["Logits", "Bias", "Weights", "Ids"],
)
def grouped_kernel(
    Logits,
    Bias,
    Weights,
    Ids,
    stride_n,
    stride_e,
    num_tokens,
    scale,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_SIZE_PAD: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCORE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Score + bias, best groups, top-k; weights from the scores without bias. ROWS tokens a program."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    base = tokens.to(tl.int64) * stride_n
    cols = tl.arange(0, GROUPS_PAD * GROUP_SIZE_PAD)[None, :]
    group = cols // GROUP_SIZE_PAD
    member = cols % GROUP_SIZE_PAD
    is_expert = (group < GROUPS) & (member < GROUP_SIZE)
    experts = group * GROUP_SIZE + member
    is_loaded = is_expert & (tokens < num_tokens)
    values = tl.load(Logits + base + experts * stride_e, mask=is_loaded, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values = _score(values, SCORE) + tl.load(Bias + experts, mask=is_expert, other=0.0).to(tl.float32)
    elif GROUPS > 1:
        values = _score(values, SCORE)
    keys = tl.where(is_expert, _ordered(values), -0x80000000)
    if TOPK_GROUPS < GROUPS:
        keys = _keep_best_groups(keys, cols, GROUPS, GROUPS_PAD, GROUP_SIZE, TOPK_GROUPS)
    chosen = _choose(keys, cols, TOP_K, K_PAD)
    ids = chosen // GROUP_SIZE_PAD * GROUP_SIZE + chosen % GROUP_SIZE_PAD

    places = tl.arange(0, K_PAD)[None, :]
    mask = (places < TOP_K) & (tokens < num_tokens)
    picked = tl.load(Logits + base + ids * stride_e, mask=mask, other=0.0).to(tl.float32)
    weights = tl.where(places < TOP_K, _score(picked, SCORE), 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=1, keep_dims=True) + 1e-20)
    offs = tokens.to(tl.int64) * TOP_K + places
    tl.store(Weights + offs, weights * scale, mask=mask)
    tl.store(Ids + offs, ids, mask=mask)


def _outputs(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = (logits.shape[0], top_k)
    return (
        torch.empty(size, dtype=torch.float32, device=logits.device),
        torch.empty(size, dtype=torch.int32, device=logits.device),
    )


def _pad(number: int) -> int:
    return 1 << (number - 1).bit_length()


def softmax_topk(
    logits: torch.Tensor, top_k: int, renormalize: bool, *, launch: Launcher = run
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the `top_k` largest: (weights float32 [N, K], ids int32 [N, K]), largest first.

    logits [N, E] of any float dtype and strides. With `renormalize` the weights of a token sum to 1, which is the
    same as a softmax over the chosen logits alone. Raises ShapeError where `top_k` is not between 1 and E.
    """
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ShapeError(f"router: top_k is {top_k}; it must be between 1 and the number of experts, {num_experts}")
    weights, ids = _outputs(logits, top_k)
    if num_tokens == 0:
        return weights, ids
    experts_pad = _pad(num_experts)
    rows = max(1, min(16, _ELEMENTS_PER_PROGRAM // experts_pad))
    launch(
        softmax_kernel,
        (triton.cdiv(num_tokens, rows),),
        (logits, weights, ids, logits.stride(0), logits.stride(1), num_tokens),
        {
            "NUM_EXPERTS": num_experts,
            "EXPERTS_PAD": experts_pad,
            "TOP_K": top_k,
            "K_PAD": _pad(top_k),
            "RENORMALIZE": renormalize,
            "ROWS": rows,
            "num_warps": _NUM_WARPS,
        },
    )
    return weights, ids


def softmax_over_topk(logits: torch.Tensor, top_k: int, *, launch: Launcher = run) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest logits, then softmax over these alone (gpt-oss); as `softmax_topk` otherwise."""
    return softmax_topk(logits, top_k, True, launch=launch)


def sigmoid_grouped_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_groups: int,
    topk_groups: int,
    top_k: int,
    scale: float = 1.0,
    renormalize: bool = True,
    *,
    score: str = "sigmoid",
    launch: Launcher = run,
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's router and its relatives: (weights float32 [N, K], ids int32 [N, K]), best first.

    Each expert scores `sigmoid(logit)` (or the root of softplus), plus `bias` for the choice only. Groups of E /
    num_groups experts score the sum of their two best; the `topk_groups` best groups stay, and of their experts the
    `top_k` best. Weights are the scores without bias, divided by their sum if `renormalize`, times `scale`.

    One group (Kimi-K2): num_groups = topk_groups = 1. Llama-4: no bias, one group, top_k = 1, renormalize False.
    Without bias and groups the choice goes by the logits, which order experts as their scores do but never saturate.

    logits [N, E] of any float dtype and strides; bias [E] contiguous or None. Raises ShapeError for impossible sizes.
    """
    num_tokens, num_experts = logits.shape
    _check_groups(num_experts, num_groups, topk_groups, top_k, score)
    weights, ids = _outputs(logits, top_k)
    if num_tokens == 0:
        return weights, ids
    if topk_groups == num_groups:
        num_groups = topk_groups = 1
    group_size = num_experts // num_groups
    groups_pad, size_pad = _pad(num_groups), _pad(group_size)
    rows = max(1, min(16, _ELEMENTS_PER_PROGRAM // (groups_pad * size_pad)))
    launch(
        grouped_kernel,
        (triton.cdiv(num_tokens, rows),),
        (
            logits,
            logits if bias is None else bias,
            weights,
            ids,
            logits.stride(0),
            logits.stride(1),
            num_tokens,
            float(scale),
        ),
        {
            "GROUPS": num_groups,
            "GROUPS_PAD": groups_pad,
            "GROUP_SIZE": group_size,
            "GROUP_SIZE_PAD": size_pad,
            "TOPK_GROUPS": topk_groups,
            "TOP_K": top_k,
            "K_PAD": _pad(top_k),
            "HAS_BIAS": bias is not None,
            "RENORMALIZE": renormalize,
            "SCORE": score,
            "ROWS": rows,
            "num_warps": _NUM_WARPS,
        },
    )
    return weights, ids


def _check_groups(num_experts: int, num_groups: int, topk_groups: int, top_k: int, score: str) -> None:
    if score not in SCORES:
        raise ShapeError(f"router: score {score!r} is not known; use one of {', '.join(SCORES)}")
    if num_groups < 1 or num_experts % num_groups:
        raise ShapeError(f"router: {num_experts} experts do not split into {num_groups} groups; use a divisor")
    if not 1 <= topk_groups <= num_groups:
        raise ShapeError(f"router: topk_groups is {topk_groups}; it must be between 1 and num_groups, {num_groups}")
    choice = topk_groups * (num_experts // num_groups)
    if not 1 <= top_k <= choice:
        raise ShapeError(
            f"router: top_k is {top_k}; it must be between 1 and the {choice} experts of {topk_groups} groups"
        )
