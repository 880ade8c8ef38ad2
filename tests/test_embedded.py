"""The recordings that fitune ships: measured with the kernels that it ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fitune.cache import Recording, embedded_recordings, load_recording
from fitune.cache.store import Store
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Key, LayerShape, Problem
from fitune.search import SearchPlan, run_search
from fitune.space import default_tactic, legality, tactic_legality
from fitune.tactic import STAGES, Stage, Tactic
from fitune.target import kernel_source_hash

RECORDINGS = embedded_recordings()
SHAPES = {path.stem: LayerShape(7168, 2048, 256, 8, path.stem.rpartition("-")[2]) for path in RECORDINGS}  # type: ignore[arg-type]


@cache
def recording(path: Path) -> Recording:
    return load_recording(path)


def test_there_is_one_of_each_dtype() -> None:
    assert {item.key.layer.dtype for path in RECORDINGS for item in recording(path).records} == {"bf16", "fp8_block128"}


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


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_each_key_holds_its_default_and_its_finalists(path: Path) -> None:
    """Few of a key's legal stages were measured: those that a search starts from and ends with are among them."""
    found = recording(path)
    known: dict[Key, set[Stage | Tactic]] = {}
    for item in found.records:
        known.setdefault(item.key, set()).add(item.tactic)
    assert {decision.key for decision in found.decisions} == known.keys()
    for decision in found.decisions:
        assert decision.default == default_tactic(decision.key.problem(), found.target)
        for tactic in (decision.default, decision.chosen, *(member.tactic for member in decision.members)):
            assert {tactic, *(tactic.stage(name) for name in STAGES)} <= known[decision.key], (
                decision.key,
                str(tactic),
            )


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_search_on_it_ends_where_the_measured_one_did(path: Path, tmp_path: Path) -> None:
    """It sweeps what there is; the choice is as fast as the recorded one, give or take what its noise allows."""
    found = recording(path)
    problems = tuple(Problem(SHAPES[path.stem], local, tokens) for local in (256, 32) for tokens in (1, 64, 4096))
    store = Store.open(tmp_path / "store", create=True)
    summary = run_search(SearchPlan(problems), RecordingMeasurer(found), store)
    assert len(summary.decided) == len(problems)
    recorded = {decision.key: decision for decision in found.decisions}
    for decision in summary.decided:
        before = recorded[decision.key]
        times = {member.tactic: member.measurement.median_us for member in (*decision.members, *before.members)}
        slower = times[decision.chosen] / times[before.chosen] - 1.0
        assert slower <= before.noise + 0.01, (decision.key, str(decision.chosen), str(before.chosen), slower)
