"""Which axes matter: a planted axis is found, chance is told from it, few stages give no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fitune.cache import Store
from fitune.problem import Key, key_of
from fitune.record import Measurement, Record, Regime, Status
from fitune.search import study_of
from fitune.search.history import histories
from fitune.search.importance import LEAST_STAGES, AxisImportance, GemmImportance, importance_of, reading
from fitune.search.pool import stage_params
from fitune.tactic import Stage

Times = Callable[[Stage], float]


def record_of(lab: SimpleNamespace, key: Key, stage: Stage, time_us: float, at: float, **facts: object) -> Record:
    """A stage's record; NaN is a failure."""
    failed = math.isnan(time_us)
    measured = None if failed else Measurement(time_us, 0.99 * time_us, 1.01 * time_us, 5, Regime(**facts))  # type: ignore[arg-type]
    status = Status.COMPILE_ERROR if failed else Status.OK
    return Record(key, stage.stage, stage, status, lab.ENVIRONMENT.id, "run", at, measurement=measured)


def store_of(lab: SimpleNamespace, path: Path, count: int, time_us: Times, num_tokens: int = 512) -> Store:
    """A store of `count` random legal gemm1 stages of one key."""
    store, problem = Store.open(path, create=True), lab.problem(num_tokens)
    key = key_of(problem, lab.TARGET.device)
    with store.writer() as writer:
        writer.append(lab.ENVIRONMENT)
        for at, stage in enumerate(lab.few_stages(problem, "gemm1", count)):
            writer.append(record_of(lab, key, stage, time_us(stage), float(at)))
    return store


def found_in(store: Store) -> GemmImportance:
    (history,) = histories(store)
    return importance_of(history)


def planted(lab: SimpleNamespace) -> Times:
    """Five pipeline stages are half again as fast as any other number; everything else is worth less than 3 %."""
    return lambda stage: (100.0 if stage.own_gemm.num_stages == 5 else 150.0) * (1.0 + 0.03 * lab.luck(stage))


def test_the_axis_that_decides_has_the_largest_importance_and_an_interval_of_its_own(
    lab: SimpleNamespace, tmp_path: Path
) -> None:
    found = found_in(store_of(lab, tmp_path / "s", 80, planted(lab)))
    first, *others = found.axes
    assert first.axis == "num_stages"
    assert first.above_chance
    assert first.low is not None
    assert all(other.high is not None and other.high < first.low for other in others)
    assert sum(axis.share or 0.0 for axis in found.axes) == pytest.approx(1.0)
    by_value = {effect.value: effect for effect in first.effects}
    assert by_value[5].ratio == 1.0
    assert all(1.4 < by_value[number].ratio < 1.6 for number in (3, 4, 6))
    assert "num_stages" in reading([found])


def test_pure_chance_is_called_so(lab: SimpleNamespace, tmp_path: Path) -> None:
    marked = 0
    for draw in range(4):
        store = store_of(lab, tmp_path / str(draw), 40, lambda stage, draw=draw: 100.0 + 20.0 * lab.luck(draw, stage))
        marked += sum(bool(axis.above_chance) for axis in found_in(store).axes)
    assert marked <= 1


def test_the_numbers_say_what_was_measured(lab: SimpleNamespace, tmp_path: Path) -> None:
    times = {stage: 100.0 + row for row, stage in enumerate(lab.few_stages(lab.problem(), "gemm1", 30))}
    last = list(times)[-1]
    store = store_of(lab, tmp_path / "s", 30, lambda stage: math.nan if stage == last else times[stage])
    found = found_in(store)
    assert (found.stages, found.failed, found.best_us, found.worst_us) == (29, 1, 100.0, 128.0)
    assert found.median_us == 114.0
    for axis in found.axes:
        assert sum(effect.stages for effect in axis.effects) == 29
        for effect in axis.effects:
            own = [
                us for stage, us in times.items() if stage != last and stage_params(stage)[axis.axis] == effect.value
            ]
            assert (effect.stages, effect.ratio) == (len(own), min(own) / 100.0)
            assert effect.is_thin == (len(own) < 5)
        assert axis.low is not None and axis.share is not None and axis.high is not None
        assert axis.low <= axis.share <= axis.high


