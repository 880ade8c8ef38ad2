"""A store's stages as Optuna studies in one SQLite file, for optuna-dashboard and whoever reads Optuna."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import URL
from sqlalchemy.exc import SQLAlchemyError

from fitune import space
from fitune.cells import layer_facts, layer_name
from fitune.errors import InputError, StoreError
from fitune.problem import Key
from fitune.record import Record
from fitune.search.evidence import StageResult
from fitune.search.history import History
from fitune.search.pool import StagePool
from fitune.search.study import attributes_of, quiet
from fitune.tactic import Stage, StageName
from fitune.target import KNOWN_TARGETS, chip_of, kernel_source_hash


def study_name(key: Key, part: StageName) -> str:
    """A name that no other key and GEMM has."""
    layer = ", ".join([layer_name(key.layer), *layer_facts(key.layer), key.layer.activation])
    return f"{layer}, {key.layer.ep_label}, {key.num_tokens} tokens, {part}"


def export_studies(found: Iterable[History], path: Path) -> int:
    """Write a study per history to a new SQLite file; how many trials. The file appears whole or not at all.

    Raises InputError where the file is there already, or its folder is not, and StoreError where it cannot be written.
    """
    check_new(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(exist_ok=False)  # a place that cannot be written is an OSError that names it
    try:
        with quiet():
            count = _write(found, unfinished)
        try:
            os.link(unfinished, path)
        except FileExistsError as error:
            raise InputError(f"{path} is there already; name another file, or remove it first") from error
    except (StorageInternalError, SQLAlchemyError) as error:
        raise StoreError(f"{path} could not be written: {error.__cause__ or error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
    return count


def check_new(path: Path) -> None:
    """Raise InputError where a file cannot be made anew at `path`."""
    if path.exists():
        raise InputError(f"{path} is there already; name another file, or remove it first")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")


def search_pool(history: History) -> StagePool:
    """The stages a search of that key and GEMM moves in: the legal ones of its chip, and what else was tried.

    On a recording, and of other kernels than this installation's, only the ones tried: the store does not say more.
    """
    tried = [record.tactic for record in history.records if isinstance(record.tactic, Stage)]
    taken_in, decision = history.environment, history.decision
    recorded = decision is not None and decision.origin == "recorded"
    if recorded or taken_in.arch not in KNOWN_TARGETS or taken_in.kernels != kernel_source_hash():
        return StagePool(tried)
    return StagePool([*space.pool(history.key.problem(), chip_of(taken_in), history.part), *tried])


def _write(found: Iterable[History], path: Path) -> int:
    storage = RDBStorage(URL.create("sqlite", database=str(path)).render_as_string())
    count = 0
    try:
        for history in found:
            pool = search_pool(history)
            study = optuna.create_study(
                storage=storage, study_name=study_name(history.key, history.part), direction="minimize"
            )
            for name, value in _facts(history).items():
                study.set_user_attr(name, value)
            for record in history.records:
                study.add_trial(_trial(record, pool))
            count += len(history.records)
    finally:
        storage.engine.dispose()
    return count


def _facts(history: History) -> dict[str, str | int | float]:
    """What a study says of itself: the layer, the versions, and what was decided."""
    key, decision = history.key, history.decision
    facts: dict[str, str | int | float] = {**asdict(key.layer), "num_tokens": key.num_tokens, "gemm": history.part}
    facts |= {f"environment_{name}": value for name, value in asdict(history.environment).items()}
    if decision is not None:
        facts |= {"chosen": str(decision.chosen), "default": str(decision.default), "reason": decision.reason}
    return facts


def _trial(record: Record, pool: StagePool) -> FrozenTrial:
    assert isinstance(record.tactic, Stage)
    measured, index = record.measurement, pool.index(record.tactic)
    assert index is not None
    attributes: dict[str, object] = {
        **attributes_of(record.tactic, StageResult.of(record)),
        "environment": record.environment_id,
    }
    if measured is None:
        attributes["reason"] = record.error or str(record.status)
    else:
        attributes |= {
            "interval_us": [measured.ci_low_us, measured.ci_high_us],
            "samples": measured.samples,
            "sm_mhz": measured.sm_mhz,
            "power_w": measured.power_w,
        }
    trial = create_trial(
        state=TrialState.COMPLETE if measured is not None else TrialState.FAIL,
        value=None if measured is None else measured.median_us,
        params=dict(pool.params[index]),
        distributions=dict(pool.distributions),
        user_attrs=attributes,
    )
    trial.datetime_start = trial.datetime_complete = datetime.fromtimestamp(record.time_s)
    return trial
