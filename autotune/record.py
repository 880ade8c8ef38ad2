"""The evidence: what was measured, under which regime, and what was decided from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fitune.problem import Key
from fitune.tactic import Stage, Tactic

Part = Literal["gemm1", "gemm2", "layer"]
Phase = Literal["search", "final"]


class Status(StrEnum):
    """How trying a tactic ended."""

    OK = "ok"
    REJECTED = "rejected"
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_ERROR = "launch_error"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Regime:
    """How a time was taken. Two times are comparable only where their regimes are.

    `timer` is `graph` (events around CUDA-graph replays) or `events`; `l2` is `cold` (weights rotated or flushed so
    that none is left in L2) or `warm`; `interleaved` says whether the candidates of one comparison took turns.
    """

    timer: str = "graph"
    execution: str = "graph"
    l2: str = "cold"
    routing: str = "random"
    seed: int = 0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """A time with its spread: median over `samples`, 95 % confidence interval of the median, all in µs.

    `parts_us` splits a layer's median by kernel (`sort`, `gemm1`, `gemm2`) where that was measured.
    `sm_mhz` and `power_w` are the clocks and board power seen right after; 0 when unknown.
    """

    median_us: float
    ci_low_us: float
    ci_high_us: float
    samples: int
    regime: Regime
    parts_us: tuple[tuple[str, float], ...] = ()
    sm_mhz: float = 0.0
    power_w: float = 0.0

    def __post_init__(self) -> None:
        low, mid, high = self.ci_low_us, self.median_us, self.ci_high_us
        ordered = 0.0 < low <= mid <= high
        assert ordered and math.isfinite(high) and self.samples >= 1, f"no measurement: {low} {mid} {high}"

    @property
    def relative_halfwidth(self) -> float:
        return (self.ci_high_us - self.ci_low_us) / (2.0 * self.median_us)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Error against a float32 reference: largest absolute, and RMS of the error over RMS of the reference."""

    max_abs: float
    rms_relative: float


@dataclass(frozen=True, slots=True)
class Record:
    """One tactic (or one stage of it) tried on one key. `measurement` is there if, and only if, `status` is ok."""

    key: Key
    part: Part
    tactic: Tactic | Stage
    status: Status
    environment_id: str
    run_id: str
    time_s: float
    origin: str = "sampler"
    phase: Phase = "search"
    measurement: Measurement | None = None
    accuracy: Accuracy | None = None
    binary: str = ""
    error: str = ""

    def __post_init__(self) -> None:
        assert (self.measurement is not None) == (self.status is Status.OK), f"{self.status} with {self.measurement}"
        whole = isinstance(self.tactic, Tactic)
        assert whole == (self.part == "layer"), f"part {self.part} holds a {type(self.tactic).__name__}"
        if isinstance(self.tactic, Stage):
            assert self.tactic.stage == self.part


@dataclass(frozen=True, slots=True)
class Member:
    """One finalist of a decision with its interleaved time."""

    tactic: Tactic
    measurement: Measurement
    tied: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """What a key's search ended with: an equivalence set, its canonical member, and the default it was raced against.

    `members` holds every finalist, fastest first; those with `tied` are statistically equal to the fastest.
    `default_us` is the default tactic's interleaved median in the same run; `noise` the relative A/A band of that
    run: differences below it carry no information. `reason` says in words why `chosen` stands.
    """

    key: Key
    chosen: Tactic
    members: tuple[Member, ...]
    default: Tactic
    default_us: float
    noise: float
    reason: str
    environment_id: str
    run_id: str
    time_s: float
    origin: str = "measured"

    def member(self, tactic: Tactic) -> Member | None:
        return next((member for member in self.members if member.tactic == tactic), None)

    @property
    def state(self) -> Literal["tuned", "tie", "default"]:
        """`default` when the default stayed, `tie` when the default is in the winner's set, else `tuned`."""
        if self.chosen == self.default:
            return "default"
        member = self.member(self.default)
        return "tie" if member is not None and member.tied else "tuned"
