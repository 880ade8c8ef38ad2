"""Optuna samplers that can only ever propose legal, unmeasured members of an enumerated pool.

They work in a plain study:

    pool = StagePool(space.pool(problem, target, "gemm1"))
    study = optuna.create_study(sampler=PoolSampler(pool, cost.predict_many_us(pool.stages, problem, target)))
    study.optimize(lambda trial: time_us(suggest_stage(trial, pool)), n_trials=50)

Every field of a stage is a categorical parameter of its own, so importances work; all are drawn together, so no
illegal combination can come up. Trials that were pruned or failed count as measured. When the pool is used up,
`study.optimize` is stopped; under ask and tell the next suggestion raises PoolExhausted.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from fitune.errors import InputError
from fitune.search.pool import Floats, Head, StagePool
from fitune.search.proposer import NeighbourTask, Observation, Proposer


class PoolExhausted(Exception):
    """No unmeasured member is left to propose."""


class PoolBase(BaseSampler):
    """Bookkeeping all pool samplers share; `_choose` picks among the free members."""

    def __init__(self, pool: StagePool, seed: int = 0) -> None:
        self.pool = pool
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._asked: dict[int, int] = {}
        self._finished: weakref.WeakKeyDictionary[optuna.Study, dict[int, int | None]] = weakref.WeakKeyDictionary()

    def reseed_rng(self) -> None:
        self._rng = np.random.default_rng()

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self.pool.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        with self._lock:
            fixed = trial.system_attrs.get("fixed_params", {})
            taken = self._taken(study, trial.number)
            free = [index for index in self.pool.matching(fixed) if index not in taken]
            if not free:
                raise PoolExhausted(f"all {len(self.pool)} members of the pool are measured or being measured")
            index = free[0] if len(free) == 1 else self._choose(study, trial, np.array(free, dtype=np.int64))
            self._asked[trial.number] = index
        return dict(self.pool.params[index])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        known = param_name in self.pool.distributions
        raise ValueError(
            f"parameter {param_name!r} is {'suggested with other choices than' if known else 'not a field of'} "
            "the pool's stages; use suggest_stage"
        )

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        with self._lock:
            if len(study.get_trials(deepcopy=False)) < len(self.pool):
                return
            if len(self._taken(study, None)) >= len(self.pool):
                try:
                    study.stop()
                except RuntimeError:  # ask and tell: there is no loop to stop
                    return

    def free(self, study: optuna.Study) -> NDArray[np.int64]:
        """Positions of pool members that no trial of the study has."""
        taken = self._taken(study, None)
        return np.array([index for index in range(len(self.pool)) if index not in taken], dtype=np.int64)

    def _taken(self, study: optuna.Study, besides: int | None) -> set[int]:
        taken = set()
        for trial in study.get_trials(deepcopy=False):
            if trial.number == besides or trial.state is TrialState.WAITING:
                continue
            index = self._index(study, trial)
            if index is not None:
                taken.add(index)
        return taken

    def _index(self, study: optuna.Study, trial: FrozenTrial) -> int | None:
        """Position of the member a trial stands for; remembered once the trial is finished and cannot change."""
        finished = self._finished.setdefault(study, {})
        if trial.number in finished:
            return finished[trial.number]
        index = self.pool.index_of_params(trial.params)
        if index is None:
            index = self._asked.get(trial.number)
        if trial.state.is_finished():
            finished[trial.number] = index
        return index

    @abstractmethod
    def _choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.int64]) -> int:
        """The member to propose, one of `free`."""


class RandomPoolSampler(PoolBase):
    """Uniform over what is left."""

    def _choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.int64]) -> int:
        return int(self._rng.choice(free))


class SweepSampler(PoolBase):
    """Everything, cheapest estimate first."""

    def __init__(self, pool: StagePool, predicted_us: Sequence[float] | Floats, seed: int = 0) -> None:
        super().__init__(pool, seed)
        self._predicted = np.asarray(predicted_us, dtype=np.float64)

    def _choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.int64]) -> int:
        return int(free[np.argmin(self._predicted[free])])


class RepairedSampler(PoolBase):
    """A sampler of Optuna's, each proposal moved to the nearest member that is left.

    Nearest by how many fields differ; numbers count by how many choices lie between.
    """

    def __init__(self, pool: StagePool, inner: BaseSampler, seed: int = 0) -> None:
        super().__init__(pool, seed)
        self._inner = inner
        self._space = {name: choices for name, choices in pool.distributions.items() if not choices.single()}
        self._places = {
            name: np.array([distribution.choices.index(params[name]) for params in pool.params], dtype=np.float64)
            for name, distribution in self._space.items()
        }

    def reseed_rng(self) -> None:
        super().reseed_rng()
        self._inner.reseed_rng()

    def _choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.int64]) -> int:
        together = self._inner.sample_relative(study, trial, self._relative(study, trial))
        far = np.zeros(len(free))
        for name, places in self._places.items():
            distribution = self._space[name]
            wanted = (
                together[name] if name in together else self._inner.sample_independent(study, trial, name, distribution)
            )
            apart = np.abs(places[free] - distribution.choices.index(wanted))
            numeric = isinstance(wanted, int) and not isinstance(wanted, bool)
            far += apart / (len(distribution.choices) - 1) if numeric else apart > 0
        return int(free[np.argmin(far)])

    def _relative(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that the inner sampler draws together: what it says itself of finished trials."""
        known = self._inner.infer_relative_search_space(study, trial)
        return {name: self._space[name] for name in known if name in self._space}


