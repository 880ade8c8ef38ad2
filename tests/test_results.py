"""The committed results page is what its script makes of the committed measurements, and its floor is the peers'."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fitune.problem import LayerShape

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHAPE = LayerShape(7168, 2048, 256, 8)


@pytest.fixture(scope="module")
def data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_data", ROOT / "scripts" / "results_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_data"] = module
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_made_anew_without_torch(tmp_path: Path) -> None:
    barred = tmp_path / "barred"
    barred.mkdir()
    for name in ("torch", "triton"):
        (barred / f"{name}.py").write_text(f"raise ImportError('{name} was imported')\n")
    environment = {**os.environ, "PYTHONPATH": str(barred)}
    command = [sys.executable, str(ROOT / "scripts" / "make_results.py"), "--out", str(tmp_path)]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    for page in ("results.md", "kernels.md"):
        fresh, committed = ((folder / page).read_text(encoding="utf-8") for folder in (tmp_path, DOCS))
        assert fresh == committed, f"docs/{page} is out of date: run python scripts/make_results.py"
    pictures = {path.name for path in (tmp_path / "images").iterdir()}
    assert {"layer-times.svg", "layer-times.png", "peer-ratio.svg", "peer-ratio.png"} <= pictures
    assert all(path.stat().st_size > 10_000 for path in (tmp_path / "images").iterdir())


def test_our_floor_is_the_one_of_the_peers_table(data: ModuleType) -> None:
    """Given the peers' loads, the formula gives the floors in their table, which were not made by it."""
    peers = data.read_peers(DOCS / "data" / "peers_h200_bf16.csv")
    assert len(peers) == 45
    for (_, tokens), peer in peers.items():
        assert data.floor_us(SHAPE, tokens, peer.load) == pytest.approx(peer.floor_us, rel=2e-3, abs=0.1)


def test_interpolation_follows_the_points(data: ModuleType) -> None:
    points = [(10.0, 30.0), (20.0, 40.0), (20.0, 41.0), (40.0, 80.0)]
    assert data.interpolated(15.0, points) == pytest.approx(35.0)
    assert data.interpolated(30.0, points) == pytest.approx(60.5)
    assert data.interpolated(5.0, points) == pytest.approx(15.0)
    assert data.interpolated(80.0, points) == pytest.approx(160.0)


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for target in targets:
        if not target.startswith(("http://", "https://", "#")):
            place = (path.parent / target.partition("#")[0]).resolve()
            assert place.exists(), f"{page} links to {target}"
    own = {
        re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in own, f"{page} has no section {target}"
