"""The scales of fp8 layers: which tensors a call must bring, and the layer's dtype as weights and scales tell it."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from fitune.errors import DispatchError
from fitune.kernels.layer import IO_DTYPES
from fitune.kernels.quantize import FP8_DTYPES
from fitune.problem import DTYPES, SCALES, DType, Scales, weight_scale_shapes

ScaleTensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""w13_scale, w2_scale, x_scale, hidden_scale of a call."""
Wanted = tuple[tuple[int, ...], str]
"""A scale's shape, and what its axes are."""

SCALE_NAMES: Final = ("w13_scale", "w2_scale", "x_scale", "hidden_scale")
NO_SCALES: Final[ScaleTensors] = (None, None, None, None)


def dtype_name(dtype: torch.dtype) -> str:
    """`bf16` for torch.bfloat16; the torch name for one that no layer has its rows in."""
    return next((name for name, known in IO_DTYPES.items() if known is dtype), str(dtype).removeprefix("torch."))


def gathered(
    w13_scale: Tensor | None, w2_scale: Tensor | None, x_scale: Tensor | None, hidden_scale: Tensor | None
) -> ScaleTensors:
    """The four as one; `NO_SCALES` itself where none is given."""
    if w13_scale is None and w2_scale is None and x_scale is None and hidden_scale is None:
        return NO_SCALES
    return w13_scale, w2_scale, x_scale, hidden_scale


def wanted_scales(scales: Scales, local_experts: int, intermediate_size: int, hidden_size: int) -> dict[str, Wanted]:
    """By name, the scales that a layer's calls must bring, as LayerArgs describes them; all float32."""
    axes = {
        "block": (
            "local_experts, gate blocks then up blocks of 128 rows, blocks of 128 columns",
            "local_experts, blocks of 128 rows, blocks of 128 columns",
        ),
        "channel": ("local_experts, 2 * intermediate_size", "local_experts, hidden_size"),
        "tensor": ("local_experts, gate and up", "local_experts, 1"),
        "": (),
    }[scales]
    shapes = weight_scale_shapes(scales, hidden_size, intermediate_size)
    wanted = {
        name: ((local_experts, *shape), words) for name, shape, words in zip(SCALE_NAMES, shapes, axes, strict=False)
    }
    if scales == "tensor":
        wanted |= {"x_scale": ((1, 1), "one for all of x"), "hidden_scale": ((1, 1), "one for all hidden rows")}
    return wanted


def layer_dtype(x: Tensor, w13: Tensor, scales: ScaleTensors) -> DType:
    """The dtype of the layer that x [N, H], w13 [L, 2I, H] and scales belong to.

    Without fp8 weights that is x's; with them the shapes of w13_scale and w2_scale tell the scheme. Raises
    DispatchError where they do not belong together, or not to one scheme alone.
    """
    given = [name for name, tensor in zip(SCALE_NAMES, scales, strict=True) if tensor is not None]
    if w13.dtype not in FP8_DTYPES:
        if given:
            raise DispatchError(
                f"{given[0]}: it is given, and w13 is {dtype_name(w13.dtype)}; scales belong to weights in "
                "float8_e4m3fn: quantise the weights, or leave the scales out"
            )
        plain = [name for name in DTYPES if name not in SCALES]
        found = next((name for name in plain if name == dtype_name(x.dtype)), None)
        if found is None:
            raise DispatchError(f"x: dtype is {dtype_name(x.dtype)}; it must be one of {', '.join(plain)}: convert it")
        return found
    shapes = []
    for name, tensor in zip(SCALE_NAMES[:2], scales, strict=False):
        if not isinstance(tensor, Tensor):
            what = "missing" if tensor is None else f"a {type(tensor).__name__}"
            raise DispatchError(
                f"{name}: it is {what}, and w13 is {dtype_name(w13.dtype)}; give float32 tensors w13_scale and w2_scale"
            )
        shapes.append(tuple(tensor.shape))
    return _scheme(shapes, w13.shape[0], w13.shape[1] // 2, x.shape[1])


def _scheme(shapes: list[tuple[int, ...]], local_experts: int, intermediate_size: int, hidden_size: int) -> DType:
    """The one dtype whose weight scales have these shapes (w13_scale, w2_scale). Raises DispatchError."""
    offers: dict[DType, list[tuple[int, ...]]] = {}
    for dtype, scales in SCALES.items():
        wanted = wanted_scales(scales, local_experts, intermediate_size, hidden_size)
        offers[dtype] = [wanted[name][0] for name in SCALE_NAMES[:2]]  # type: ignore[index]
    fitting = [dtype for dtype, offer in offers.items() if offer == shapes]
    if len(fitting) == 1:
        return fitting[0]
    had = " and ".join(str(list(shape)) for shape in shapes)
    if fitting:
        raise DispatchError(
            f"w13_scale, w2_scale: shapes {had} fit {' and '.join(fitting)}; "
            "make a fitune.Dispatcher for this layer, which is told the dtype"
        )
    texts = (f"{dtype}: {' and '.join(str(list(shape)) for shape in offer)}" for dtype, offer in offers.items())
    raise DispatchError(
        f"w13_scale, w2_scale: shapes are {had}; with these weights they must be those of one scheme, "
        f"{'; '.join(texts)}"
    )
