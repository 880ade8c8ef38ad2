"""What a running search tells whoever listens."""

from __future__ import annotations

from dataclasses import dataclass

from fitune.measure.protocol import Outcome
from fitune.problem import Key
from fitune.record import Decision
from fitune.tactic import StageName, Tactic


@dataclass(frozen=True, slots=True)
class KeyStarted:
    """A key's search begins. `measured_before` stages of it were found in the store; `pool` counts both GEMMs'
    candidates, `missing` the legal ones that the measurer cannot measure (a recording that lacks them)."""

    key: Key
    index: int
    total: int
    measured_before: int
    pool: int
    missing: int = 0


@dataclass(frozen=True, slots=True)
class TrialDone:
    """One stage was tried and recorded. `best_us` is the best of its GEMM so far (None: none worked yet); `done` of
    `planned` stages of this GEMM are measured, earlier runs included."""

    key: Key
    part: StageName
    outcome: Outcome
    best_us: float | None
    done: int
    planned: int


@dataclass(frozen=True, slots=True)
class FinalsStarted:
    """Whole layers are about to be measured against each other."""

    key: Key
    tactics: tuple[Tactic, ...]


@dataclass(frozen=True, slots=True)
class KeyDecided:
    """A key has its decision, and the store has it too."""

    decision: Decision
    index: int
    total: int


@dataclass(frozen=True, slots=True)
class KeyKept:
    """A key was left as it is."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class KeySkipped:
    """No time was left for a key, or it could not be decided; what was measured of it is stored."""

    key: Key
    reason: str


Event = KeyStarted | TrialDone | FinalsStarted | KeyDecided | KeyKept | KeySkipped


@dataclass(frozen=True, slots=True)
class SearchSummary:
    """What a search did. `measured` counts stages measured in this run, `reused` those taken from the store."""

    total: int
    decided: tuple[Decision, ...]
    kept: tuple[Key, ...]
    skipped: tuple[tuple[Key, str], ...]
    measured: int
    reused: int
    missing: int
    elapsed_s: float
    run_id: str
