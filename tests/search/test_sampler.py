"""Samplers: only legal, unmeasured members; and ours finds the optimum where others do not."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import optuna
import pytest

from fitune import cost
from fitune.errors import InputError
from fitune.families import grouped_mm
from fitune.families.registry import BUILT_IN
from fitune.problem import DTYPES, DType, LayerShape
from fitune.search.gp import Hyper, Points, Posterior, _density
from fitune.search.pool import StagePool, Value, stage_features, stage_params, suggest_stage
from fitune.search.proposer import NeighbourTask, _normal_cdf
from fitune.search.sampler import (
    PoolBase,
    PoolExhausted,
    PoolSampler,
    RandomPoolSampler,
    SweepSampler,
    gp_sampler,
    tpe_sampler,
)
from fitune.tactic import STAGES, Stage
from fitune.target import KNOWN_TARGETS

optuna.logging.set_verbosity(optuna.logging.WARNING)


def make(kind: str, pool: StagePool, seed: int, predicted: np.ndarray) -> PoolBase:
    if kind == "pool":
        return PoolSampler(pool, predicted, seed=seed)
    if kind == "random":
        return RandomPoolSampler(pool, seed)
    if kind == "tpe":
        return tpe_sampler(pool, seed)
    if kind == "gp":
        pytest.importorskip("scipy")
        pytest.importorskip("torch")
        return gp_sampler(pool, seed)
    return SweepSampler(pool, predicted)


def small_pool(lab: SimpleNamespace, count: int = 40) -> tuple[StagePool, np.ndarray]:
    key = lab.problem()
    pool = StagePool(lab.few_stages(key, "gemm1", count))
    return pool, cost.predict_many_us(pool.stages, key, lab.TARGET)


@pytest.mark.parametrize("kind", ["pool", "random", "tpe", "gp", "sweep"])
def test_visits_every_member_once_and_stops(kind: str, lab: SimpleNamespace) -> None:
    pool, predicted = small_pool(lab)
    study = optuna.create_study(sampler=make(kind, pool, 1, predicted))
    study.optimize(lambda trial: 1.0 + len(str(suggest_stage(trial, pool))), n_trials=500)
    seen = [pool.index_of_params(trial.params) for trial in study.trials]
    assert sorted(seen) == list(range(len(pool)))
    with pytest.raises(PoolExhausted):
        suggest_stage(study.ask(), pool)


@pytest.mark.parametrize("kind", ["pool", "random", "tpe", "gp", "sweep"])
def test_open_pruned_and_failed_trials_are_not_asked_again(kind: str, lab: SimpleNamespace) -> None:
    pool, predicted = small_pool(lab, 12)
    study = optuna.create_study(sampler=make(kind, pool, 0, predicted))
    trials = [study.ask() for _ in range(12)]
    stages = [suggest_stage(trial, pool) for trial in trials]
    assert len(set(stages)) == 12
    study.tell(trials[0], state=optuna.trial.TrialState.PRUNED)
    study.tell(trials[1], state=optuna.trial.TrialState.FAIL)
    with pytest.raises(PoolExhausted):
        suggest_stage(study.ask(), pool)


def test_partly_fixed_trials_stay_legal(lab: SimpleNamespace) -> None:
    pool, predicted = small_pool(lab)
    study = optuna.create_study(sampler=PoolSampler(pool, predicted))
    wanted = pool.params[7]
    study.enqueue_trial({"tile_size": wanted["tile_size"], "block_n": wanted["block_n"]})
    stage = suggest_stage(study.ask(), pool)
    assert (stage.tile_size, stage.gemm.block_n) == (wanted["tile_size"], wanted["block_n"])
    study.enqueue_trial(pool.params[9])
    assert suggest_stage(study.ask(), pool) == pool.stages[9]


def test_gp_says_what_it_needs(lab: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitune.search.sampler.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs torch and scipy; pip install torch scipy, or use 'pool'"):
        gp_sampler(small_pool(lab)[0])


def test_other_parameters_are_refused(lab: SimpleNamespace) -> None:
    pool, predicted = small_pool(lab)
    trial = optuna.create_study(sampler=PoolSampler(pool, predicted)).ask()
    with pytest.raises(ValueError, match="learning_rate"):
        trial.suggest_float("learning_rate", 0.0, 1.0)


def best_after(kind: str, seed: int, tokens: int, lab: SimpleNamespace) -> list[float]:
    """Regret after 25 and 50 measurements."""
    key, land = lab.problem(tokens), lab.Landscape(seed)
    pool = StagePool(lab.few_stages(key, "gemm1", 400, seed))
    truth = [land.time_us(stage, key) for stage in pool.stages]
    predicted = cost.predict_many_us(pool.stages, key, lab.TARGET)
    study = optuna.create_study(sampler=make(kind, pool, seed, predicted))
    for _ in range(50):
        trial = study.ask()
        time_us = land.time_us(suggest_stage(trial, pool), key)
        if math.isnan(time_us):
            trial.set_user_attr("status", "compile_error")
        study.tell(trial, 3.0 * np.nanmax(truth) if math.isnan(time_us) else time_us)
    curve = np.minimum.accumulate([trial.value for trial in study.trials])
    return [curve[24] / np.nanmin(truth) - 1.0, curve[49] / np.nanmin(truth) - 1.0]


def test_beats_random_and_tpe(lab: SimpleNamespace) -> None:
    cells = [(seed, tokens) for seed in range(11, 16) for tokens in (256, 4096)]
    regret = {
        kind: np.mean([best_after(kind, seed, tokens, lab) for seed, tokens in cells], axis=0)
        for kind in ("pool", "random", "tpe")
    }
    assert (regret["pool"] < regret["random"] / 2).all(), regret
    assert (regret["pool"] < regret["tpe"]).all(), regret
    assert regret["pool"][1] < 0.02, regret


def test_same_seed_same_proposals(lab: SimpleNamespace) -> None:
    def run() -> list[str]:
        pool, predicted = small_pool(lab, 100)
        key, land = lab.problem(), lab.Landscape(2, failing=0.0)
        study = optuna.create_study(sampler=PoolSampler(pool, predicted, seed=5, batch=3))
        stages = []
        for _ in range(5):
            asked = [study.ask() for _ in range(3)]
            for trial in asked:
                stages.append(suggest_stage(trial, pool))
                study.tell(trial, land.time_us(stages[-1], key))
        return [str(stage) for stage in stages]

    assert run() == run()


def test_a_batch_is_spread_out(lab: SimpleNamespace) -> None:
    """Proposals planned together must differ more than the best ones taken alone would.

    Over several pools: in a single one, the best few may happen to lie as far apart as any few members do.
    """

    def spread(stages: list[Stage]) -> float:
        x = np.array([stage_features(stage) for stage in stages])
        return float(np.abs(x[:, None] - x[None, :]).sum())

    together, alone, wider = 0.0, 0.0, 0
    cases = [(tokens, part) for tokens in (16, 64, 512, 2048) for part in STAGES]
    for seed, (tokens, part) in enumerate(cases):
        key = lab.problem(tokens)
        pool = StagePool(lab.few_stages(key, part, 200, seed))
        predicted = cost.predict_many_us(pool.stages, key, lab.TARGET)
        study = optuna.create_study(sampler=PoolSampler(pool, predicted, batch=6))
        batch = spread([suggest_stage(study.ask(), pool) for _ in range(6)])
        best = spread([pool.stages[row] for row in np.argsort(predicted)[:6]])
        together, alone, wider = together + batch, alone + best, wider + (batch > 1.1 * best)
    assert together > 1.3 * alone
    assert wider >= 7, f"batches of {len(cases) - wider} pools are no wider than their best six"


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_features_tell_all_stages_apart(dtype: DType) -> None:
    """Every legal stage of the built-in families in one pool, whatever the load; StagePool refuses equal parameters."""
    shape, target = LayerShape(2048, 1024, 64, 4, dtype), KNOWN_TARGETS["sm_90"]
    for part in STAGES:
        stages = [stage for family in BUILT_IN for stage in family.legal_stages(shape, target, part)]
        families = {stage.family for stage in stages}
        assert families == ({family.name for family in BUILT_IN} if dtype in grouped_mm.DTYPES else {"tile", "gemv"})
        pool = StagePool(stages)
        assert len(pool) == len(stages) == len(np.unique(pool.features, axis=0)) > 400
        assert all(pool.index_of_params(pool.params[row]) == row for row in range(0, len(stages), 97))


def test_equal_parameters_are_refused(lab: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field of stages that stage_params does not have must not go unnoticed."""

    def without_loop(stage: Stage) -> dict[str, Value]:
        return {name: value for name, value in stage_params(stage).items() if name != "loop"}

    monkeypatch.setattr("fitune.search.pool.stage_params", without_loop)
    with pytest.raises(AssertionError, match="same parameters"):
        StagePool(lab.few_stages(lab.problem(), "gemm1", 10_000))


