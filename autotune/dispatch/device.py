"""The chip a dispatcher runs on."""

from __future__ import annotations

from typing import Final

import torch
import triton

from fitune.errors import DispatchError
from fitune.measure.device import device_target
from fitune.problem import LayerShape
from fitune.target import Target

# Where there is no GPU, kernels run under Triton's interpreter, which has no limits: these are a small GPU's.
INTERPRETER: Final = Target("cpu", "cpu", num_sms=4, shared_bytes=101_376, l2_bytes=32 << 20)


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The device meant, with its index. None is the current GPU, or the CPU where there is none."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DispatchError(f"device: {device!r} is not one torch knows; use 'cuda', 'cuda:0' or 'cpu'") from error
    if found.type not in ("cuda", "cpu"):
        raise DispatchError(f"device: {found} cannot run these kernels; use 'cuda', 'cuda:0' or 'cpu'")
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DispatchError(f"device: {found} was asked for and torch sees no GPU; check the driver, or use 'cpu'")
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise DispatchError(f"device: {found} was asked for and there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def target_of(device: torch.device) -> Target:
    """The target a resolved device stands for."""
    return INTERPRETER if device.type == "cpu" else device_target(str(device))


def check_dtype(shape: LayerShape, target: Target) -> None:
    """Raise DispatchError where a chip does not multiply what the layer is made of."""
    if shape.scales and not target.has_fp8:
        raise DispatchError(
            f"dtype: the layer is {shape.dtype}, and {target.device} ({target.arch}) does not multiply fp8; "
            "dequantise the weights to bf16 there"
        )


def check_can_run(device: torch.device) -> None:
    """Raise DispatchError where a launch cannot work: on the CPU without Triton's interpreter."""
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise DispatchError(
            "device: cpu runs these kernels only under Triton's interpreter; "
            "set TRITON_INTERPRET=1 before the first import, or pass device='cuda' on a machine with a GPU"
        )
