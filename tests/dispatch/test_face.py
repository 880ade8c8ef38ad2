"""Importing fitune is light; its face finds everything it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fitune

HEAVY = ("torch", "triton", "optuna", "typer", "rich", "matplotlib", "numpy")


def imported_by(code: str) -> set[str]:
    report = f"import sys; {code}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_fitune_imports_nothing_heavy() -> None:
    assert imported_by("import fitune; fitune.__version__; fitune.LayerShape; dir(fitune)") == set()


def test_reading_tables_and_misses_needs_no_torch() -> None:
    assert imported_by("import fitune.misses") == set()
    assert not imported_by("import fitune; fitune.load_table") & {"torch", "triton", "optuna", "typer"}


def test_dispatch_never_imports_the_search_side() -> None:
    code = "import fitune; fitune.fused_moe; fitune.Dispatcher; assert 'fitune.search' not in sys.modules"
    assert not imported_by(code) & {"optuna", "typer", "rich", "matplotlib"}


@pytest.mark.parametrize("name", fitune.__all__)
def test_every_promised_name_is_there(name: str) -> None:
    assert getattr(fitune, name)
    assert name in dir(fitune)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tune_everything'"):
        fitune.tune_everything  # noqa: B018
