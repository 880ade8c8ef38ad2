"""`fitune.fused_moe`: a dispatcher for every layer that comes along, made at its first call."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fitune.dispatch.dispatcher import Dispatcher, Policy
from fitune.dispatch.ops import fused_moe_op
from fitune.dispatch.runtime import DEFAULT
from fitune.dispatch.scales import ScaleTensors, gathered, layer_dtype
from fitune.errors import DispatchError
from fitune.misses import MISS_LOG_NAME
from fitune.problem import Dispatch, LayerShape
from fitune.settings import data_directory


def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    num_experts: int,
    local_expert_offset: int = 0,
    store: Path | str | None = None,
    dispatch: Dispatch = "all_gather",
    routing: str | None = None,
    policy: Policy = "explain",
    miss_log: Path | str | None = None,
    out: Tensor | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
) -> Tensor:
    """One rank's part of an MoE layer, [N, H], with the tactics tuned for it.

    x [N, H]; w13 [L, 2I, H], gate rows first; w2 [L, H, I]; topk_weights [N, K] float32; topk_ids [N, K] int32 or
    int64 over all `num_experts` experts. The rank holds experts [local_expert_offset, local_expert_offset + L); slots
    of other experts, and -1, contribute nothing.

    fp8 layers: w13 and w2 in the e4m3 form of the chip, x and the result bf16, and scales, float32; their shapes tell
    the scheme. `fp8_block128`: w13_scale [L, 2 * ceil(I / 128), ceil(H / 128)], gate blocks first, w2_scale
    [L, ceil(H / 128), ceil(I / 128)]. `fp8_channel`: [L, 2I] and [L, H]. `fp8_tensor`: [L, 2] (gate, up) and [L, 1],
    with x_scale and hidden_scale [1, 1]; the other schemes take the scales of rows from the rows.

    store: a store or table file; None is the default store (see fitune.settings) where there is one. It is read at
    the first call that needs it and kept; `forget()` drops what is kept. miss_log: where misses are written; None is
    `misses.jsonl` in the store's folder, where `fitune search --misses` finds it. Other arguments are those of
    Dispatcher, which does the same with less work per call. Raises DispatchError and StoreError.
    """
    if torch.compiler.is_compiling():
        texts = (str(store or ""), str(dispatch), routing or "", str(policy), str(miss_log or ""))
        layer = (x, w13, w2, topk_weights, topk_ids, num_experts, local_expert_offset)
        result: Tensor = fused_moe_op(*layer, *texts, w13_scale, w2_scale, x_scale, hidden_scale)
        return result if out is None else out.copy_(result)
    scales = gathered(w13_scale, w2_scale, x_scale, hidden_scale)
    options = (num_experts, local_expert_offset, store, dispatch, routing, policy, miss_log)
    dispatcher = dispatcher_of(x, w13, topk_ids, scales, *options)
    return dispatcher(x, w13, w2, topk_weights, topk_ids, out, *scales)


def dispatcher_of(
    x: Tensor,
    w13: Tensor,
    topk_ids: Tensor,
    scales: ScaleTensors,
    num_experts: int,
    local_expert_offset: int,
    store: Path | str | None,
    dispatch: Dispatch,
    routing: str | None,
    policy: Policy,
    miss_log: Path | str | None,
) -> Dispatcher:
    """The kept dispatcher of such calls, made at the first of them. Raises DispatchError and StoreError."""
    options = (num_experts, local_expert_offset, store, dispatch, routing, policy, miss_log)
    try:
        key = (x.shape[1:], x.dtype, x.device, w13.shape, w13.dtype, topk_ids.shape[1:], options, *map(_shape, scales))
    except AttributeError as error:
        raise DispatchError("x, w13, topk_ids and scales must be torch tensors; give tensors") from error
    dispatcher = DEFAULT.dispatchers.get(key)
    if dispatcher is None:
        dispatcher = DEFAULT.dispatchers[key] = _make_dispatcher(x, w13, topk_ids, scales, *options)
    return dispatcher


def forget() -> None:
    """Drop the dispatchers and tables kept by `fused_moe`, so that a store tuned meanwhile is read anew."""
    DEFAULT.forget()


def _make_dispatcher(
    x: Tensor,
    w13: Tensor,
    topk_ids: Tensor,
    scales: ScaleTensors,
    num_experts: int,
    local_expert_offset: int,
    store: Path | str | None,
    dispatch: Dispatch,
    routing: str | None,
    policy: Policy,
    miss_log: Path | str | None,
) -> Dispatcher:
    for name, tensor, axes in (("x", x, 2), ("w13", w13, 3), ("topk_ids", topk_ids, 2)):
        if not isinstance(tensor, Tensor):
            raise DispatchError(f"{name}: it is a {type(tensor).__name__}; give a torch tensor")
        if tensor.dim() != axes:
            raise DispatchError(f"{name}: shape is {list(tensor.shape)}; it must have {axes} dimensions")
    if w13.shape[1] % 2:
        raise DispatchError(f"w13: {w13.shape[1]} rows; it must be 2 * intermediate_size, gate rows then up rows")
    dtype = layer_dtype(x, w13, scales)
    shape = LayerShape(x.shape[1], w13.shape[1] // 2, num_experts, topk_ids.shape[1], dtype)
    path = data_directory() if store is None else Path(store)
    absent = "" if store is not None or _has_files(path) else f"table: no store at {path}; make one with fitune search"
    return Dispatcher(
        None if absent else DEFAULT.table(path),
        shape,
        w13.shape[0],
        local_expert_offset=local_expert_offset,
        dispatch=dispatch,
        routing=routing,
        device=x.device,
        policy=policy,
        miss_log=path / MISS_LOG_NAME if miss_log is None and path.is_dir() else miss_log,
        absent=absent,
    )


def _has_files(path: Path) -> bool:
    """Whether something but a miss log is at a path."""
    return path.is_file() or (path.is_dir() and any(entry.name != MISS_LOG_NAME for entry in path.iterdir()))


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape
