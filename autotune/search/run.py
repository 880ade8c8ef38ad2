"""The search: keys in order, both GEMMs of a key in turns, whole layers at the end, everything stored at once."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from fitune.cache.segment import StoreWriter
from fitune.cache.store import Store
from fitune.cost import predict_many_us
from fitune.measure.protocol import Measurer, Outcome
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Key, Problem, key_of
from fitune.record import Decision, Record
from fitune.search.decide import decide, effort
from fitune.search.events import (
    Event,
    FinalsStarted,
    KeyDecided,
    KeyKept,
    KeySkipped,
    KeyStarted,
    SearchSummary,
    TrialDone,
)
from fitune.search.evidence import Evidence, same_kernels
from fitune.search.join import Finalist, best_pair_us, finalists
from fitune.search.plan import (
    SWEEP_POOL,
    Clock,
    LegalSpace,
    RecordedSpace,
    SearchPlan,
    SpaceSource,
    key_distance,
    order_problems,
    restrict_to_recording,
)
from fitune.search.sampler import PoolSampler
from fitune.search.study import Asked, Ledger, open_ledger, quiet
from fitune.tactic import STAGES, Stage, StageName, Tactic

HOPELESS: Final = 1.5
"""A stage above this many times its GEMM's best so far may be left with the samples it has."""
LEAST_GAIN: Final = 0.001
LEAST_TRIALS: Final = 48
"""Open-ended searches end once the best proposal promises less than LEAST_GAIN, but not before LEAST_TRIALS."""
FINALS_SHARE: Final = 0.25
COMPLETE_MARGIN: Final = 1.05
WARM_PER_NEIGHBOUR: Final = (2, 1, 1)
LOOK_AHEAD: Final = 6
"""Stages of the next key and GEMM, the cheapest by the cost model, that are compiled while this one is measured."""
FORMER_STAGES: Final = 6
"""Stages tried first because they were the fastest of the key under other kernels."""


def run_search(
    plan: SearchPlan,
    measurer: Measurer,
    store: Store,
    listener: Callable[[Event], None] = lambda event: None,
    *,
    space: SpaceSource | None = None,
    clock: Clock = time.monotonic,
) -> SearchSummary:
    """Search every problem of the plan and store records and decisions as they come.

    Resumes by itself: stages that the store holds for the same device, kernels and regime are not measured again,
    and keys decided under the same kernels are kept unless `plan.force`. On a recording only what it holds is
    searched. KeyboardInterrupt and errors of store or measurer propagate; what was measured is stored by then.
    Raises StoreError (the store, or a problem that a recording lacks) and MeasureError.
    """
    if space is None:
        space = LegalSpace()
    if isinstance(measurer, RecordingMeasurer):
        if not isinstance(space, RecordedSpace):
            space = restrict_to_recording(measurer, space)
        for problem in plan.problems:
            measurer.require(problem)
    environments = store.environments()
    evidence = Evidence.load(store.records(), environments, measurer.environment, getattr(measurer, "regime", None))
    decided = {
        key: decision
        for key, decision in store.decisions().items()
        if decision.environment_id in environments
        and same_kernels(environments[decision.environment_id], measurer.environment)
    }
    with store.writer() as writer:
        writer.append(measurer.environment)
        run = _Run(plan, measurer, writer, listener, space, clock, evidence, decided)
        with quiet():
            return run.all_keys()


