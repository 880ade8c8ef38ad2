"""The recordings that fitune ships: measured with the kernels that it ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fitune.cache import Recording, embedded_recordings, load_recording
from fitune.space import legality, tactic_legality
from fitune.tactic import Stage
from fitune.target import kernel_source_hash

RECORDINGS = embedded_recordings()


@cache
def recording(path: Path) -> Recording:
    return load_recording(path)


def test_there_is_one() -> None:
    assert RECORDINGS


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_kernels_are_the_ones_measured(path: Path) -> None:
    """Fails when kernels/ changes without a new recording: every decision made from it would count as stale."""
    found = recording(path)
    used = {item.environment_id for item in (*found.records, *found.decisions)}
    assert {found.environments[name].kernels for name in used} == {kernel_source_hash()}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_all_that_was_measured_is_in_the_space(path: Path) -> None:
    """Fails when the space drops a stage that a search on the recording could have chosen."""
    target = recording(path).target
    for item in recording(path).records:
        problem, tactic = item.key.problem(), item.tactic
        if isinstance(tactic, Stage):
            assert legality(tactic, problem, target) == "", (item.key, str(tactic))
        else:
            assert tactic_legality(tactic, problem, target) == "", (item.key, str(tactic))
