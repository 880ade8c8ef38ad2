"""Playing a recording back, and searching on it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fitune.cache.recording import Recording
from fitune.cache.store import Store
from fitune.errors import StoreError
from fitune.measure.recording import COMPOSED, NOT_RECORDED, RecordingMeasurer
from fitune.problem import Problem, key_of
from fitune.record import Measurement, Record, Regime, Status
from fitune.search import KeyStarted, SearchPlan, restrict_to_recording, run_search
from fitune.search.join import finalists
from fitune.tactic import Stage, Tactic

REGIME = Regime(routing="random", seed=3, interleaved=True)


def record_of(lab: SimpleNamespace, key: Problem, tactic: Stage | Tactic, time_us: float, **given: object) -> Record:
    """A record of `time_us` with 1 % either way, or a failure where it is NaN."""
    failed = time_us != time_us
    measurement = None if failed else Measurement(time_us, 0.99 * time_us, 1.01 * time_us, 7, REGIME)
    part = tactic.stage if isinstance(tactic, Stage) else "layer"
    made = Record(
        key_of(key, lab.TARGET.device),
        part,
        tactic,
        Status.COMPILE_ERROR if failed else Status.OK,
        lab.ENVIRONMENT.id,
        "recorded",
        time.time(),
        measurement=measurement,
        error="no such luck" if failed else "",
    )
    return replace(made, **given)


def recorded(lab: SimpleNamespace, *tokens: int, count: int = 60, seed: int = 0) -> Recording:
    land, records = lab.Landscape(seed), []
    for num_tokens in tokens:
        key = lab.problem(num_tokens)
        default = lab.FewStages().default(key, lab.TARGET)
        for name in ("gemm1", "gemm2"):
            stages = dict.fromkeys([default.stage(name), *lab.few_stages(key, name, count)])
            records += [record_of(lab, key, stage, land.time_us(stage, key)) for stage in stages]
    return Recording(lab.TARGET, "synthetic", "", {lab.ENVIRONMENT.id: lab.ENVIRONMENT}, tuple(records))


def test_stages_are_played_back_or_rejected(lab: SimpleNamespace) -> None:
    recording = recorded(lab, 512)
    measurer, key = RecordingMeasurer(recording), lab.problem(512)
    assert measurer.environment == lab.ENVIRONMENT and measurer.target == lab.TARGET
    asked = lab.few_stages(key, "gemm1", 200, seed=9)
    outcomes = list(measurer.stages(key, asked, None))
    assert [outcome.tactic for outcome in outcomes] == asked
    known = {record.tactic: record for record in recording.records}
    for outcome in outcomes:
        if outcome.tactic in known:
            assert outcome.measurement == known[outcome.tactic].measurement
            assert outcome.status == known[outcome.tactic].status
        else:
            assert (outcome.status, outcome.error) == (Status.REJECTED, NOT_RECORDED)
    assert {outcome.tactic in known for outcome in outcomes} == {True, False}


def pair_of(recording: Recording, lab: SimpleNamespace, tokens: int) -> Tactic:
    return lab.FewStages().default(lab.problem(tokens), lab.TARGET)


def test_a_layer_never_recorded_is_composed_and_says_so(lab: SimpleNamespace) -> None:
    recording, key = recorded(lab, 512), lab.problem(512)
    tactic = pair_of(recording, lab, 512)
    times = {r.tactic: r.measurement.median_us for r in recording.records if r.measurement is not None}
    (outcome,) = RecordingMeasurer(recording).finals(key, [tactic], 8)
    measured = outcome.measurement
    assert measured is not None
    expected = times[tactic.stage("gemm1")] + times[tactic.stage("gemm2")]
    assert measured.median_us == pytest.approx(expected)
    assert measured.ci_low_us == pytest.approx(0.99 * expected) and measured.samples == 7
    assert dict(measured.parts_us).keys() == {"gemm1", "gemm2"}
    assert measured.regime.execution == COMPOSED and not measured.regime.interleaved and measured.regime.seed == 3


def test_recorded_layers_are_used_and_calibrate_composed_ones(lab: SimpleNamespace) -> None:
    recording, key = recorded(lab, 512), lab.problem(512)
    tactic = pair_of(recording, lab, 512)
    times = {r.tactic: r.measurement.median_us for r in recording.records if r.measurement is not None}
    parts = [times[tactic.stage(name)] for name in ("gemm1", "gemm2")]
    whole = Measurement(sum(parts) + 7.0, sum(parts) + 6.0, sum(parts) + 8.0, 30, REGIME, (("sort", 5.0),))
    layer = record_of(lab, key, tactic, 1.0, measurement=whole, phase="final")
    measurer = RecordingMeasurer(replace(recording, records=(*recording.records, layer)))
    other = next(
        Tactic.of(tactic.stage("gemm1"), stage)
        for stage in times
        if isinstance(stage, Stage) and stage.stage == "gemm2" and stage.tile_size == tactic.tile_size
        if stage != tactic.stage("gemm2")
    )
    known, composed = measurer.finals(key, [tactic, other], 8)
    assert known.measurement == whole
    assert composed.measurement is not None
    assert dict(composed.measurement.parts_us)["sort"] == 5.0
    assert dict(composed.measurement.parts_us)["rest"] == pytest.approx(2.0)
    assert sum(dict(composed.measurement.parts_us).values()) == pytest.approx(composed.measurement.median_us)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_tokens": 100}, "no num_tokens 100; it has 64, 512"),
        ({"local_experts": 32}, "local_experts 32 .it has 16"),
        ({"routing": "balanced"}, "routing 'balanced' .it has random"),
    ],
)
def test_other_problems_name_what_is_there(lab: SimpleNamespace, change: dict[str, object], text: str) -> None:
    measurer = RecordingMeasurer(recorded(lab, 64, 512, count=3))
    with pytest.raises(StoreError, match=text):
        list(measurer.stages(replace(lab.problem(512), **change), [], None))


def test_noise_comes_from_decisions_else_from_intervals(tmp_path: Path, lab: SimpleNamespace) -> None:
    recording, key = recorded(lab, 512), lab.problem(512)
    measurer = RecordingMeasurer(recording)
    assert measurer.noise(key, pair_of(recording, lab, 512)) == pytest.approx(0.01 * 2**0.5)
    store = Store.open(tmp_path / "s", create=True)
    run_search(SearchPlan((key,), trials=10), measurer, store)
    decisions = tuple(replace(decision, noise=0.0123) for decision in store.decisions().values())
    decided = RecordingMeasurer(replace(recording, decisions=decisions))
    assert decided.noise(key, pair_of(recording, lab, 512)) == 0.0123


def test_search_moves_within_the_recording_and_finds_its_best(tmp_path: Path, lab: SimpleNamespace) -> None:
    recording, key, events = recorded(lab, 512, count=120, seed=2), lab.problem(512), []
    measurer, store = RecordingMeasurer(recording), Store.open(tmp_path / "s", create=True)
    summary = run_search(SearchPlan((key,), trials=40), measurer, store, events.append)
    assert all(record.status is not Status.REJECTED for record in store.records())
    (started,) = [event for event in events if isinstance(event, KeyStarted)]
    space = restrict_to_recording(measurer)
    legal = sum(len(space.whole.pool(key, lab.TARGET, name)) for name in ("gemm1", "gemm2"))
    assert started.missing == summary.missing == legal - started.pool > 0
    (decision,) = summary.decided
    assert decision.origin == "recorded"
    ranked: dict[str, dict] = {"gemm1": {}, "gemm2": {}}
    for record in recording.records:
        if record.measurement is not None:
            head = (record.tactic.family, record.tactic.tile_size)
            ranked[record.part].setdefault(head, []).append((record.measurement.median_us, record.tactic))
    for heads in ranked.values():
        for members in heads.values():
            members.sort(key=lambda item: (item[0], str(item[1])))
    best = finalists(decision.default, ranked["gemm1"], ranked["gemm2"], {}, 2)[1].sum_us
    fastest = decision.members[0].measurement.median_us
    assert fastest == pytest.approx(best, rel=0.02)


def test_a_problem_that_is_not_recorded_stops_the_search_before_it_starts(tmp_path: Path, lab: SimpleNamespace) -> None:
    store = Store.open(tmp_path / "s", create=True)
    with pytest.raises(StoreError, match="no num_tokens 64"):
        run_search(SearchPlan((lab.problem(512), lab.problem(64))), RecordingMeasurer(recorded(lab, 512)), store)
    assert not store.records()
