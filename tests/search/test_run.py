"""The whole search on synthetic times: quality, resume after a kill, budgets, what stays as it is."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fitune.cache.store import Store
from fitune.errors import InputError, StoreError
from fitune.problem import Key, key_of
from fitune.record import Measurement, Record, Regime, Status
from fitune.search import KeyDecided, KeyKept, KeySkipped, KeyStarted, SearchPlan, TrialDone, run_search, study_of
from fitune.search.plan import _coarse_to_fine, key_distance, order_problems
from fitune.search.pool import head_of
from fitune.tactic import STAGES, Stage, Tactic


def new_store(tmp_path: Path, name: str = "store") -> Store:
    return Store.open(tmp_path / name, create=True)


def stage_records(store: Store) -> list[tuple[Key, Stage]]:
    return [(record.key, record.tactic) for record in store.records() if isinstance(record.tactic, Stage)]


def test_finds_near_the_best_layer_within_25_trials(tmp_path: Path, lab: SimpleNamespace) -> None:
    """Means over several landscapes: on a single one, TPE may be lucky."""
    problems = tuple(lab.problem(tokens) for tokens in (16, 256, 2048))
    regret = {}
    for sampler in ("pool", "random", "tpe"):
        found = []
        for seed in (50, 51, 52, 53):
            measurer = lab.SyntheticMeasurer(lab.Landscape(seed))
            plan = SearchPlan(problems, trials=25, sampler=sampler)
            summary = run_search(plan, measurer, new_store(tmp_path, f"{sampler}{seed}"))
            assert len(summary.decided) == len(problems) and not summary.skipped
            for decision in summary.decided:
                key = decision.key.problem()
                found.append(measurer.layer_us(key, decision.chosen) / lab.best_layer_us(measurer, key) - 1.0)
        regret[sampler] = sum(found) / len(found)
    assert regret["pool"] < 0.05, regret
    assert regret["pool"] < regret["tpe"], regret
    assert regret["pool"] < regret["random"] / 2, regret


def test_every_outcome_is_recorded_with_origin_and_the_default_first(tmp_path: Path, lab: SimpleNamespace) -> None:
    store, measurer, events = new_store(tmp_path), lab.SyntheticMeasurer(lab.Landscape(5, failing=0.2)), []
    problems = (lab.problem(64), lab.problem(128))
    summary = run_search(SearchPlan(problems, trials=15), measurer, store, events.append)
    trials = [event for event in events if isinstance(event, TrialDone)]
    assert len(trials) == summary.measured == len(measurer.asked) == len(stage_records(store))
    assert summary.measured <= 2 * 2 * 15
    assert any(event.outcome.status is Status.COMPILE_ERROR for event in trials)
    assert store.environments()[measurer.environment.id] == measurer.environment
    by_key: dict[Key, list[Record]] = {}
    for record in store.records():
        by_key.setdefault(record.key, []).append(record)
    for key, records in by_key.items():
        first = next(record for record in records if record.part == "gemm1")
        decision = store.decisions()[key]
        assert first.tactic == decision.default.stage("gemm1") and first.origin == "default"
        finals = [record for record in records if record.phase == "final"]
        assert decision.default in [record.tactic for record in finals]
        assert {member.tactic for member in decision.members} <= {record.tactic for record in finals}
    origins = Counter(record.origin.split(":")[0] for record in store.records())
    assert origins["neighbour"] > 0 and origins["sampler"] > 0
    assert measurer.hopeless_seen[0] is None and any(measurer.hopeless_seen)


@pytest.mark.parametrize("stop_after", [0, 1, 9, 26, 41])
def test_interrupted_and_resumed_repeats_nothing(tmp_path: Path, lab: SimpleNamespace, stop_after: int) -> None:
    problems = tuple(lab.problem(tokens) for tokens in (32, 512))
    plan, store = SearchPlan(problems, trials=12), new_store(tmp_path)
    first = lab.SyntheticMeasurer(lab.Landscape(6), stop_after=stop_after)
    with pytest.raises(KeyboardInterrupt):
        run_search(plan, first, store, space=lab.FewStages())
    assert len(stage_records(store)) == stop_after
    second = lab.SyntheticMeasurer(lab.Landscape(6))
    summary = run_search(plan, second, Store.open(store.path), space=lab.FewStages())
    counts = Counter(first.asked + second.asked)
    assert max(counts.values()) == 1
    assert len(counts) == 2 * 2 * 12 and len(store.decisions()) == 2
    third = lab.SyntheticMeasurer(lab.Landscape(6))
    again = run_search(plan, third, Store.open(store.path), space=lab.FewStages())
    assert not third.asked and len(again.kept) == 2 and not again.decided
    assert summary.reused + summary.measured <= 2 * 2 * 12


CHILD = """
    import importlib.util, sys, time
    from pathlib import Path
    spec = importlib.util.spec_from_file_location("lab", sys.argv[1])
    lab = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = lab
    spec.loader.exec_module(lab)
    from fitune.cache.store import Store
    from fitune.search import SearchPlan, run_search

    def slow(event):
        print("event", flush=True)
        time.sleep(0.002)

    problems = tuple(lab.problem(tokens) for tokens in (32, 128, 512, 2048))
    store = Store.open(Path(sys.argv[2]))
    run_search(SearchPlan(problems, trials=10), lab.SyntheticMeasurer(), store, slow, space=lab.FewStages())
    print("done", flush=True)
