"""One side of a diff: its decisions, and what its records show was tried and how long it took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

from fitune.diff.spaces import value_on
from fitune.problem import Key, Problem
from fitune.record import Decision, Measurement, Record, Regime, Status
from fitune.tactic import STAGES, Stage, StageName, Tactic
from fitune.target import KNOWN_TARGETS, Environment, Target, chip_of

EXHAUSTIVE: Final = "exhaustive"


class StoreLike(Protocol):
    """What a side needs of a store (`fitune.cache.Store` has it)."""

    def environments(self) -> dict[str, Environment]: ...
    def records(self) -> list[Record]: ...
    def decisions(self) -> dict[Key, Decision]: ...


@dataclass(frozen=True, slots=True)
class Side:
    """What one side of a comparison brings: decisions by key, and every record behind them."""

    label: str
    decisions: Mapping[Key, Decision]
    records: Sequence[Record]
    environments: Mapping[str, Environment]


def side_of(store: StoreLike, *, label: str, local_experts: int | None = None) -> Side:
    """A store as one side; with `local_experts` only what belongs to ranks that hold that many experts."""

    def wanted(key: Key) -> bool:
        return local_experts is None or key.layer.local_experts == local_experts

    decisions = {key: decision for key, decision in store.decisions().items() if wanted(key)}
    records = [record for record in store.records() if wanted(record.key)]
    return Side(label, decisions, records, store.environments())


@dataclass
class Tried:
    """Everything the records of one side say about one key, by part and tactic."""

    records: dict[Tactic | Stage, list[Record]] = field(default_factory=dict)

    def of(self, tactic: Tactic | Stage) -> Sequence[Record]:
        return self.records.get(tactic, ())

    def add(self, record: Record) -> None:
        self.records.setdefault(record.tactic, []).append(record)

    def layers(self) -> Iterator[Record]:
        """Successful whole-layer records."""
        for tactic, records in self.records.items():
            if isinstance(tactic, Tactic):
                yield from (record for record in records if record.status is Status.OK)


class SideIndex:
    """A side prepared for look-ups by key; built once per diff, filled as rows ask for it."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._by_key: dict[Key, list[Record]] = {}
        for record in side.records:
            self._by_key.setdefault(record.key, []).append(record)
        self._tried: dict[Key, Tried] = {}
        self._values: dict[tuple[StageName, tuple[str, ...]], frozenset[tuple[Any, ...]]] = {}

    @property
    def label(self) -> str:
        return self.side.label

    def tried(self, key: Key) -> Tried:
        """What was tried on one key (never None; empty where nothing was)."""
        found = self._tried.get(key)
        if found is None:
            found = Tried()
            for record in self._by_key.get(key, ()):
                found.add(record)
            self._tried[key] = found
        return found

    def environment(self, identity: str) -> Environment | None:
        return self.side.environments.get(identity)

    def values_known(self, name: StageName, axes: tuple[str, ...]) -> frozenset[tuple[Any, ...]]:
        """Every combination of values on `axes` that this side ever tried in a stage, on any key."""
        found = self._values.get((name, axes))
        if found is None:
            found = frozenset(tuple(value_on(stage, axis) for axis in axes) for stage in self.stages_known[name])
            self._values[name, axes] = found
        return found

    @cached_property
    def stages_known(self) -> dict[StageName, frozenset[Stage]]:
        """Every stage this side ever tried or raced, on any key, by stage name."""
        known: dict[StageName, set[Stage]] = {name: set() for name in STAGES}
        for record in self.side.records:
            if isinstance(record.tactic, Stage):
                known[record.tactic.stage].add(record.tactic)
            else:
                for name in STAGES:
                    known[name].add(record.tactic.stage(name))
        for decision in self.side.decisions.values():
            for tactic in (decision.chosen, decision.default, *(member.tactic for member in decision.members)):
                for name in STAGES:
                    known[name].add(tactic.stage(name))
        return {name: frozenset(stages) for name, stages in known.items()}


@dataclass(frozen=True)
class Cell:
    """One side's decision on one key with its surroundings: half of a row."""

    index: SideIndex
    key: Key
    decision: Decision

    @property
    def label(self) -> str:
        return self.index.label

    @property
    def tactic(self) -> Tactic:
        return self.decision.chosen

    @cached_property
    def problem(self) -> Problem:
        return self.key.problem()

    @cached_property
    def environment(self) -> Environment | None:
        """Versions and chip of the decision's run; None where the store does not hold them."""
        return self.index.environment(self.decision.environment_id)

    @cached_property
    def target(self) -> Target | None:
        """The chip legality is judged for; None where the environment or its arch is not known."""
        environment = self.environment
        if environment is None or environment.arch not in KNOWN_TARGETS:
            return None
        return chip_of(environment)

    @cached_property
    def measurement(self) -> Measurement | None:
        """The interleaved time behind the choice: the chosen member's, else its latest layer record's."""
        member = self.decision.member(self.tactic)
        if member is not None:
            return member.measurement
        records = [record for record in self.tried.of(self.tactic) if record.measurement is not None]
        return records[-1].measurement if records else None

    @property
    def regime(self) -> Regime | None:
        return None if self.measurement is None else self.measurement.regime

    @property
    def tried(self) -> Tried:
        return self.index.tried(self.key)

    @cached_property
    def swept(self) -> bool:
        """Whether the stages tried here come from an exhaustive sweep, not from a sampler that may avoid some."""
        origins = {
            record.origin
            for tactic, records in self.tried.records.items()
            if isinstance(tactic, Stage)
            for record in records
        }
        return origins == {EXHAUSTIVE}

    @cached_property
    def stages_tried(self) -> frozenset[Stage]:
        """Every stage seen on this key: its records', its finalists', its default's."""
        decision = self.decision
        tactics = {decision.chosen, decision.default, *(member.tactic for member in decision.members)}
        stages: set[Stage] = set()
        for tactic in self.tried.records:
            if isinstance(tactic, Stage):
                stages.add(tactic)
            else:
                tactics.add(tactic)
        return frozenset(stages | {tactic.stage(name) for tactic in tactics for name in STAGES})