def test_the_same_store_gives_the_same_numbers(lab: SimpleNamespace, tmp_path: Path) -> None:
    store = store_of(lab, tmp_path / "s", 20, planted(lab))
    assert found_in(store) == found_in(store)


def test_few_stages_give_no_number(lab: SimpleNamespace, tmp_path: Path) -> None:
    found = found_in(store_of(lab, tmp_path / "s", LEAST_STAGES - 1, planted(lab)))
    assert found.axes
    assert all(axis.share is axis.low is axis.high is axis.above_chance is None for axis in found.axes)
    assert all(axis.effects for axis in found.axes)
    assert str(LEAST_STAGES) in found.reason
    assert str(LEAST_STAGES) in reading([found])
    assert not found_in(store_of(lab, tmp_path / "t", LEAST_STAGES, planted(lab))).reason


def test_equal_times_and_none_at_all_give_no_number(lab: SimpleNamespace, tmp_path: Path) -> None:
    assert "same time" in found_in(store_of(lab, tmp_path / "s", 20, lambda stage: 7.0)).reason
    found = found_in(store_of(lab, tmp_path / "t", 20, lambda stage: math.nan))
    assert (found.stages, found.failed, found.best_us, found.axes) == (0, 20, None, ())


def test_only_comparable_records_count_the_later_instead_of_the_earlier(lab: SimpleNamespace, tmp_path: Path) -> None:
    store = store_of(lab, tmp_path / "s", 20, planted(lab))
    (before,) = histories(store)
    again, other = (record.tactic for record in before.records[:2])
    assert isinstance(again, Stage) and isinstance(other, Stage)
    with store.writer() as writer:
        writer.append(record_of(lab, before.key, other, 1.0, 0.5, seed=9))
        writer.append(record_of(lab, before.key, again, 5.0, 99.0))
    (after,) = histories(store)
    assert after.times_us == {**before.times_us, again: 5.0}
    assert after.left_out == 2
    study = study_of(store, before.key, "gemm1", target=lab.TARGET)
    assert sorted(trial.value for trial in study.trials) == sorted(after.times_us.values())


def gemm(lab: SimpleNamespace, num_tokens: int, **shares: float) -> GemmImportance:
    axes = tuple(AxisImportance(name, (), share, share, share, share > 0.3) for name, share in shares.items())
    key = key_of(lab.problem(num_tokens), lab.TARGET.device)
    return GemmImportance(key, "gemm1", "e", 50, 0, 1.0, 2.0, 3.0, axes)


def test_the_reading_splits_the_token_counts_where_the_axes_change(lab: SimpleNamespace) -> None:
    few = [gemm(lab, count, loop=0.8, loads=0.2) for count in (1, 16, 64)]
    many = [gemm(lab, count, loop=0.1, loads=0.9) for count in (4096, 16384)]
    said = reading([*few, *many])
    assert "at 1 to 64 tokens loop (80 %); from 4,096 tokens on loads (90 %)" in said
    assert "at 1 to 64 tokens loop (80 %)" in reading(few)
    assert "at 1 token loop" in reading(few[:1])
    assert "; at 4,096 tokens none" in reading([*few, *(gemm(lab, 4096, loop=0.25, loads=0.2) for _ in range(3))])


def test_a_reading_without_axes_above_chance_names_none(lab: SimpleNamespace) -> None:
    said = reading([gemm(lab, count, loop=0.2, loads=0.2) for count in (1, 64)])
    assert "no axis surely matters" in said
    assert "loop" not in said
    assert np.all([word not in said for word in ("loads", "tokens")])
