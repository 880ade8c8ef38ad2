"""What to search, in which order, and where the candidates come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fitune import space
from fitune.errors import InputError
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Key, LayerKey, Problem
from fitune.tactic import Stage, StageName, Tactic
from fitune.target import Target

SAMPLERS: Final = ("pool", "random", "tpe", "gp", "exhaustive")
SWEEP_POOL: Final = 200
"""Pools up to this size are measured whole when no number of trials is given."""


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """A search over problems.

    `trials` caps the stages measured per key and GEMM, those of earlier runs included; `budget_s` the seconds over all
    keys, shared fairly among the keys left. With neither, pools of up to SWEEP_POOL are swept and larger ones searched
    until no candidate promises a gain. `batch` stages are proposed together. `finalists` whole layers are measured
    against each other over `rounds`. `force` decides again what already has a decision (its stages are not measured
    again). Raises InputError.
    """

    problems: tuple[Problem, ...]
    trials: int | None = None
    budget_s: float | None = None
    seed: int = 0
    sampler: str = "pool"
    finalists: int = 5
    rounds: int = 8
    force: bool = False
    batch: int = 6

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise InputError(f"sampler {self.sampler!r} is not known; use one of {', '.join(SAMPLERS)}")
        for name, value, least in (
            ("trials", self.trials, 1),
            ("finalists", self.finalists, 2),
            ("rounds", self.rounds, 1),
            ("batch", self.batch, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; it must be {least} or more")
        if self.budget_s is not None and not self.budget_s > 0:
            raise InputError(f"budget is {self.budget_s} s; it must be more than 0")
        for problem in self.problems:
            if problem.num_tokens < 1:
                raise InputError("num_tokens is 0: a call with no rows runs no GEMM; leave it out of the token list")


class SpaceSource(Protocol):
    """Where candidates and the default come from."""

    def pool(self, problem: Problem, target: Target, stage: StageName) -> Sequence[Stage]: ...

    def missing(self, problem: Problem, target: Target, stage: StageName) -> int:
        """Legal candidates left out because they cannot be measured here."""
        ...

    def default(self, problem: Problem, target: Target) -> Tactic: ...


class LegalSpace:
    """Everything `fitune.space` finds legal."""

    def pool(self, problem: Problem, target: Target, stage: StageName) -> Sequence[Stage]:
        return space.pool(problem, target, stage)

    def missing(self, problem: Problem, target: Target, stage: StageName) -> int:
        return 0

    def default(self, problem: Problem, target: Target) -> Tactic:
        return space.default_tactic(problem, target)


class RecordedSpace:
    """The part of another space that a recording holds. Remembers each problem's pool."""

    def __init__(self, measurer: RecordingMeasurer, whole: SpaceSource) -> None:
        self.measurer = measurer
        self.whole = whole
        self._kept: dict[tuple[Problem, Target, StageName], tuple[tuple[Stage, ...], int]] = {}

    def pool(self, problem: Problem, target: Target, stage: StageName) -> Sequence[Stage]:
        return self._split(problem, target, stage)[0]

    def missing(self, problem: Problem, target: Target, stage: StageName) -> int:
        return self._split(problem, target, stage)[1]

    def default(self, problem: Problem, target: Target) -> Tactic:
        return self.whole.default(problem, target)

    def _split(self, problem: Problem, target: Target, stage: StageName) -> tuple[tuple[Stage, ...], int]:
        """The recorded candidates, and how many others there are."""
        at = (problem, target, stage)
        if at not in self._kept:
            whole, recorded = self.whole.pool(*at), self.measurer.recorded_stages(problem, stage)
            inside = tuple(item for item in whole if item in recorded)
            self._kept[at] = inside, len(whole) - len(inside)
        return self._kept[at]


def restrict_to_recording(measurer: RecordingMeasurer, whole: SpaceSource | None = None) -> RecordedSpace:
    """The space in which a search on a recording moves: legal and recorded."""
    return RecordedSpace(measurer, whole or LegalSpace())


def order_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Coarse to fine: both ends and the middle of the token points first, then the halves between them.

    So a search that is cut short covers the whole range thinly instead of one end of it, and every later key lies
    between neighbours that were measured before it. At one token point the larger number of local experts comes first:
    its key has the most tiles, and the others of the point (the same rows per expert) start from it. Duplicates
    fall out.
    """
    unique = list(dict.fromkeys(problems))
    points = sorted({problem.num_tokens for problem in unique})
    rank = {points[position]: order for order, position in enumerate(_coarse_to_fine(len(points)))}
    return sorted(unique, key=lambda item: (rank[item.num_tokens], -item.local_experts, repr(item)))


def _coarse_to_fine(count: int) -> list[int]:
    """Positions 0..count-1: the ends, then the middle of every gap, the widest (of equal ones the upper) first."""
    if count <= 2:
        return list(range(count))[::-1]
    order, gaps = [count - 1, 0], [(0, count - 1)]
    while gaps:
        gaps.sort(key=lambda gap: (gap[0] - gap[1], -gap[0]))
        low, high = gaps.pop(0)
        if high - low < 2:
            continue
        middle = (low + high) // 2
        order.append(middle)
        gaps += [(low, middle), (middle, high)]
    return order


def key_coordinates(key: Key) -> tuple[float, float, float]:
    """A key's place among the keys of its shape: log2 rows per expert, log2 local experts, routing and dispatch."""
    problem = key.problem()
    rows = math.log2(max(problem.expected_rows_per_expert, 1e-6))
    kind = 0.0 if key.layer.routing == "random" else 0.7 if key.layer.routing == "balanced" else 1.5
    return rows, 0.4 * math.log2(key.layer.local_experts), kind + (0.2 if key.layer.dispatch == "all_to_all" else 0.0)


def key_distance(a: Key, b: Key) -> float:
    """How far two keys' best tactics may be apart: infinite between shapes, dtypes or devices."""
    if _layer_of(a.layer) != _layer_of(b.layer):
        return math.inf
    return sum(abs(x - y) for x, y in zip(key_coordinates(a), key_coordinates(b), strict=True))


def _layer_of(layer: LayerKey) -> tuple[object, ...]:
    return layer.shape, layer.device


Clock = Callable[[], float]
