"""Settings that must stand before numpy or triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # device code runs on the CPU, line by line
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NO_COLOR", "1")

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own store."""
    monkeypatch.setenv("FITUNE_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the source tree."""
    return Path(__file__).resolve().parent.parent
