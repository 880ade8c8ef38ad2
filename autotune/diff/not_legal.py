"""Stage 2: the other side's winner cannot run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fitune.diff.pair import Pair
from fitune.diff.sides import Cell
from fitune.diff.spaces import is_resource, refusal
from fitune.diff.verdict import Verdict
from fitune.record import Record, Status
from fitune.tactic import STAGES, Stage, Tactic


@dataclass(frozen=True, slots=True)
class Illegal:
    """A tactic (or one stage of it) of `winner` that `refusing` cannot run, and why.

    `status` is how trying it ended where it was tried, and empty where the legality function alone says no.
    """

    refusing: str
    winner: str
    tactic: Tactic | Stage
    reason: str
    status: Status | Literal[""]


@dataclass(frozen=True, slots=True)
class NotLegal:
    """Evidence: everything of a winner that the other side cannot run."""

    verdict: ClassVar[Verdict] = Verdict.NOT_LEGAL
    illegal: tuple[Illegal, ...]

    def sentence(self) -> str:
        first = self.illegal[0]
        part = first.tactic.stage if isinstance(first.tactic, Stage) else "tactic"
        how = f"{first.status.replace('_', ' ')}: " if first.status else ""
        return f"{first.winner}'s {part} cannot run on {first.refusing}: {how}{first.reason}"


def find(pair: Pair) -> NotLegal | None:
    illegal = tuple(_illegal(pair))
    return NotLegal(illegal) if illegal else None


def _illegal(pair: Pair) -> Iterator[Illegal]:
    for guest, host in pair.both_ways():
        whole = guest.tactic
        tactics: list[Tactic | Stage] = [*(whole.stage(name) for name in STAGES), whole]
        for tactic in tactics:
            found = _failed(host.tried.of(tactic))
            if found is not None:
                yield Illegal(host.label, guest.label, tactic, found.error or "no error text", found.status)
            elif isinstance(tactic, Stage):
                reason = _refused(tactic, host)
                if reason:
                    yield Illegal(host.label, guest.label, tactic, reason, "")


def _failed(records: Sequence[Record]) -> Record | None:
    """The last record of a tactic that was tried and never ran; rejections count where they are about resources."""
    if not records or any(record.status is Status.OK for record in records):
        return None
    last = records[-1]
    return None if last.status is Status.REJECTED and not is_resource(last.error) else last


def _refused(stage: Stage, host: Cell) -> str:
    if stage in host.stages_tried or host.target is None:
        return ""
    found = refusal(stage, host.problem, host.target)
    return found.reason if found is not None and found.kind == "illegal" else ""
