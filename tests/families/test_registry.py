"""Which families there are: good plugins join, bad ones are left out with one line that says why."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitune import cost, space
from fitune.errors import InputError
from fitune.families import families, family_named, find_family, runs_sort
from fitune.families.registry import BUILT_IN
from fitune.models import PRESETS
from fitune.problem import Problem
from fitune.tactic import STAGES, parse_stage
from fitune.target import KNOWN_TARGETS

SM_90 = KNOWN_TARGETS["sm_90"]
PROBLEM = Problem(PRESETS["deepseek-v3"].shape, 16, 4096)
FAMILY = """
from fitune.families import Family
class Mine(Family):
    name = {name!r}
    launching = {launching!r}
    def stages(self, shape, target, stage):
        return ()
FAMILY = Mine()
"""


def module(name: str, launching: str = "mine:run") -> str:
    return FAMILY.format(name=name, launching=launching)


def test_built_in_families_come_first_and_in_order() -> None:
    assert list(families())[:3] == ["tile", "gemv", "grouped_mm"] == list(space.FAMILIES)


def test_plugins_follow_by_name(install: Any) -> None:
    install("b-package", {"beta": "beta:FAMILY"}, {"beta": module("beta")})
    install("a-package", {"alpha": "alpha:FAMILY"}, {"alpha": module("alpha")})
    assert list(families())[3:] == ["alpha", "beta"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("mine", "import nothing_like_it", "ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("mine", "raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("mine", "FAMILY = 3", "no instance of fitune.families.Family"),
        ("mine", module("mine").replace("Mine()", "Mine"), "no instance of fitune.families.Family"),
        ("mine", module("yours"), "calls itself 'yours'"),
        ("mine", module("mine", "nothing"), "must read package.module:function"),
        ("t64", module("t64"), "a lower-case word, and not one like t64"),
        ("Mine", module("Mine"), "a lower-case word, and not one like t64"),
        ("tile", module("tile"), "fitune itself already has a family of that name"),
    ],
)
def test_a_bad_plugin_is_left_out_with_one_line(
    install: Any, caplog: pytest.LogCaptureFixture, name: str, text: str, words: str
) -> None:
    install("good-package", {"good": "good:FAMILY"}, {"good": module("good")})
    install("bad-package", {name: "bad:FAMILY"}, {"bad": text})
    with caplog.at_level(logging.WARNING):
        assert list(families()) == ["tile", "gemv", "grouped_mm", "good"]
    assert families()["tile"] is BUILT_IN[0]
    (line,) = caplog.messages
    assert line.startswith(f"family {name!r} of bad-package 1.0 is left out: ") and words in line
    assert "\n" not in line and "uninstall" in line


def test_of_two_plugins_with_one_name_the_first_by_package_stays(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install("b-package", {"twin": "twin_b:FAMILY"}, {"twin_b": module("twin")})
    install("a-package", {"twin": "twin_a:FAMILY"}, {"twin_a": module("twin")})
    with caplog.at_level(logging.WARNING):
        assert type(families()["twin"]).__module__ == "twin_a"
    assert "a-package 1.0 already has a family of that name" in caplog.text


def test_a_family_that_is_not_installed() -> None:
    stage = parse_stage("vendor t64 g2:auto fin:reduce")
    assert space.legality(stage, PROBLEM, SM_90) == "family: 'vendor' is not installed"
    assert find_family("vendor") is None
    assert runs_sort("vendor", 64) and not runs_sort("vendor", 1)
    for ask in (lambda: family_named("vendor"), lambda: cost.predict_us(stage, PROBLEM, SM_90)):
        with pytest.raises(InputError, match="'vendor' is not installed; install the package that has it"):
            ask()


@pytest.mark.parametrize("family", ["tile", "gemv"])
def test_our_own_families_take_no_options(family: str) -> None:
    assert space.legality(parse_stage(f"{family} t64 g2:auto fin:reduce"), PROBLEM, SM_90).startswith("form: ")


def test_footprints_are_those_of_the_chip_model() -> None:
    for name in STAGES:
        for stage in space.pool(PROBLEM, SM_90, name)[::50]:
            found = family_named(stage.family).footprint(stage, PROBLEM.shape, SM_90)
            assert found is None or (0 < found.shared_bytes < SM_90.shared_bytes and found.programs_per_sm >= 1)


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "optuna"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
from fitune import space
from fitune.models import PRESETS
from fitune.problem import Problem
from fitune.target import KNOWN_TARGETS
import fitune.diff
problem = Problem(PRESETS["deepseek-v3"].shape, 16, 16384)
print(sorted({stage.family for stage in space.pool(problem, KNOWN_TARGETS["sm_90"], "gemm1")}))
"""


def test_the_space_needs_no_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WITHOUT_TORCH]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "['grouped_mm', 'tile']\n", done.stderr