def test_a_measured_neighbour_points_to_its_best(lab: SimpleNamespace) -> None:
    key, near, land = lab.problem(512), lab.problem(256), lab.Landscape(4, failing=0.0)
    pool = StagePool(lab.few_stages(key, "gemm2", 300))
    predicted = cost.predict_many_us(pool.stages, key, lab.TARGET)
    times = [land.time_us(stage, near) for stage in pool.stages[::3]]
    task = NeighbourTask(
        pool.stages[::3],
        tuple(times),
        tuple(cost.predict_many_us(pool.stages[::3], near, lab.TARGET)),
        (1.0,),
    )
    truth = np.array([land.time_us(stage, key) for stage in pool.stages])

    def first_five(neighbours: list[NeighbourTask], coordinates: tuple[float, ...]) -> float:
        sampler = PoolSampler(pool, predicted, batch=5, neighbours=neighbours, coordinates=coordinates)
        study = optuna.create_study(sampler=sampler)
        return min(truth[pool.index(suggest_stage(study.ask(), pool))] for _ in range(5)) / truth.min() - 1.0

    assert first_five([task], (0.0,)) < 0.05 < first_five([], ())


def test_the_other_side_decides_between_heads(lab: SimpleNamespace) -> None:
    """A stage that is fast alone is not proposed where its partner at that tile_size is hopeless."""
    key, land = lab.problem(4096), lab.Landscape(1, failing=0.0)
    pool = StagePool(lab.few_stages(key, "gemm1", 300))
    sampler = PoolSampler(pool, cost.predict_many_us(pool.stages, key, lab.TARGET))
    study = optuna.create_study(sampler=sampler)
    heads = {(stage.family, stage.tile_size) for stage in pool.stages}
    assert len(heads) > 2
    wanted = ("tile", 128)
    sampler.set_other_side({head: (100.0 if head == wanted else 1e5) for head in heads})
    for _ in range(12):
        trial = study.ask()
        stage = suggest_stage(trial, pool)
        assert stage.tile_size == 128
        study.tell(trial, land.time_us(stage, key))


