"""Packages with families, as an installer would leave them on the import path."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fitune.families import families

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(distribution, entry points, modules)` puts a distribution on sys.path; all is forgotten afterwards."""
    before = set(sys.modules)

    def put(distribution: str, points: dict[str, str], modules: dict[str, str] | None = None) -> Path:
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"  # else Python takes "fitune" for its name
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[fitune.families]", *lines, ""]))
        for name, text in (modules or {}).items():
            (site / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(site)
        families.cache_clear()
        return site

    yield put
    monkeypatch.undo()
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    families.cache_clear()


@pytest.fixture
def naive(install: Install) -> Path:
    """The example plugin, installed; the folder it lies in."""
    site = install("fitune-naive", {"naive": "fitune_naive:FAMILY"})
    shutil.copytree(Path(__file__).parent / "plugin" / "fitune_naive", site / "fitune_naive")
    families.cache_clear()
    return site
