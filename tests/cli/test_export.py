"""`fitune export optuna`: the file read back by Optuna says what the store says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from fitune import space
from fitune.cache import Store, open_store
from fitune.search.export import search_pool, study_name
from fitune.search.history import History, histories
from fitune.search.pool import StagePool
from fitune.target import KNOWN_TARGETS


@pytest.fixture(scope="module")
def exported(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[History]]:
    """One key in one file, and what the store has of them."""
    from fitune.cli import main

    out = tmp_path_factory.mktemp("export") / "a name with ?, % and é.db"
    assert main(["export", "optuna", "--store", str(tuned), "--ep", "8", "--tokens", "16", "--out", str(out)]) == 0
    return out, histories(open_store(tuned), lambda key: key.layer.local_experts == 32 and key.num_tokens == 16)


def load(out: Path, history: History, tmp_path: Path) -> optuna.Study:
    shutil.copy(out, tmp_path / "plain.db")
    url = f"sqlite:///{tmp_path / 'plain.db'}"
    return optuna.load_study(study_name=study_name(history.key, history.part), storage=url)


def test_every_study_has_the_trials_states_and_best_value_of_the_store(
    exported: tuple[Path, list[History]], tmp_path: Path
) -> None:
    out, found = exported
    assert len(found) == 2
    for history in found:
        study = load(out, history, tmp_path)
        assert study.best_value == min(history.times_us.values())
        assert len(study.trials) == len(history.records)
        failed = [trial for trial in study.trials if trial.state is TrialState.FAIL]
        assert len(failed) == len(history.records) - len(history.times_us)
        assert study.user_attrs["num_tokens"] == history.key.num_tokens
    assert {trial.state for history in found for trial in load(out, history, tmp_path).trials} == {
        TrialState.COMPLETE,
        TrialState.FAIL,
    }


def test_a_trial_says_all_that_its_record_says(exported: tuple[Path, list[History]], tmp_path: Path) -> None:
    out, found = exported
    history = next(item for item in found if len(item.times_us) < len(item.records))
    pool = search_pool(history)
    for trial, record in zip(load(out, history, tmp_path).trials, history.records, strict=True):
        attributes, measured = trial.user_attrs, record.measurement
        assert (attributes["stage"], attributes["status"]) == (str(record.tactic), str(record.status))
        assert attributes["environment"] == record.environment_id
        assert trial.distributions == pool.distributions
        assert trial.params in pool.params
        assert trial.datetime_complete is not None
        assert trial.datetime_complete.timestamp() == pytest.approx(record.time_s)
        if measured is None:
            assert (trial.state, trial.value, attributes["reason"]) == (TrialState.FAIL, None, record.error)
        else:
            assert trial.value == measured.median_us
            assert attributes["interval_us"] == [measured.ci_low_us, measured.ci_high_us]
            assert (attributes["sm_mhz"], attributes["power_w"]) == (measured.sm_mhz, measured.power_w)


def test_distributions_are_those_of_the_search(tuned: Path) -> None:
    history = histories(open_store(tuned))[0]
    tried = [record.tactic for record in history.records]
    assert search_pool(history).distributions == StagePool(tried).distributions  # type: ignore[arg-type]
    assert history.decision is not None
    measured = replace(history, decision=replace(history.decision, origin="measured"))
    legal = space.pool(history.key.problem(), KNOWN_TARGETS["sm_90"], history.part)
    assert search_pool(measured).distributions == StagePool([*legal, *tried]).distributions  # type: ignore[list-item]
    old = replace(measured, environment=replace(measured.environment, kernels="older"))
    assert search_pool(old).distributions == search_pool(history).distributions


def test_a_file_that_is_there_is_left_alone(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.db"
    out.write_bytes(b"mine")
    result = run("export", "optuna", "--store", tuned, "--out", out)
    assert result.code == 2
    assert result.err.startswith(f"fitune: error: {out} is there already; name another file")
    assert out.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [out]


def test_what_cannot_be_exported_is_told(run: Callable[..., Any], tuned: Path, tmp_path: Path) -> None:
    nowhere = run("export", "optuna", "--store", tuned, "--out", tmp_path / "no" / "x.db")
    assert nowhere.code == 2
    assert "there is no folder" in nowhere.err
    Store.open(tmp_path / "empty", create=True)
    empty = run("export", "optuna", "--store", tmp_path / "empty", "--out", tmp_path / "x.db")
    assert empty.code == 2
    assert "no stages in" in empty.err
    other = run("export", "optuna", "--store", tuned, "--ep", 16, "--out", tmp_path / "x.db")
    assert other.code == 2
    assert "the store has no such cells" in other.err
    assert not (tmp_path / "x.db").exists()


def test_an_export_that_breaks_off_leaves_nothing(
    run: Callable[..., Any], tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fitune.search.export._trial", broken)
    assert run("export", "optuna", "--store", tuned, "--out", tmp_path / "x.db").code == 130
    assert not list(tmp_path.iterdir())


def test_help_has_an_example(run: Callable[..., Any]) -> None:
    assert "  fitune export optuna" in run("export", "optuna", "--help").out