def test_leaves_a_corner_where_everything_failed(lab: SimpleNamespace) -> None:
    """With failures alone to go by, the proposals must move away from them instead of trying their neighbours."""
    key = lab.problem(1)
    pool = StagePool([stage for stage in lab.few_stages(key, "gemm2", 10_000) if stage.family == "tile"])
    predicted = cost.predict_many_us(pool.stages, key, lab.TARGET)
    likely = pool.stages[int(np.argmin(predicted))]

    def fails(stage: Stage) -> bool:
        return stage.gemm.block_n == likely.gemm.block_n

    study = optuna.create_study(sampler=PoolSampler(pool, predicted, batch=5))
    ended = []
    for _ in range(3):
        trials = [study.ask() for _ in range(5)]
        stages = [suggest_stage(trial, pool) for trial in trials]
        for trial, stage in zip(trials, stages, strict=True):
            ended.append(fails(stage))
            trial.set_user_attr("status", "compile_error" if ended[-1] else "ok")
            study.tell(trial, 1e4 if ended[-1] else 50.0)
    assert all(ended[:5]), "the estimates alone point into the corner"
    assert not all(ended), "three rounds in the corner where everything fails"


def test_importances_work_on_the_study(lab: SimpleNamespace) -> None:
    pool, _ = small_pool(lab, 120)
    study = optuna.create_study(sampler=RandomPoolSampler(pool, 3))
    study.optimize(lambda trial: float(suggest_stage(trial, pool).gemm.num_stages) ** 2, n_trials=100)
    found = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    assert max(found, key=found.get) == "num_stages"


def test_gradient_of_the_density() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (24, 5)).astype(float)
    x[5] = x[20]
    points = Points(x, np.repeat([0, 1], [10, 14]), rng.normal(size=24), rng.normal(size=24), np.full(24, 1e-4))
    differences = (x[:, None] - x[None]) ** 2
    between = np.array([[0.0, 2.0], [2.0, 0.0]])[np.ix_(points.task, points.task)]
    vector = Hyper.prior(5).vector()
    _, slope = _density(Hyper.of(vector), points, differences, between)
    for row in range(len(vector)):
        step = np.zeros(len(vector))
        step[row] = 1e-5
        up, _ = _density(Hyper.of(vector + step), points, differences, between)
        down, _ = _density(Hyper.of(vector - step), points, differences, between)
        assert slope[row] == pytest.approx((up - down) / 2e-5, rel=1e-3, abs=1e-3)


def test_believing_equals_measuring_without_noise() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 4, (20, 5)).astype(float) + np.arange(20)[:, None] * 0.01
    zeros = np.zeros(20, dtype=np.int64)
    everything = Points(x, zeros, np.zeros(20), rng.normal(size=20), np.full(20, 1e-4))
    distance, hyper = np.zeros((1, 1)), Hyper.prior(5)
    believing = Posterior(hyper, everything.take(np.arange(8)), everything, distance)
    mean = believing.mean.copy()
    believing.believe(12)
    known = everything.take(np.array([*range(8), 12]))
    known = Points(known.x, known.task, known.z, np.append(known.y[:8], mean[12]), np.append(known.noise[:8], 0.0))
    measured = Posterior(hyper, known, everything, distance)
    assert np.allclose(believing.variance, measured.variance, atol=1e-6)
    assert np.allclose(mean, measured.mean, atol=1e-4)


def test_normal_distribution_in_both_tails() -> None:
    z = np.linspace(-12.0, 6.0, 200)
    assert np.allclose(_normal_cdf(z), [0.5 * math.erfc(-v / math.sqrt(2)) for v in z], rtol=1e-6, atol=0.0)
