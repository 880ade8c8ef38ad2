"""One key and GEMM as an Optuna study: the ledger of what was tried, told, and found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import optuna
from optuna.trial import TrialState, create_trial

from fitune import cost
from fitune.cache.store import Store
from fitune.errors import StoreError
from fitune.measure.protocol import Outcome
from fitune.problem import Key, Problem
from fitune.search.evidence import Evidence, StageResult
from fitune.search.history import basis_of, latest_regime
from fitune.search.plan import key_coordinates
from fitune.search.pool import Floats, Head, StagePool, head_of, suggest_stage
from fitune.search.proposer import NeighbourTask
from fitune.search.sampler import PoolBase, PoolSampler, RandomPoolSampler, SweepSampler, gp_sampler, tpe_sampler
from fitune.tactic import Stage, StageName
from fitune.target import Environment, Target

PENALTY: Final = 3.0
"""A failed stage is told as this many times the slowest that worked (or its estimate): finite, so samplers learn."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A stage that a study wants measured."""

    trial: optuna.Trial
    stage: Stage
    origin: str


class Ledger:
    """A study over the pool of one key and GEMM, with the results by stage."""

    def __init__(
        self, name: str, part: StageName, pool: StagePool, predicted_us: Floats, sampler: PoolBase, origin: str
    ) -> None:
        self.part: StageName = part
        self.pool = pool
        self.sampler = sampler
        self.results: dict[Stage, StageResult] = {}
        self._predicted_us = predicted_us
        self._origin = origin
        self._waiting: set[Stage] = set()
        self._withdrawn: set[Stage] = set()
        with quiet():
            self.study = optuna.create_study(study_name=name, sampler=sampler, direction="minimize")

    def load(self, results: Mapping[Stage, StageResult]) -> int:
        """Take over earlier results of pool members as finished trials; how many there were."""
        kept = {stage: result for stage, result in results.items() if stage in self.pool}
        self.results.update(kept)
        for stage, result in kept.items():
            self.study.add_trial(
                create_trial(
                    params=stage_params_of(self.pool, stage),
                    distributions=dict(self.pool.distributions),
                    value=self._told_us(stage, result),
                    user_attrs=attributes_of(stage, result),
                )
            )
        return len(kept)

    def want(self, stage: Stage, origin: str) -> None:
        """Put a pool member next in line, unless it is measured or in line already."""
        if stage in self.pool and stage not in self.results and stage not in self._waiting:
            self._waiting.add(stage)
            self.study.enqueue_trial(stage_params_of(self.pool, stage), user_attrs={"origin": origin})

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_left(self) -> int:
        """Pool members that can still be asked for."""
        return len(self.pool) - len(self.results) - len(self._withdrawn)

    def ask(self, count: int) -> list[Asked]:
        """Up to `count` unmeasured stages; those in line come first."""
        asked = []
        for _ in range(min(count, self.num_left)):
            trial = self.study.ask()
            stage = suggest_stage(trial, self.pool)
            self._waiting.discard(stage)
            origin = str(trial.user_attrs.get("origin", self._origin))
            asked.append(Asked(trial, stage, origin))
        return asked

    def tell(self, asked: Asked, outcome: Outcome) -> None:
        """Record how an asked stage ended. A failure is told with a finite penalty."""
        measured = outcome.measurement
        result = StageResult(
            outcome.status,
            None if measured is None else measured.median_us,
            0.0 if measured is None else measured.relative_halfwidth,
            asked.origin,
        )
        self.results[asked.stage] = result
        for name, value in attributes_of(asked.stage, result).items():
            asked.trial.set_user_attr(name, value)
        with quiet():
            self.study.tell(asked.trial, self._told_us(asked.stage, result))

    def withdraw(self, asked: Asked) -> None:
        """Close a trial whose stage the measurer left out; this study does not ask for it again."""
        self._withdrawn.add(asked.stage)
        with quiet():
            self.study.tell(asked.trial, state=TrialState.FAIL)

    @property
    def best_us(self) -> float | None:
        """The fastest time so far, in µs."""
        times = [result.time_us for result in self.results.values() if result.time_us is not None]
        return min(times, default=None)

    def ranked(self) -> dict[Head, list[tuple[float, Stage]]]:
        """Working stages per head with their µs, fastest first; equal times in text order."""
        found: dict[Head, list[tuple[float, Stage]]] = {}
        for stage, result in self.results.items():
            if result.time_us is not None:
                found.setdefault(head_of(stage), []).append((result.time_us, stage))
        for members in found.values():
            members.sort(key=lambda item: (item[0], str(item[1])))
        return found

    def expected_best_us(self) -> dict[Head, float]:
        """Per head of the pool the fastest measured time, or a lower expected one of a member not yet measured."""
        best = np.full(len(self.pool.heads), math.inf)
        np.minimum.at(best, self.pool.head_index, self._expected_us())
        return dict(zip(self.pool.heads, best.tolist(), strict=True))

    def promising(self, head: Head, count: int) -> list[Stage]:
        """Unmeasured stages of a head, the ones expected to be fastest first."""
        expected_us = self._expected_us()
        left = [
            (float(expected_us[row]), str(stage), stage)
            for row, stage in enumerate(self.pool.stages)
            if head_of(stage) == head and stage not in self.results
        ]
        return [stage for _, _, stage in sorted(left, key=lambda item: item[:2])[:count]]

    def _expected_us(self) -> Floats:
        """µs of every member, float64 [len(pool)]: measured where it was (infinite: it failed), else expected."""
        if isinstance(self.sampler, PoolSampler):
            observed, _ = self.sampler.observations(self.study)
            return self.sampler.proposer.expected_us(observed)
        times = {self.pool.index(stage): result.time_us for stage, result in self.results.items()}
        ratios = sorted(time_us / self._predicted_us[row] for row, time_us in times.items() if time_us is not None)
        expected: Floats = self._predicted_us * (ratios[len(ratios) // 2] if ratios else 1.0)
        for row, time_us in times.items():
            expected[row] = math.inf if time_us is None else time_us
        return expected

    def _told_us(self, stage: Stage, result: StageResult) -> float:
        if result.time_us is not None:
            return result.time_us
        times = [other.time_us for other in self.results.values() if other.time_us is not None]
        row = self.pool.index(stage)
        slowest = max([*times, 1.0 if row is None else float(self._predicted_us[row]), 1.0])
        return PENALTY * slowest


def stage_params_of(pool: StagePool, stage: Stage) -> dict[str, str | int | bool]:
    index = pool.index(stage)
    assert index is not None, f"{stage} is no member of the pool"
    return dict(pool.params[index])


def open_ledger(
    key: Key,
    problem: Problem,
    target: Target,
    part: StageName,
    stages: Sequence[Stage],
    evidence: Evidence,
    *,
    sampler: str = "pool",
    sweep: bool = False,
    seed: int = 0,
    batch: int = 1,
) -> Ledger:
    """A ledger over `stages` with the evidence's results of the key loaded, and its neighbours known to the sampler."""
    pool = StagePool(stages)
    predicted = cost.predict_many_us(pool.stages, problem, target)
    made: PoolBase
    if sampler == "exhaustive" or sweep:
        made = SweepSampler(pool, predicted, seed)
    elif sampler == "random":
        made = RandomPoolSampler(pool, seed)
    elif sampler == "tpe":
        made = tpe_sampler(pool, seed)
    elif sampler == "gp":
        made = gp_sampler(pool, seed)
    else:
        made = PoolSampler(
            pool,
            predicted,
            seed=seed,
            batch=batch,
            neighbours=_neighbour_tasks(key, part, target, evidence),
            coordinates=key_coordinates(key),
        )
    origin = "exhaustive" if isinstance(made, SweepSampler) else "sampler"
    ledger = Ledger(f"{key.layer.ep_label} {key.num_tokens} tokens {part}", part, pool, predicted, made, origin)
    ledger.load(evidence.stages(key, part))
    return ledger


def study_of(
    store: Store,
    key: Key,
    part: StageName,
    *,
    target: Target,
    environment: Environment | None = None,
    stages: Sequence[Stage] | None = None,
) -> optuna.Study:
    """The Optuna study of a key and GEMM, built from a store: one finished trial per stage tried.

    `stages` is the pool (default: the stages tried); `environment` says which records are comparable (default: that
    of `basis_of`), those of the latest regime. Failed stages have a penalty as value and their
    status in the user attribute `status`. Raises StoreError where the store has nothing of that key.
    """
    records, environments = store.records(lambda other: other == key), store.environments()
    if environment is None:
        environment = basis_of(records, store.decisions(lambda other: other == key).get(key), environments)
    evidence = None
    if environment is not None:
        regime = latest_regime(records, environment, environments)
        evidence = Evidence.load(records, environments, environment, regime)
    tried = evidence.stages(key, part) if evidence is not None else {}
    if evidence is None or not tried:
        raise StoreError(f"store {store.path} has no {part} stages of {key.layer.ep_label}, {key.num_tokens} tokens")
    pool = list(dict.fromkeys([*(stages or ()), *tried]))
    return open_ledger(key, key.problem(), target, part, pool, evidence, sampler="pool").study


def _neighbour_tasks(key: Key, part: StageName, target: Target, evidence: Evidence) -> list[NeighbourTask]:
    tasks = []
    for other in evidence.neighbours(key, part):
        results = evidence.stages(other, part)
        timed = {stage: result.time_us for stage, result in results.items() if result.time_us is not None}
        failed = tuple(stage for stage, result in results.items() if result.time_us is None)
        predicted = cost.predict_many_us(tuple(timed), other.problem(), target)
        tasks.append(
            NeighbourTask(
                tuple(timed), tuple(timed.values()), tuple(predicted.tolist()), key_coordinates(other), failed
            )
        )
    return tasks


def attributes_of(stage: Stage, result: StageResult) -> dict[str, str | float]:
    """What a trial says of its stage beside the value."""
    return {
        "stage": str(stage),
        "status": str(result.status),
        "halfwidth": result.halfwidth,
        "origin": result.origin,
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Optuna's per-trial log lines off the terminal. Costs nothing where an outer one does so already."""
    level = optuna.logging.get_verbosity()
    if level >= optuna.logging.WARNING:
        yield
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
