"""Kernels run on the GPU where there is one and TRITON_INTERPRET=0 is set, else in Triton's interpreter."""

import os
import sys
from pathlib import Path

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