def tpe_sampler(pool: StagePool, seed: int = 0) -> RepairedSampler:
    """Optuna's tree-structured Parzen estimator over the pool."""
    return RepairedSampler(pool, TPESampler(seed=seed), seed)


def gp_sampler(pool: StagePool, seed: int = 0) -> RepairedSampler:
    """Optuna's Gaussian process over the pool. Raises InputError where torch or scipy, which it needs, are missing."""
    missing = [name for name in ("torch", "scipy") if find_spec(name) is None]
    if missing:
        raise InputError(f"sampler 'gp' needs {' and '.join(missing)}; pip install {' '.join(missing)}, or use 'pool'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return RepairedSampler(pool, GPSampler(seed=seed), seed)


class PoolSampler(PoolBase):
    """The searching sampler: a Gaussian process over the pool with the cost model, and near keys, as its prior.

    `predicted_us` [len(pool)] orders the pool before anything was measured (all equal where it is None).
    `neighbours` are measured spaces of other keys, `coordinates` this key's place among theirs. Up to `batch`
    proposals are planned together, each as if the earlier ones had turned out as expected. Deterministic for a seed.
    """

    def __init__(
        self,
        pool: StagePool,
        predicted_us: Sequence[float] | Floats | None = None,
        *,
        seed: int = 0,
        batch: int = 1,
        neighbours: Sequence[NeighbourTask] = (),
        coordinates: Sequence[float] = (),
    ) -> None:
        super().__init__(pool, seed)
        predicted = np.ones(len(pool)) if predicted_us is None else np.asarray(predicted_us, dtype=np.float64)
        assert len(predicted) == len(pool), "one estimate per member of the pool"
        self.batch = batch
        self.proposer = Proposer(pool, predicted, seed=seed, neighbours=neighbours, coordinates=coordinates)
        self._queue: list[int] = []
        self._queue_at = -1

    def set_other_side(self, others_us: Mapping[Head, float]) -> None:
        """Known or expected µs of the other GEMM's best stage per head: from then on a stage is judged by the pair."""
        self.proposer.others_us = dict(others_us)
        self._queue.clear()

    def likely(self) -> list[int]:
        """Positions that are likely to come next, from the last round of planning."""
        return list(self.proposer.likely)

    def _choose(self, study: optuna.Study, trial: FrozenTrial, free: NDArray[np.int64]) -> int:
        told = sum(other.state.is_finished() for other in study.get_trials(deepcopy=False))
        allowed = set(free.tolist())
        queue = [index for index in self._queue if index in allowed] if told == self._queue_at else []
        if not queue:
            observed, pending = self.observations(study, trial.number)
            queue = self.proposer.propose(observed, pending, free, self.batch)
            self._queue_at = told
        self._queue = queue[1:]
        return queue[0]

    def observations(self, study: optuna.Study, besides: int | None = None) -> tuple[list[Observation], list[int]]:
        """What the study knows: finished members, and positions still being measured."""
        observed, pending = [], []
        for trial in study.get_trials(deepcopy=False):
            if trial.number == besides or trial.state is TrialState.WAITING:
                continue
            index = self._index(study, trial)
            if index is None:
                continue
            if not trial.state.is_finished():
                pending.append(index)
                continue
            failed = trial.state is not TrialState.COMPLETE or trial.user_attrs.get("status", "ok") != "ok"
            value = None if failed or trial.value is None or trial.value <= 0 else float(trial.value)
            observed.append(Observation(index, value, float(trial.user_attrs.get("halfwidth", 0.005))))
        return observed, pending
