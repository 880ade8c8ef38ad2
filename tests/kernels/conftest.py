"""Kernels run on the GPU where there is one and TRITON_INTERPRET=0 is set, else in Triton's interpreter."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for checking.py, which several test modules share


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of kernel tests live."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return torch.device("cpu" if interpreted or not torch.cuda.is_available() else "cuda")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """A generator with a fixed seed on the tests' device."""
    return torch.Generator(device).manual_seed(20)


@pytest.fixture(scope="session", autouse=True)
def _patched_once() -> Iterator[None]:
    """The interpreter replaces the functions of triton.language at every call of a device function.

    Once a launch will do, and saves a fifth of the time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang

    @cache
    def modules(fn: Callable[..., object]) -> list[Any]:
        return [each for each in fn.__globals__.values() if each is language or each is language.core]

    def once(fn: Callable[..., object]) -> object:
        if any(language.core.is_builtin(module.load) for module in modules(fn)):
            return patch_lang(fn)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once)
        yield