@dataclass(slots=True)
class _Run:
    plan: SearchPlan
    measurer: Measurer
    writer: StoreWriter
    listener: Callable[[Event], None]
    space: SpaceSource
    clock: Clock
    evidence: Evidence
    decided: dict[Key, Decision]
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    started_s: float = 0.0
    finals_s: float = 0.0
    measured: int = 0
    reused: int = 0
    missing: int = 0
    made: list[Decision] = field(default_factory=list)
    skipped: list[tuple[Key, str]] = field(default_factory=list)

    def all_keys(self) -> SearchSummary:
        self.started_s = self.clock()
        ordered = [
            (key_of(problem, self.measurer.target.device), problem) for problem in order_problems(self.plan.problems)
        ]
        kept = [key for key, _ in ordered if key in self.decided and not self.plan.force]
        for key in kept:
            self.listener(KeyKept(key, f"decided before with the same kernels ({self.decided[key].state})"))
        todo = [(key, problem) for key, problem in ordered if key not in set(kept)]
        for index, (key, problem) in enumerate(todo):
            deadline = self._deadline(len(todo) - index)
            if deadline is not None and self.clock() >= deadline:
                self._skip(key, "the budget is used up")
                continue
            self._one_key(key, problem, index, len(todo), deadline, [problem for _, problem in todo[index + 1 :][:1]])
        return SearchSummary(
            len(ordered),
            tuple(self.made),
            tuple(kept),
            tuple(self.skipped),
            self.measured,
            self.reused,
            self.missing,
            self.clock() - self.started_s,
            self.run_id,
        )

    def _deadline(self, keys_left: int) -> float | None:
        """When the next key must be done: its fair share of what is left of the budget."""
        if self.plan.budget_s is None:
            return None
        now = self.clock()
        return now + (self.started_s + self.plan.budget_s - now) / keys_left

    def _one_key(
        self, key: Key, problem: Problem, index: int, total: int, deadline: float | None, coming: list[Problem]
    ) -> None:
        default = self.space.default(problem, self.measurer.target)
        ledgers = [self._ledger(key, problem, part, default) for part in STAGES]
        for other in coming:
            self._look_ahead(other)
        missing = sum(self.space.missing(problem, self.measurer.target, part) for part in STAGES)
        before = sum(len(ledger.results) for ledger in ledgers)
        self.reused, self.missing = self.reused + before, self.missing + missing
        pool = sum(len(ledger.pool) for ledger in ledgers)
        self.listener(KeyStarted(key, index, total, before, pool, missing))
        stages_end = None
        if deadline is not None:
            share = deadline - self.clock()
            stages_end = deadline - min(FINALS_SHARE * share, 1.2 * self.finals_s if self.made else share)
        reserve = 0 if self.plan.trials is None else min(4, self.plan.trials // 8)
        self._search_stages(key, problem, ledgers, stages_end, reserve)
        self._complete(key, problem, ledgers)
        if reserve:
            self._search_stages(key, problem, ledgers, stages_end, 0)
        self._finish(key, problem, ledgers, default, index, total)

    def _ledger(self, key: Key, problem: Problem, part: StageName, default: Tactic) -> Ledger:
        """The part's ledger with the default and the neighbours' best in line."""
        target = self.measurer.target
        stages = list(self.space.pool(problem, target, part))
        first = default.stage(part)
        if first not in stages and not isinstance(self.measurer, RecordingMeasurer):
            stages.append(first)
        ledger = open_ledger(
            key,
            problem,
            target,
            part,
            stages,
            self.evidence,
            sampler=self.plan.sampler,
            sweep=self._sweeps(len(stages)),
            seed=self.plan.seed,
            batch=self.plan.batch,
        )
        ledger.want(first, "default")
        if self.plan.sampler == "pool":
            for stage in self.evidence.former_stages(key, part, FORMER_STAGES, ledger.pool):
                ledger.want(stage, "former")
            for neighbour, most in zip(self.evidence.neighbours(key, part), WARM_PER_NEIGHBOUR, strict=False):
                for stage in self.evidence.best_stages(neighbour, part, most):
                    ledger.want(stage, origin_of(neighbour))
        return ledger

    def _look_ahead(self, problem: Problem) -> None:
        """Have the first candidates of the key that comes next compiled while this one is measured."""
        if self.plan.sampler != "pool" or isinstance(self.measurer, RecordingMeasurer):
            return
        target, key = self.measurer.target, key_of(problem, self.measurer.target.device)
        default = self.space.default(problem, target)
        for part in STAGES:
            stages = list(self.space.pool(problem, target, part))
            cheapest = np.argsort(predict_many_us(stages, problem, target), kind="stable")[:LOOK_AHEAD]
            likely = [default.stage(part), *self.evidence.former_stages(key, part, FORMER_STAGES, stages)]
            for neighbour, most in zip(self.evidence.neighbours(key, part), WARM_PER_NEIGHBOUR, strict=False):
                likely += self.evidence.best_stages(neighbour, part, most)
            known, members = self.evidence.stages(key, part), {default.stage(part), *stages}
            likely += [stages[row] for row in cheapest]
            self.measurer.warm(problem, [stage for stage in dict.fromkeys(likely) if stage in members - known.keys()])

    def _sweeps(self, pool: int) -> bool:
        """A small pool is swept whole, in the order of the estimates, where nothing limits it."""
        plan = self.plan
        return plan.sampler == "pool" and plan.trials is None and plan.budget_s is None and pool <= SWEEP_POOL

    def _planned(self, ledger: Ledger) -> int:
        return len(ledger.pool) if self.plan.trials is None else min(self.plan.trials, len(ledger.pool))

    def _search_stages(
        self, key: Key, problem: Problem, ledgers: list[Ledger], end: float | None, reserve: int
    ) -> None:
        """Batches of both GEMMs in turns until none has anything left to try; `reserve` trials stay unused."""
        open_parts = [ledger for ledger in ledgers if ledger.num_left]
        while open_parts:
            for ledger in list(open_parts):
                room = self._planned(ledger) - len(ledger.results)
                if self._planned(ledger) < len(ledger.pool):
                    room -= reserve
                if room <= 0 or (end is not None and ledger.results and self.clock() >= end) or self._is_done(ledger):
                    open_parts.remove(ledger)
                    continue
                other = ledgers[1 - ledgers.index(ledger)]
                if isinstance(ledger.sampler, PoolSampler) and other.results:
                    ledger.sampler.set_other_side(other.expected_best_us())
                # The default first and alone with its like: the other GEMM's start is judged by it.
                asked = ledger.ask(min(room, max(self.plan.batch, min(ledger.num_waiting, 2 * self.plan.batch))))
                self._measure(key, problem, ledger, asked, room)

    def _is_done(self, ledger: Ledger) -> bool:
        """Whether no unmeasured stage promises to win, in a search that nothing else ends."""
        sampler, fixed = ledger.sampler, self.plan.trials is not None
        if fixed or not isinstance(sampler, PoolSampler) or len(ledger.pool) <= SWEEP_POOL:
            return not ledger.num_left
        return len(ledger.results) >= LEAST_TRIALS and sampler.proposer.expected_gain < LEAST_GAIN

    def _measure(self, key: Key, problem: Problem, ledger: Ledger, asked: list[Asked], room: int) -> None:
        waiting = {item.stage: item for item in asked}
        if isinstance(ledger.sampler, PoolSampler) and room > len(asked):
            self.measurer.warm(problem, [ledger.pool.stages[row] for row in ledger.sampler.likely()])
        best_us = ledger.best_us
        hopeless_us = None if best_us is None else HOPELESS * best_us
        for outcome in self.measurer.stages(problem, list(waiting), hopeless_us):
            assert isinstance(outcome.tactic, Stage), "a stage was asked for"
            item = waiting.pop(outcome.tactic)
            self._store(key, outcome, item.origin)
            ledger.tell(item, outcome)
            self.measured += 1
            done, planned = len(ledger.results), self._planned(ledger)
            self.listener(TrialDone(key, ledger.part, outcome, ledger.best_us, done, planned))
        for item in waiting.values():
            ledger.withdraw(item)

    def _complete(self, key: Key, problem: Problem, ledgers: list[Ledger]) -> None:
        """Where one GEMM's best at a tile_size could win but for a missing partner, measure its likely partners."""
        first, second = ledgers
        best_us = best_pair_us(first.ranked(), second.ranked())
        for ledger, other in ((first, second), (second, first)):
            expected, known, own = ledger.expected_best_us(), other.ranked(), ledger.ranked()
            lacking = sorted(
                (members[0][0] + expected[head], head)
                for head, members in known.items()
                if head not in own and math.isfinite(expected.get(head, math.inf))
            )
            for total, head in lacking:
                room = self._planned(ledger) - len(ledger.results)
                if room > 0 and (best_us is None or total < COMPLETE_MARGIN * best_us):
                    for stage in ledger.promising(head, min(2, room)):
                        ledger.want(stage, "sampler")
                    self._measure(key, problem, ledger, ledger.ask(ledger.num_waiting), 0)

    def _finish(
        self, key: Key, problem: Problem, ledgers: list[Ledger], default: Tactic, index: int, total: int
    ) -> None:
        """Measure finalists against each other and store the decision."""
        began = self.clock()
        near = self._near_decisions(key)
        preferred = {decision.chosen: origin_of(decision.key) for decision in reversed(near)}
        used = {other.chosen.stage(name) for other in near for name in STAGES}
        first, second = ledgers
        chosen = finalists(
            default,
            first.ranked(),
            second.ranked(),
            preferred,
            self.plan.finalists,
            lambda tactic: effort(tactic, problem.shape, used),
        )
        outcomes = self._finals(key, problem, chosen)
        working = [outcome.tactic for outcome in outcomes if outcome.measurement is not None]
        if not working or not isinstance(working[0], Tactic):
            errors = sorted({f"{outcome.status}: {outcome.error}" for outcome in outcomes})
            self._skip(key, f"no whole layer ran ({'; '.join(errors)})")
            return
        raced = default if default in working else working[0]
        decision = decide(
            key,
            default,
            outcomes,
            self.measurer.noise(problem, raced),
            neighbours=[other.chosen for other in near],
            used_stages=used,
            environment_id=self.measurer.environment.id,
            run_id=self.run_id,
            time_s=time.time(),
            origin="recorded" if isinstance(self.measurer, RecordingMeasurer) else "measured",
        )
        assert decision is not None, "a finalist worked"
        self.writer.append(decision)
        self.decided[key] = decision
        self.made.append(decision)
        self.finals_s = max(0.7 * self.finals_s, self.clock() - began)
        self.listener(KeyDecided(decision, index, total))

    def _finals(self, key: Key, problem: Problem, chosen: list[Finalist]) -> list[Outcome]:
        """Interleaved whole layers; those of a run that broke off between finals and decision are taken over."""
        tactics = tuple(item.tactic for item in chosen)
        known = None if self.plan.force else self.evidence.finals(key, tactics)
        if known is not None:
            return [
                Outcome(tactic, known[tactic].status, known[tactic].measurement, error=known[tactic].error)
                for tactic in tactics
            ]
        self.listener(FinalsStarted(key, tactics))
        outcomes = self.measurer.finals(problem, tactics, self.plan.rounds)
        for item, outcome in zip(chosen, outcomes, strict=True):
            self._store(key, outcome, item.origin)
        return outcomes

    def _near_decisions(self, key: Key) -> list[Decision]:
        """Decisions of other keys of the same layer shape and device, nearest first."""
        near = [(key_distance(key, other), other) for other in self.decided if other != key]
        return [self.decided[other] for distance, other in sorted(near) if math.isfinite(distance)]

    def _store(self, key: Key, outcome: Outcome, origin: str) -> None:
        whole = isinstance(outcome.tactic, Tactic)
        record = Record(
            key=key,
            part="layer" if isinstance(outcome.tactic, Tactic) else outcome.tactic.stage,
            tactic=outcome.tactic,
            status=outcome.status,
            environment_id=self.measurer.environment.id,
            run_id=self.run_id,
            time_s=time.time(),
            origin=origin,
            phase="final" if whole else "search",
            measurement=outcome.measurement,
            accuracy=outcome.accuracy,
            binary=outcome.binary,
            error=outcome.error,
        )
        self.writer.append(record)
        self.evidence.add(record)

    def _skip(self, key: Key, reason: str) -> None:
        self.skipped.append((key, reason))
        self.listener(KeySkipped(key, reason))


def origin_of(key: Key) -> str:
    """How a record says that a candidate came from another key."""
    return f"neighbour:L{key.layer.local_experts}/N{key.num_tokens}"
