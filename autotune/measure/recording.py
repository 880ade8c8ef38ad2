"""A measurer that plays a recorded space back: search on a machine without a GPU, with a real GPU's times."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from fitune.cache.recording import Recording
from fitune.errors import StoreError
from fitune.families import runs_sort
from fitune.measure.protocol import Outcome
from fitune.problem import Key, LayerKey, Problem, key_of
from fitune.record import Decision, Measurement, Record, Regime, Status
from fitune.tactic import STAGES, Stage, StageName, Tactic
from fitune.target import Environment, Target

NOT_RECORDED = "not in the recording"
COMPOSED = "composed"
"""`Regime.execution` of a layer time that was put together from recorded parts instead of measured as a whole."""
LEAST_NOISE = 0.002

_T = TypeVar("_T", Stage, Tactic)


class RecordingMeasurer:
    """Answers from a recording. `target` and `environment` are the recorded machine's, not this one's.

    A stage never recorded comes back rejected. A layer never recorded as a whole is composed of its recorded stages
    and the recorded sort: its regime says `execution="composed"`, its samples are the fewest of the parts', its
    interval the sum of theirs, and `parts_us` lists them (`rest` is what whole layers of this key were seen to take
    beside their parts). A problem that was never recorded raises StoreError.
    """

    name = "recording"

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.target: Target = recording.target
        self.environment: Environment = _main_environment(recording)
        self._stages: dict[Key, dict[Stage, Record]] = {}
        self._layers: dict[Key, dict[Tactic, Record]] = {}
        for record in recording.records:
            if isinstance(record.tactic, Tactic):
                _keep(self._layers.setdefault(record.key, {}), record.tactic, record)
            else:
                _keep(self._stages.setdefault(record.key, {}), record.tactic, record)
        self._decisions: dict[Key, Decision] = {}
        for decision in sorted(recording.decisions, key=lambda item: item.time_s):
            self._decisions[decision.key] = decision

    @property
    def keys(self) -> tuple[Key, ...]:
        """Recorded keys, in order."""
        return tuple(sorted(self._stages))

    def problems(self) -> tuple[Problem, ...]:
        """The problems that can be searched."""
        return tuple(key.problem() for key in self.keys)

    def require(self, problem: Problem) -> Key:
        """The problem's key if it was recorded; StoreError that names the differing field if not."""
        key = key_of(problem, self.target.device)
        if key not in self._stages:
            raise StoreError(self._lack(key))
        return key

    def recorded_stages(self, problem: Problem, part: StageName) -> Mapping[Stage, Record]:
        """Recorded stages of one GEMM. Raises StoreError where the problem was never recorded."""
        key = self.require(problem)
        return {stage: record for stage, record in self._stages[key].items() if stage.stage == part}

    def recorded_layers(self, problem: Problem) -> Mapping[Tactic, Record]:
        """Layers recorded as a whole. Raises StoreError where the problem was never recorded."""
        return self._layers.get(self.require(problem), {})

    def composed(self, problem: Problem, tactic: Tactic) -> Outcome:
        """A layer put together from its recorded parts, also where it was recorded as a whole. Raises StoreError."""
        return self._compose(self.require(problem), tactic)

    def stages(self, problem: Problem, candidates: Sequence[Stage], hopeless_us: float | None) -> Iterator[Outcome]:
        recorded = self._stages[self.require(problem)]
        for stage in candidates:
            record = recorded.get(stage)
            if record is None:
                yield Outcome(stage, Status.REJECTED, error=NOT_RECORDED)
            else:
                yield _replay(record)

    def finals(self, problem: Problem, candidates: Sequence[Tactic], rounds: int) -> list[Outcome]:
        key = self.require(problem)
        layers = self._layers.get(key, {})
        return [_replay(layers[tactic]) if tactic in layers else self._compose(key, tactic) for tactic in candidates]

    def noise(self, problem: Problem, tactic: Tactic) -> float:
        """The band of the recorded decision; without one, what the recorded intervals let expect."""
        key = self.require(problem)
        if key in self._decisions:
            return self._decisions[key].noise
        records = [*self._stages[key].values(), *self._layers.get(key, {}).values()]
        widths = [record.measurement.relative_halfwidth for record in records if record.measurement is not None]
        return max(LEAST_NOISE, math.sqrt(2.0) * statistics.median(widths)) if widths else LEAST_NOISE

    def warm(self, problem: Problem, candidates: Sequence[Stage]) -> None:
        return

    def close(self) -> None:
        return

    def _compose(self, key: Key, tactic: Tactic) -> Outcome:
        parts: list[Measurement] = []
        for name in STAGES:
            record = self._stages[key].get(tactic.stage(name))
            if record is None:
                return Outcome(tactic, Status.REJECTED, error=f"{name} {NOT_RECORDED}")
            if record.measurement is None:
                return Outcome(tactic, record.status, error=f"{name}: {record.error}")
            parts.append(record.measurement)
        first, second = parts
        sort_us = self._sort_us(key, tactic)
        median_us = sort_us + first.median_us + second.median_us
        rest_us = max(self._rest_us(key), -0.5 * median_us)
        listed = (("sort", sort_us), ("gemm1", first.median_us), ("gemm2", second.median_us), ("rest", rest_us))
        beside = sort_us + rest_us
        taken = first.regime
        measurement = Measurement(
            median_us + rest_us,
            beside + first.ci_low_us + second.ci_low_us,
            beside + first.ci_high_us + second.ci_high_us,
            min(first.samples, second.samples),
            Regime(taken.timer, COMPOSED, taken.l2, taken.routing, taken.seed, False),
            tuple((name, value) for name, value in listed if value > 0),
        )
        return Outcome(tactic, Status.OK, measurement)

    def _sort_us(self, key: Key, tactic: Tactic) -> float:
        """Recorded sort time of the nearest tile_size on this key; 0 for a family that does not sort, or unknown."""
        if not runs_sort(tactic.family, tactic.tile_size):
            return 0.0
        known = [
            (abs(math.log2(layer.tile_size / tactic.tile_size)), part_us)
            for layer, record in self._layers.get(key, {}).items()
            if record.measurement is not None and layer.tile_size > 1
            for name, part_us in record.measurement.parts_us
            if name == "sort"
        ]
        if not known:
            return 0.0
        nearest = min(distance for distance, _ in known)
        return statistics.median(part_us for distance, part_us in known if distance == nearest)

    def _rest_us(self, key: Key) -> float:
        """Median of what this key's recorded layers took beside sort and stages; 0 where none can be taken apart."""
        rests = []
        for tactic, record in self._layers.get(key, {}).items():
            stages = [self._stages[key].get(tactic.stage(name)) for name in STAGES]
            times = [stage.measurement.median_us for stage in stages if stage is not None and stage.measurement]
            if record.measurement is not None and len(times) == len(STAGES):
                rests.append(record.measurement.median_us - sum(times) - self._sort_us(key, tactic))
        return statistics.median(rests) if rests else 0.0

    def _lack(self, wanted: Key) -> str:
        """What the recording has instead of a key, in one line."""
        name = self.recording.name or "the recording"
        if not self._stages:
            return f"recording {name!r} holds no stage times; record it again"
        layers = sorted({key.layer for key in self._stages})
        if wanted.layer in layers:
            tokens = sorted(key.num_tokens for key in self._stages if key.layer == wanted.layer)
            return f"recording {name!r} has no num_tokens {wanted.num_tokens}; it has {', '.join(map(str, tokens))}"
        nearest = min(layers, key=lambda layer: (len(_differing(layer, wanted.layer)), layer))
        fields = _differing(nearest, wanted.layer)
        have = {field: sorted({getattr(layer, field) for layer in layers}) for field in fields}
        texts = [f"{field} {getattr(wanted.layer, field)!r} (it has {_listed(have[field])})" for field in fields]
        return f"recording {name!r} has no {' with '.join(texts)}; ask for a recorded key or use a GPU"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _differing(a: LayerKey, b: LayerKey) -> list[str]:
    return [name for name in LayerKey.__dataclass_fields__ if getattr(a, name) != getattr(b, name)]


def _keep(kept: dict[_T, Record], tactic: _T, record: Record) -> None:
    """Of several records, keep the one that rests on the most samples; a time wins over a failure."""
    old = kept.get(tactic)
    if old is None or _weight(record) >= _weight(old):
        kept[tactic] = record


def _weight(record: Record) -> tuple[bool, int]:
    if record.measurement is None:
        return False, 0
    return record.phase == "final", record.measurement.samples


def _replay(record: Record) -> Outcome:
    return Outcome(record.tactic, record.status, record.measurement, record.accuracy, record.binary, record.error)


def _main_environment(recording: Recording) -> Environment:
    """The environment most records were taken in."""
    counts = Counter(record.environment_id for record in recording.records)
    for name, _ in counts.most_common():
        if name in recording.environments:
            return recording.environments[name]
    if not recording.environments:
        raise StoreError(f"recording {recording.name!r} names no environment; record it again")
    return next(iter(recording.environments.values()))
