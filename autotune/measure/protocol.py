"""What search, diff and verify ask of whoever measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fitune.problem import Problem
from fitune.record import Accuracy, Measurement, Status
from fitune.tactic import Stage, Tactic
from fitune.target import Environment, Target


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one tactic or stage that was to be measured."""

    tactic: Tactic | Stage
    status: Status
    measurement: Measurement | None = None
    accuracy: Accuracy | None = None
    binary: str = ""
    error: str = ""


class Measurer(Protocol):
    """Times stages and whole tactics of problems. Never raises for a candidate's fault: that is an Outcome."""

    name: str
    target: Target
    environment: Environment

    def stages(self, problem: Problem, candidates: Sequence[Stage], hopeless_us: float | None) -> Iterator[Outcome]:
        """Measure stages one by one, yielding each as it is known, in any order.

        A stage's time is that of its GEMM with what belongs to it: permute and activation in gemm1, combine in
        gemm2. Once a sample shows a candidate above `hopeless_us`, it may be left with the samples it has.
        """
        ...

    def finals(self, problem: Problem, candidates: Sequence[Tactic], rounds: int) -> list[Outcome]:
        """Measure whole layers interleaved, with a rotating start; outcomes in the order of `candidates`."""
        ...

    def noise(self, problem: Problem, tactic: Tactic) -> float:
        """The relative A/A band: how far two measurements of the same tactic differ on this problem."""
        ...

    def warm(self, problem: Problem, candidates: Sequence[Stage]) -> None:
        """Hint: these stages of a problem are likely to be asked for soon (compile ahead). Must not block for long."""
        ...

    def close(self) -> None:
        """Free the GPU and end child processes."""
        ...
