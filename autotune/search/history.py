"""The stages of each key and GEMM of a store whose times may stand side by side, as a search would load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fitune.cache.segment import KeyFilter
from fitune.cache.store import Store
from fitune.cells import grid_of
from fitune.problem import Key
from fitune.record import Decision, Record, Regime
from fitune.search.evidence import same_kernels, same_regime
from fitune.tactic import STAGES, Stage, StageName
from fitune.target import Environment


@dataclass(frozen=True, slots=True)
class History:
    """One key and GEMM: the last comparable record of each stage tried, oldest first.

    `left_out` counts the other search records of the GEMM: measured again later, or under other kernels or another
    regime.
    """

    key: Key
    part: StageName
    environment: Environment
    decision: Decision | None
    records: tuple[Record, ...]
    left_out: int

    @property
    def times_us(self) -> dict[Stage, float]:
        """µs of the stages that have a time, oldest first."""
        return {
            record.tactic: record.measurement.median_us
            for record in self.records
            if record.measurement is not None and isinstance(record.tactic, Stage)
        }


def histories(store: Store, where: KeyFilter | None = None) -> list[History]:
    """Every key and GEMM of a store with stages of a search, by layer, EP, tokens and GEMM. Raises StoreError."""
    environments, decisions = store.environments(), store.decisions(where)
    by_key: dict[Key, list[Record]] = {}
    for record in store.records(where):
        by_key.setdefault(record.key, []).append(record)
    found = []
    for key in sorted(by_key, key=lambda key: (grid_of(key.layer), -key.layer.local_experts, key.num_tokens)):
        records, decision = by_key[key], decisions.get(key)
        environment = basis_of(records, decision, environments)
        if environment is not None:
            made = (_history(key, part, environment, decision, records, environments) for part in STAGES)
            found += [history for history in made if history.records]
    return found


def basis_of(
    records: Sequence[Record], decision: Decision | None, environments: Mapping[str, Environment]
) -> Environment | None:
    """What the records of a key must be comparable with: the environment of its decision, else of its latest record."""
    chosen = decision.environment_id if decision is not None else (records[-1].environment_id if records else "")
    return environments.get(chosen)


def latest_regime(
    records: Sequence[Record], environment: Environment, environments: Mapping[str, Environment]
) -> Regime | None:
    """The regime of the latest time of a stage that is comparable with `environment`; None where there is none."""
    for record in reversed(records):
        if record.phase == "search" and record.measurement is not None and _fits(record, environment, environments):
            return record.measurement.regime
    return None


def _fits(record: Record, environment: Environment, environments: Mapping[str, Environment]) -> bool:
    taken_in = environments.get(record.environment_id)
    return taken_in is not None and same_kernels(taken_in, environment)


def _history(
    key: Key,
    part: StageName,
    environment: Environment,
    decision: Decision | None,
    records: Sequence[Record],
    environments: Mapping[str, Environment],
) -> History:
    regime = latest_regime(records, environment, environments)
    searched = [record for record in records if record.part == part and record.phase == "search"]
    last: dict[object, Record] = {}
    for record in searched:
        if _fits(record, environment, environments) and same_regime(record, regime):
            last.pop(record.tactic, None)
            last[record.tactic] = record
    return History(key, part, environment, decision, tuple(last.values()), len(searched) - len(last))
