"""The operators through which torch.compile and torch.export see a call: opaque, functional, of known result shape."""

from __future__ import annotations

import torch
from torch import Tensor

from fitune.dispatch.runtime import DEFAULT
from fitune.dispatch.scales import gathered


@torch.library.custom_op("fitune::dispatch", mutates_args=())
def dispatch_op(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    handle: int,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    """A call of the dispatcher with this handle, which lives in this process."""
    scales = gathered(w13_scale, w2_scale, x_scale, hidden_scale)
    return DEFAULT.live(handle).in_operator(x, w13, w2, topk_weights, topk_ids, scales)


@dispatch_op.register_fake
def _dispatch_fake(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    handle: int,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> Tensor:
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
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    """`fitune.fused_moe`; empty texts stand for None. All it needs is in its arguments, so it can be exported."""
    from fitune.dispatch.api import dispatcher_of

    scales = gathered(w13_scale, w2_scale, x_scale, hidden_scale)
    dispatcher = dispatcher_of(
        x,
        w13,
        topk_ids,
        scales,
        num_experts,
        local_expert_offset,
        store or None,
        dispatch,  # type: ignore[arg-type]
        routing or None,
        policy,  # type: ignore[arg-type]
        miss_log or None,
    )
    return dispatcher.in_operator(x, w13, w2, topk_weights, topk_ids, scales)


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
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape)
