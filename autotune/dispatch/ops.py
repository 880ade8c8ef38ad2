"""The operators through which torch.compile and torch.export see a call: opaque, functional, of known result shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fitune.dispatch.runtime import DEFAULT


@torch.library.custom_op("fitune::dispatch", mutates_args=())
def dispatch_op(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, handle: int) -> Tensor:
    """A call of the dispatcher with this handle, which lives in this process."""
    return DEFAULT.live(handle).in_operator(x, w13, w2, topk_weights, topk_ids)


@dispatch_op.register_fake
def _dispatch_fake(x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, handle: int) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fitune::fused_moe", mutates_args=())
def fused_moe_op(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    local_expert_offset: int,
    store: str,
    dispatch: str,
    routing: str,
    policy: str,
    miss_log: str,
) -> Tensor:
    """`fitune.fused_moe`; empty texts stand for None. All it needs is in its arguments, so it can be exported."""
    from fitune.dispatch.api import dispatcher_of

    dispatcher = dispatcher_of(
        x,
        w13,
        topk_ids,
        num_experts,
        local_expert_offset,
        store or None,
        dispatch,  # type: ignore[arg-type]
        routing or None,
        policy,  # type: ignore[arg-type]
        miss_log or None,
    )
    return dispatcher.in_operator(x, w13, w2, topk_weights, topk_ids)


@fused_moe_op.register_fake
def _fused_moe_fake(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    local_expert_offset: int,
    store: str,
    dispatch: str,
    routing: str,
    policy: str,
    miss_log: str,
) -> Tensor:
    return x.new_empty(x.shape)
