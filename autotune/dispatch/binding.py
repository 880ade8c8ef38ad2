"""Checks of the tensors of a call: cheap where they are right, one clear line where they are not."""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import Tensor

from fitune.dispatch.scales import NO_SCALES, SCALE_NAMES, ScaleTensors, Wanted, dtype_name, wanted_scales
from fitune.errors import DispatchError
from fitune.kernels.layer import IO_DTYPES, weight_dtype
from fitune.kernels.quantize import FP8_DTYPES
from fitune.problem import LayerShape

ID_DTYPES: Final = (torch.int32, torch.int64)
_MOST_WEIGHTS: Final = 4096


Held = tuple[tuple[weakref.ref[Tensor], int] | None, ...]
"""The scales that passed beside some weights, weakly, and their data pointers."""


class Binding:
    """What the tensors of one layer's calls must look like.

    Weights that passed are remembered with their scales by identity (weakly) and data pointer, so that a call checks
    only tensors it has not seen: a model may use one dispatcher for the weights of many layers. `fp8` is the e4m3 form
    that the device multiplies.
    """

    def __init__(
        self,
        shape: LayerShape,
        local_experts: int,
        device: torch.device,
        fp8: torch.dtype = torch.float8_e4m3fn,
    ) -> None:
        self.dtype: Final = IO_DTYPES[shape.dtype]
        self.weight_dtype: Final = weight_dtype(shape.dtype, fp8)
        self.scales: Final = wanted_scales(shape.scales, local_experts, shape.intermediate_size, shape.hidden_size)
        self.device: Final = device
        self.hidden_size: Final = shape.hidden_size
        self.top_k: Final = shape.top_k
        self.w13_shape: Final = (local_experts, 2 * shape.intermediate_size, shape.hidden_size)
        self.w2_shape: Final = (local_experts, shape.hidden_size, shape.intermediate_size)
        self._layer_dtype: Final = shape.dtype
        self._passed: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], int, int, Held]] = {}

    def check(
        self,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        scales: ScaleTensors = NO_SCALES,
    ) -> int:
        """The number of tokens of a call whose tensors are right. Raises DispatchError."""
        try:
            device = self.device
            num_tokens, hidden_size = x.shape
            routed = (num_tokens, self.top_k)
            right = (
                hidden_size == self.hidden_size
                and topk_ids.shape == routed
                and topk_weights.shape == routed
                and x.dtype is self.dtype
                and topk_weights.dtype is torch.float32
                and topk_ids.dtype in ID_DTYPES
                and x.device == device
                and topk_ids.device == device
                and topk_weights.device == device
                and not (x.requires_grad and torch.is_grad_enabled())
            )
            seen = self._passed.get(id(w13))
            known = (
                seen is not None
                and seen[0]() is w13
                and seen[1]() is w2
                and seen[2] == w13.data_ptr()
                and seen[3] == w2.data_ptr()
                and (not seen[4] if scales is NO_SCALES else _are_held(seen[4], scales))
            )
        except (AttributeError, TypeError, ValueError):
            right = known = False
        if not right:
            self._check_call(x, topk_weights, topk_ids)
        if not known:
            self._check_weights(w13, w2, scales)
        return num_tokens

    def check_out(self, out: Tensor, x: Tensor) -> None:
        """`out` must be like x and not be x, its columns contiguous, its row stride free. Raises DispatchError."""
        self._check("out", out, tuple(x.shape), "num_tokens, hidden_size", (self.dtype,))
        if self.hidden_size > 1 and out.stride(1) != 1:
            raise DispatchError(f"out: its column stride is {out.stride(1)}; it must be 1: give a contiguous tensor")
        if out.shape[0] > 1 and abs(out.stride(0)) < self.hidden_size:
            raise DispatchError(f"out: its row stride is {out.stride(0)}, so rows overlap; give a contiguous tensor")
        if out.data_ptr() == x.data_ptr() and x.numel():
            raise DispatchError("out: it shares memory with x, which is read while out is written; give another tensor")

    def _check_weights(self, w13: Tensor, w2: Tensor, scales: ScaleTensors) -> None:
        for name, tensor, shape, axes in (
            ("w13", w13, self.w13_shape, "local_experts, 2 * intermediate_size, hidden_size"),
            ("w2", w2, self.w2_shape, "local_experts, hidden_size, intermediate_size"),
        ):
            hint = "quantise it, and give its scales" if self.scales else "convert it"
            if self.scales and isinstance(tensor, Tensor) and tensor.dtype in FP8_DTYPES:
                hint = "this chip multiplies no other form, quantise it to that one"
            self._check(name, tensor, shape, axes, (self.weight_dtype,), hint)
        for name, scale in zip(SCALE_NAMES, scales, strict=True):
            self._check_scale(name, scale, self.scales.get(name))
        if len(self._passed) >= _MOST_WEIGHTS:
            self._passed.clear()
        held = tuple(None if scale is None else (weakref.ref(scale), scale.data_ptr()) for scale in scales)
        self._passed[id(w13)] = (
            weakref.ref(w13), weakref.ref(w2), w13.data_ptr(), w2.data_ptr(), held if self.scales else ()
        )  # fmt: skip

    def _check_scale(self, name: str, scale: Tensor | None, wanted: Wanted | None) -> None:
        if wanted is None:
            if scale is not None:
                why = "take the scales of rows from the rows" if self.scales else "have no scales"
                raise DispatchError(f"{name}: it is given, and {self._layer_dtype} layers {why}; leave it out")
            return
        shape, axes = wanted
        if scale is None:
            raise DispatchError(
                f"{name}: it is missing, and {self._layer_dtype} layers need it: pass float32 {list(shape)} ({axes})"
            )
        if isinstance(scale, Tensor) and tuple(scale.shape) != shape:
            raise DispatchError(
                f"{name}: shape is {list(scale.shape)}; in this {self._layer_dtype} layer it must be {list(shape)} "
                f"({axes}): pass the scales of these weights in that shape"
            )
        self._check(name, scale, shape, axes, (torch.float32,))

    def _check_call(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        num_tokens = int(x.shape[0]) if isinstance(x, Tensor) and x.dim() == 2 else None
        self._check("x", x, (num_tokens, self.hidden_size), "num_tokens, hidden_size", (self.dtype,))
        self._check("topk_ids", topk_ids, (num_tokens, self.top_k), "num_tokens, top_k", ID_DTYPES)
        self._check("topk_weights", topk_weights, (num_tokens, self.top_k), "num_tokens, top_k", (torch.float32,))
        if x.requires_grad and torch.is_grad_enabled():
            raise DispatchError("x: it requires a gradient, which this layer has not; call it under torch.no_grad()")

    def _check(
        self,
        name: str,
        tensor: object,
        shape: tuple[int | None, ...],
        axes: str,
        dtypes: tuple[torch.dtype, ...],
        hint: str = "convert it",
    ) -> None:
        if not isinstance(tensor, Tensor):
            raise DispatchError(f"{name}: it is a {type(tensor).__name__}; give a torch tensor")
        if tuple(tensor.shape) != shape:
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise DispatchError(
                f"{name}: shape is {list(tensor.shape)}; it must be [{wanted}] ({axes}): "
                "pass the tensor of this layer, or make a dispatcher for that one"
            )
        if tensor.dtype not in dtypes:
            wanted = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise DispatchError(f"{name}: dtype is {dtype_name(tensor.dtype)}; it must be {wanted}: {hint}")
        if tensor.device != self.device:
            raise DispatchError(f"{name}: it is on {tensor.device}; this layer runs on {self.device}: move it there")


def _are_held(held: Held, scales: ScaleTensors) -> bool:
    """Whether these are the very scales that passed."""
    if not held:
        return False
    for one, scale in zip(held, scales, strict=True):
        if one is None or scale is None:
            if one is not None or scale is not None:
                return False
        elif one[0]() is not scale or one[1] != scale.data_ptr():
            return False
    return True
