"""Stage 1: the other side's winner was never in this side's space.

Two witnesses: the enumeration of this fitune, asked for the stage; and this side's records, where a value that the
other side tried often was never tried at all (a space that an older version, or a filter, had cut).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, Final, Literal

from fitune.diff.pair import Pair
from fitune.diff.sides import Cell
from fitune.diff.spaces import STAGE_AXES, gemm_axes, is_resource, refusal, value_on
from fitune.diff.verdict import Verdict
from fitune.record import Status
from fitune.tactic import STAGES, Stage

MIN_TRIED: Final = 20
"""Fewer tries than this say nothing about what was left out."""
CHANCE: Final = {True: 1e-3, False: 1e-6}
"""How improbable an absence must be to count: after an exhaustive sweep, and after a sampler that may avoid values."""
MAX_SHARE: Final = 0.5
PAIR_CHANCE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Missing:
    """One stage of `winner`'s tactic that the space of `lacking` had not, and the rule or axis that left it out."""

    lacking: str
    winner: str
    stage: Stage
    rule: str
    found_by: Literal["space", "records"]


@dataclass(frozen=True, slots=True)
class NotEnumerated:
    """Evidence: every stage of a winner that the other side's space lacked."""

    verdict: ClassVar[Verdict] = Verdict.NOT_ENUMERATED
    missing: tuple[Missing, ...]

    def sentence(self) -> str:
        first = self.missing[0]
        return f"{first.winner}'s {first.stage.stage} was never in {first.lacking}'s space: {first.rule}"


def find(pair: Pair) -> NotEnumerated | None:
    missing = tuple(_missing(pair))
    return NotEnumerated(missing) if missing else None


def _missing(pair: Pair) -> Iterator[Missing]:
    for guest, host in pair.both_ways():
        for name in STAGES:
            stage = guest.tactic.stage(name)
            found = _by_rejection(stage, host) or _by_space(stage, guest, host) or _by_records(stage, guest, host)
            if found is not None:
                rule, found_by = found
                yield Missing(host.label, guest.label, stage, rule, found_by)


_Found = tuple[str, Literal["space", "records"]]


def _by_rejection(stage: Stage, host: Cell) -> _Found | None:
    """The host's own run noted that a rule had dropped the stage."""
    records = host.tried.of(stage)
    if not records or any(record.status is not Status.REJECTED for record in records):
        return None
    reason = records[-1].error
    return None if is_resource(reason) else (reason or "rejected, with no reason noted", "records")


def _by_space(stage: Stage, guest: Cell, host: Cell) -> _Found | None:
    if stage in host.stages_tried or host.target is None:
        return None
    found = refusal(stage, host.problem, host.target)
    return (found.reason, "space") if found is not None and found.kind == "dropped" else None


def _by_records(stage: Stage, guest: Cell, host: Cell) -> _Found | None:
    """A value of the stage that the host's side never tried although the guest's did in a fair share of its tries."""
    name = stage.stage
    here = [other for other in host.stages_tried if other.stage == name]
    if stage in host.stages_tried or len(here) < MIN_TRIED:
        return None
    there = [other for other in guest.stages_tried if other.stage == name]
    swept = host.swept
    for axes in _axes(stage, swept):
        wanted = tuple(value_on(stage, axis) for axis in axes)
        if wanted in host.index.values_known(name, axes):
            continue
        having = sum(tuple(value_on(other, axis) for axis in axes) == wanted for other in there)
        share = min(MAX_SHARE, having / max(1, len(there)))
        allowed = CHANCE[swept] if len(axes) == 1 else PAIR_CHANCE
        if (1.0 - share) ** len(here) <= allowed:
            text = " with ".join(f"{axis} {value}" for axis, value in zip(axes, wanted, strict=True))
            return (
                f"{text} was tried in {having} of {len(there)} {name} stages of {guest.label}, "
                f"in none of {len(here)} of {host.label}"
            ), "records"
    return None


def _axes(stage: Stage, swept: bool) -> Iterable[tuple[str, ...]]:
    """Single axes; after an exhaustive sweep pairs of them too, as a sampler may well avoid a pair."""
    axes = (*STAGE_AXES, *gemm_axes(stage))
    yield from ((axis,) for axis in axes)
    if swept:
        yield from combinations(axes, 2)