"""


def test_killed_at_random_moments_loses_and_repeats_nothing(tmp_path: Path, lab: SimpleNamespace) -> None:
    store, rng = new_store(tmp_path), random.Random(4)
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(Path(__file__).with_name("conftest.py"))]
    for killed in (True, True, True, False):
        child = subprocess.Popen([*command, str(store.path)], stdout=subprocess.PIPE, text=True, env=os.environ)
        assert child.stdout is not None
        seen = 0
        if killed:
            after = rng.randrange(3, 20)
            while seen < after and child.stdout.readline():
                seen += 1
            time.sleep(rng.random() * 0.01)
            os.kill(child.pid, signal.SIGKILL)
        output = child.communicate(timeout=120)[0]
        assert killed or output.endswith("done\n")
    counts = Counter(stage_records(Store.open(store.path)))
    assert max(counts.values()) == 1
    assert len(counts) == 4 * 2 * 10 and len(store.decisions()) == 4


def test_finals_left_without_a_decision_are_taken_over(tmp_path: Path, lab: SimpleNamespace) -> None:
    plan, store = SearchPlan((lab.problem(64),), trials=8), new_store(tmp_path)
    run_search(plan, lab.SyntheticMeasurer(), store, space=lab.FewStages())
    broken = new_store(tmp_path, "broken")
    with broken.writer() as writer:
        for item in [*store.environments().values(), *store.records()]:
            writer.append(item)
    measurer = lab.SyntheticMeasurer()
    run_search(plan, measurer, broken, space=lab.FewStages())
    assert not measurer.asked and not measurer.finals_asked
    assert [d.chosen for d in broken.decisions().values()] == [d.chosen for d in store.decisions().values()]


def test_other_kernels_are_measured_again_and_force_decides_again(tmp_path: Path, lab: SimpleNamespace) -> None:
    plan, store = SearchPlan((lab.problem(64),), trials=8), new_store(tmp_path)
    run_search(plan, lab.SyntheticMeasurer(), store, space=lab.FewStages())
    forced = lab.SyntheticMeasurer()
    summary = run_search(replace(plan, force=True), forced, store, space=lab.FewStages())
    assert not forced.asked and len(forced.finals_asked) == 1 and len(summary.decided) == 1
    newer = lab.SyntheticMeasurer(environment=replace(lab.ENVIRONMENT, kernels="newer"))
    summary = run_search(plan, newer, store, space=lab.FewStages())
    assert len(newer.asked) == 16 and summary.reused == 0 and len(summary.decided) == 1


def test_the_best_under_other_kernels_are_tried_first_and_count_for_nothing(
    tmp_path: Path, lab: SimpleNamespace
) -> None:
    """Former times are far below what anything takes now: one of them among results would win, or end the search."""
    problem, few, store = lab.problem(64), lab.FewStages(), new_store(tmp_path)
    key, older = key_of(problem, lab.TARGET.device), replace(lab.ENVIRONMENT, kernels="older")
    default, former = few.default(problem, lab.TARGET), {}
    records = []
    for name in STAGES:
        stages = [stage for stage in few.pool(problem, lab.TARGET, name) if stage != default.stage(name)]
        dropped = [stage for stage in lab.few_stages(problem, name, 200, seed=1) if stage not in stages][:8]
        former[name] = stages[::4]
        for rank, stage in enumerate([*dropped, *former[name], default.stage(name)]):
            seen = Measurement(0.001 * (rank + 1), 0.001 * (rank + 0.5), 0.001 * (rank + 2), 5, Regime())
            records.append(Record(key, name, stage, Status.OK, older.id, "then", 1.0, measurement=seen))
        failed = Record(key, name, stages[1], Status.COMPILE_ERROR, older.id, "then", 1.0, error="then")
        records.append(failed)
    pairs = [Tactic.of(a, b) for a in former["gemm1"] for b in former["gemm2"] if head_of(a) == head_of(b)]
    seen = Measurement(0.002, 0.001, 0.003, 5, Regime())
    records.append(Record(key, "layer", pairs[0], Status.OK, older.id, "then", 1.0, phase="final", measurement=seen))
    with store.writer() as writer:
        for item in [older, *records]:
            writer.append(item)

    measurer, events = lab.SyntheticMeasurer(), []
    summary = run_search(SearchPlan((problem,), trials=20), measurer, store, events.append, space=few)
    assert summary.reused == 0 and summary.measured == len(measurer.asked) == 2 * 20
    now = [record for record in store.records() if record.environment_id == lab.ENVIRONMENT.id]
    for name in STAGES:
        tried = [record for record in now if record.part == name]
        assert [record.tactic for record in tried[:7]] == [default.stage(name), *former[name][:6]]
        assert [record.origin for record in tried[:7]] == ["default", *["former"] * 6]
        assert {record.origin for record in tried[7:]} == {"sampler"}
    assert measurer.hopeless_seen[0] is None and min(us for us in measurer.hopeless_seen if us is not None) > 10.0
    assert all(event.best_us is None or event.best_us > 10.0 for event in events if isinstance(event, TrialDone))
    assert all(record.measurement is None or record.measurement.median_us > 10.0 for record in now)
    (decision,) = summary.decided
    assert len(measurer.finals_asked) == 1
    assert {member.tactic for member in decision.members} <= set(measurer.finals_asked[0][1])
    assert all(member.measurement.median_us > 10.0 for member in decision.members)
    assert decision.environment_id == lab.ENVIRONMENT.id


@pytest.mark.parametrize("sampler", ["random", "tpe", "exhaustive"])
def test_only_the_pool_sampler_is_helped_by_other_kernels(sampler: str, tmp_path: Path, lab: SimpleNamespace) -> None:
    """The others are there to be compared with."""
    few, store = lab.FewStages(), new_store(tmp_path)
    older = replace(lab.ENVIRONMENT, kernels="older")
    plan = SearchPlan((lab.problem(64),), trials=10, sampler=sampler)
    run_search(plan, lab.SyntheticMeasurer(environment=older), store, space=few)
    run_search(plan, lab.SyntheticMeasurer(), store, space=few)
    assert "former" not in {record.origin for record in store.records()}


def test_small_pools_are_swept_in_cost_order(tmp_path: Path, lab: SimpleNamespace) -> None:
    store, measurer = new_store(tmp_path), lab.SyntheticMeasurer()
    run_search(SearchPlan((lab.problem(64),)), measurer, store, space=lab.FewStages(30))
    assert {"default", "exhaustive"} == {r.origin for r in store.records() if r.phase == "search"}
    pool = {*lab.FewStages(30).pool(lab.problem(64), lab.TARGET, "gemm1")}
    assert pool <= {stage for _, stage in stage_records(store)}


def test_open_ended_search_of_a_large_pool_stops_by_itself(tmp_path: Path, lab: SimpleNamespace) -> None:
    measurer = lab.SyntheticMeasurer(lab.Landscape(8, roughness=0.0))
    run_search(SearchPlan((lab.problem(1024),)), measurer, new_store(tmp_path), space=lab.FewStages(400))
    assert 2 * 48 <= len(measurer.asked) < 400


class TickingMeasurer:
    """Wraps a measurer so that every stage takes a second of the given clock and finals take three."""

    def __init__(self, inner: object) -> None:
        self.inner, self.now_s = inner, 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def stages(self, *given: object) -> object:
        for outcome in self.inner.stages(*given):
            self.now_s += 1.0
            yield outcome

    def finals(self, *given: object) -> object:
        self.now_s += 3.0
        return self.inner.finals(*given)


def test_budget_is_kept_and_shared_fairly(tmp_path: Path, lab: SimpleNamespace) -> None:
    problems = tuple(lab.problem(tokens) for tokens in (16, 64, 256, 1024))
    measurer = TickingMeasurer(lab.SyntheticMeasurer())
    plan = SearchPlan(problems, budget_s=200.0)
    summary = run_search(plan, measurer, new_store(tmp_path), space=lab.FewStages(), clock=lambda: measurer.now_s)
    assert len(summary.decided) == 4
    assert 120.0 < summary.elapsed_s <= 206.0
    per_key = Counter(key for key, _ in measurer.asked)
    assert min(per_key.values()) > 0.5 * max(per_key.values())


def test_keys_without_time_are_skipped_and_said(tmp_path: Path, lab: SimpleNamespace) -> None:
    measurer, events = TickingMeasurer(lab.SyntheticMeasurer()), []
    problems = tuple(lab.problem(tokens) for tokens in (16, 64, 256, 1024))
    plan = SearchPlan(problems, budget_s=5.0)
    store = new_store(tmp_path)
    summary = run_search(plan, measurer, store, events.append, space=lab.FewStages(), clock=lambda: measurer.now_s)
    assert summary.skipped and len(summary.decided) + len(summary.skipped) == 4
    assert len([event for event in events if isinstance(event, KeySkipped)]) == len(summary.skipped)


def test_events_tell_the_whole_story(tmp_path: Path, lab: SimpleNamespace) -> None:
    store, events = new_store(tmp_path), []
    plan = SearchPlan((lab.problem(64), lab.problem(256)), trials=8)
    run_search(plan, lab.SyntheticMeasurer(), store, events.append, space=lab.FewStages())
    started = [event for event in events if isinstance(event, KeyStarted)]
    decided = [event for event in events if isinstance(event, KeyDecided)]
    assert [event.index for event in started] == [event.index for event in decided] == [0, 1]
    assert all(event.done <= event.planned for event in events if isinstance(event, TrialDone))
    events.clear()
    run_search(plan, lab.SyntheticMeasurer(), store, events.append, space=lab.FewStages())
    assert all(isinstance(event, KeyKept) for event in events) and len(events) == 2


def test_a_key_where_nothing_runs_is_skipped_with_its_errors(tmp_path: Path, lab: SimpleNamespace) -> None:
    class Hole(lab.Landscape):
        def time_us(self, stage: Stage, key: object) -> float:
            return float("nan")

    summary = run_search(
        SearchPlan((lab.problem(64),), trials=6),
        lab.SyntheticMeasurer(Hole()),
        new_store(tmp_path),
        space=lab.FewStages(),
    )
    assert not summary.decided and "compile_error" in summary.skipped[0][1]


def test_tied_tactics_keep_the_default(tmp_path: Path, lab: SimpleNamespace) -> None:
    class Flat(lab.Landscape):
        def time_us(self, stage: Stage, key: object) -> float:
            return 100.0

    store = new_store(tmp_path)
    run_search(
        SearchPlan((lab.problem(64), lab.problem(1024)), trials=10),
        lab.SyntheticMeasurer(Flat()),
        store,
        space=lab.FewStages(),
    )
    assert [decision.state for decision in store.decisions().values()] == ["default", "default"]


def test_study_from_a_store(tmp_path: Path, lab: SimpleNamespace) -> None:
    store = new_store(tmp_path)
    run_search(SearchPlan((lab.problem(64),), trials=12), lab.SyntheticMeasurer(), store, space=lab.FewStages())
    key = key_of(lab.problem(64), lab.TARGET.device)
    study = study_of(store, key, "gemm2", target=lab.TARGET)
    assert len(study.trials) == 12
    best = min(
        (record for record in store.records() if record.part == "gemm2" and record.measurement is not None),
        key=lambda record: record.measurement.median_us,
    )
    assert study.best_trial.user_attrs["stage"] == str(best.tactic)
    assert study.best_value == best.measurement.median_us
    with pytest.raises(StoreError, match="99 tokens"):
        study_of(store, replace(key, num_tokens=99), "gemm2", target=lab.TARGET)


def test_order_is_coarse_to_fine(lab: SimpleNamespace) -> None:
    assert _coarse_to_fine(5) == [4, 0, 2, 3, 1]
    for count in range(20):
        assert sorted(_coarse_to_fine(count)) == list(range(count))
    problems = [lab.problem(2**power, experts) for power in range(5) for experts in (16, 256)]
    ordered = order_problems([*problems, *problems])
    assert len(ordered) == len(problems)
    assert [(p.num_tokens, p.local_experts) for p in ordered[:4]] == [(16, 256), (16, 16), (1, 256), (1, 16)]


def test_keys_of_equal_rows_are_near_and_of_other_shapes_never(lab: SimpleNamespace) -> None:
    here, ep = (key_of(lab.problem(64, count), "NVIDIA H200") for count in (256, 16))
    far = key_of(lab.problem(2048, 256), "NVIDIA H200")
    assert key_distance(here, ep) < key_distance(here, far)
    other = replace(here, layer=replace(here.layer, hidden_size=4096))
    assert key_distance(here, other) == float("inf")


@pytest.mark.parametrize(
    ("given", "text"),
    [({"sampler": "grid"}, "grid"), ({"trials": 0}, "trials is 0"), ({"budget_s": -1.0}, "-1.0")],
)
def test_bad_plans_are_refused(given: dict[str, object], text: str, lab: SimpleNamespace) -> None:
    with pytest.raises(InputError, match=text):
        SearchPlan((lab.problem(),), **given)
    with pytest.raises(InputError, match="num_tokens is 0"):
        SearchPlan((lab.problem(0),))


class BrokenSwap:
    """Times of another landscape, but no gemm2 of 64 columns compiles: the default and its whole neighbourhood fail."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def time_us(self, stage: Stage, key: object) -> float:
        broken = stage.stage == "gemm2" and stage.gemm.block_n == 64
        return float("nan") if broken else self.inner.time_us(stage, key)


def test_a_failing_default_and_its_failing_neighbourhood_still_end_in_a_decision(
    tmp_path: Path, lab: SimpleNamespace
) -> None:
    store = new_store(tmp_path)
    measurer = lab.SyntheticMeasurer(BrokenSwap(lab.Landscape(2, failing=0.0)))
    run_search(SearchPlan((lab.problem(16),), trials=16), measurer, store)
    assert any(record.status is Status.COMPILE_ERROR for record in store.records() if record.part == "gemm2")
    (decision,) = store.decisions().values()
    assert decision.default.gemm2.block_n == 64
    assert decision.member(decision.default) is None and decision.default_us == 0.0
    for member in decision.members:
        assert isinstance(member.tactic, Tactic)
        assert [member.tactic.stage(name).tile_size for name in ("gemm1", "gemm2")] == [member.tactic.tile_size] * 2
