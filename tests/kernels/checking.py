"""Launching with every address checked, for tests of whole layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fitune.kernels.launch import INTERPRETED, run


class OutOfBoundsError(Exception):
    """A load, store or atomic outside the tensors of the launch."""


class CheckedLauncher:
    """Runs kernels, keeps each launch's name and constants, and checks addresses where kernels are interpreted."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        name = kernel.fn.__name__
        self.launches.append((name, dict(meta)))
        assert min(grid) > 0, f"{name}: empty grid"
        if INTERPRETED:
            tensors = [getattr(arg, "base", arg) for arg in args]
            with addresses_checked(name, [addresses_of(each) for each in tensors if isinstance(each, torch.Tensor)]):
                run(kernel, grid, args, meta)
        else:
            run(kernel, grid, args, meta)

    def loads(self) -> list[tuple[bool, bool]]:
        """(activations by TMA, weights by TMA) of each grouped GEMM."""
        return [(meta["A_TMA"], meta["W_TMA"]) for name, meta in self.launches if name == "grouped_gemm_kernel"]


def addresses_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor and the one behind its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextmanager
def addresses_checked(kernel: str, allowed: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Wrap the interpreter's memory operations: each must stay inside one of the allowed ranges."""
    from triton.runtime.interpreter import InterpreterBuilder

    def wrapped(operation: Callable[..., Any], pointers: int, mask: int) -> Callable[..., Any]:
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            at = args[pointers].data
            at = at[np.broadcast_to(args[mask].data, at.shape)]
            if at.size:
                low, high = int(at.min()), int(at.max())
                if not any(first <= low and high < end for first, end in allowed):
                    raise OutOfBoundsError(f"{kernel}: {low:#x} to {high:#x} lies in none of its tensors")
            return operation(self, *args, **kwargs)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for name, pointers, mask in (("masked_load", 0, 1), ("masked_store", 0, 2), ("atomic_rmw", 1, 3)):
            operation = getattr(InterpreterBuilder, f"create_{name}")
            patch.setattr(InterpreterBuilder, f"create_{name}", wrapped(operation, pointers, mask))
        yield
