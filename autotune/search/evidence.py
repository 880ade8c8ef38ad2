"""What a store already knows about stages: its records of this device, these kernels and this regime.

Times under other kernels are no results. What they found fast is still the best guess of where to look first.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from fitune.problem import Key
from fitune.record import Record, Regime, Status
from fitune.search.plan import key_distance
from fitune.tactic import Stage, StageName, Tactic
from fitune.target import Environment

MAX_NEIGHBOURS = 3
MAX_DISTANCE = 6.0


@dataclass(frozen=True, slots=True)
class StageResult:
    """How one stage ended on one key: µs (None: it failed), relative half-width of the interval, origin."""

    status: Status
    time_us: float | None
    halfwidth: float
    origin: str = "sampler"

    @classmethod
    def of(cls, record: Record) -> StageResult:
        measured = record.measurement
        if measured is None:
            return cls(record.status, None, 0.0, record.origin)
        return cls(record.status, measured.median_us, measured.relative_halfwidth, record.origin)


class Evidence:
    """Stage results and finals by key, from a store at first and from the running search as it goes."""

    def __init__(self, environment: Environment, regime: Regime | None = None) -> None:
        self._environment = environment
        self._regime = regime
        self._stages: dict[tuple[Key, StageName], dict[Stage, StageResult]] = {}
        self._finals: dict[Key, dict[str, dict[Tactic, Record]]] = {}
        self._former: dict[tuple[Key, StageName], dict[Stage, float]] = {}

    @classmethod
    def load(
        cls,
        records: Iterable[Record],
        environments: Mapping[str, Environment],
        environment: Environment,
        regime: Regime | None = None,
    ) -> Evidence:
        """The comparable records of a store; later records of a stage replace earlier ones."""
        found = cls(environment, regime)
        fitting = {name for name, other in environments.items() if same_kernels(other, environment)}
        for record in sorted(records, key=lambda item: item.time_s):
            if record.environment_id in fitting and found._comparable(record):
                found.add(record)
            elif record.environment_id not in fitting:
                found._add_former(record)
        return found

    def _add_former(self, record: Record) -> None:
        if isinstance(record.tactic, Stage) and record.measurement is not None:
            times = self._former.setdefault((record.key, record.tactic.stage), {})
            times[record.tactic] = record.measurement.median_us

    def former_stages(self, key: Key, part: StageName, most: int, legal: Container[Stage]) -> list[Stage]:
        """Legal stages of a key and GEMM that were fastest on this device under other kernels, fastest first."""
        times = self._former.get((key, part), {})
        return sorted((stage for stage in times if stage in legal), key=lambda stage: (times[stage], str(stage)))[:most]

    def _comparable(self, record: Record) -> bool:
        return same_regime(record, self._regime)

    def add(self, record: Record) -> None:
        if isinstance(record.tactic, Tactic):
            runs = self._finals.setdefault(record.key, {})
            runs.setdefault(record.run_id, {})[record.tactic] = record
        elif record.phase == "search":
            self._stages.setdefault((record.key, record.tactic.stage), {})[record.tactic] = StageResult.of(record)

    def stages(self, key: Key, part: StageName) -> dict[Stage, StageResult]:
        """Results of a key and GEMM; empty where there are none."""
        return self._stages.get((key, part), {})

    def neighbours(self, key: Key, part: StageName, most: int = MAX_NEIGHBOURS) -> list[Key]:
        """The nearest other keys with times of that GEMM, nearest first."""
        found = []
        for (other, other_part), results in self._stages.items():
            if other == key or other_part != part or not any(result.time_us for result in results.values()):
                continue
            distance = key_distance(key, other)
            if distance <= MAX_DISTANCE:
                found.append((distance, other))
        return [other for _, other in sorted(found)[:most]]

    def finals(self, key: Key, tactics: Iterable[Tactic]) -> dict[Tactic, Record] | None:
        """Records of one run's finals that cover all the tactics, if there is such a run."""
        wanted = set(tactics)
        for records in reversed(list(self._finals.get(key, {}).values())):
            if wanted <= records.keys() and any(record.status is Status.OK for record in records.values()):
                return {tactic: records[tactic] for tactic in wanted}
        return None

    def best_stages(self, key: Key, part: StageName, most: int) -> list[Stage]:
        """The fastest stages of a key and GEMM, fastest first."""
        timed = [
            (result.time_us, str(stage), stage)
            for stage, result in self.stages(key, part).items()
            if result.time_us is not None and math.isfinite(result.time_us)
        ]
        return [stage for _, _, stage in sorted(timed, key=lambda item: item[:2])[:most]]


def same_kernels(a: Environment, b: Environment) -> bool:
    """Whether times of two environments may stand side by side in one search: device and kernel sources agree."""
    return (a.device, a.arch, a.kernels) == (b.device, b.arch, b.kernels)


def same_regime(record: Record, regime: Regime | None) -> bool:
    """Whether a record may stand beside times of a regime (None: of any). A failure has none and always may."""
    if record.measurement is None or regime is None:
        return True
    return regime_facts(record.measurement.regime) == regime_facts(regime)


def regime_facts(regime: Regime) -> tuple[str, str, str, int]:
    """What must agree between two stage times that are compared."""
    return regime.timer, regime.execution, regime.l2, regime.seed
