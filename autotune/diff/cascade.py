"""The cascade: the order of causes, and the driver that stops at the first that holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Final

from fitune.diff import (
    not_enumerated,
    not_legal,
    other_bucket,
    other_regime,
    other_routing,
    real,
    stale,
    tie,
    undecided,
)
from fitune.diff.cross import IDENTICAL, NO_REGRET, is_composed
from fitune.diff.join import Align, Joined, join
from fitune.diff.pair import Pair
from fitune.diff.report import DiffReport, DiffRow, Evidence, NoPartner, Same
from fitune.diff.sides import Cell, Side, SideIndex
from fitune.diff.spaces import OPTIONS
from fitune.diff.verdict import Verdict
from fitune.problem import Key
from fitune.tactic import STAGES, GemmTactic, Tactic

CASCADE: Final[tuple[Callable[[Pair], Evidence | None], ...]] = (
    not_enumerated.find,
    not_legal.find,
    other_bucket.find,
    stale.find,
    other_regime.find,
    other_routing.find,
    tie.find,
    real.find,
)
"""The causes in the order they are asked: a space or load that differs makes every later question moot."""


def diff_sides(a: Side, b: Side, align: Align = "tokens") -> DiffReport:
    """Compare two sides key by key.

    `align` is `tokens` (equal token counts) or `rows` (equal expected rows per expert). Sides that each hold one
    count of local experts may hold different ones: that is how two EP sizes are compared. Devices, routing profiles
    and dispatch kinds may differ too, where nothing closer is there to compare with.
    """
    index_a, index_b = SideIndex(a), SideIndex(b)
    rows = tuple(_row(joined, index_a, index_b, align) for joined in join(a.decisions, b.decisions, align))
    return DiffReport(a.label, b.label, align, rows)


def _row(joined: Joined, index_a: SideIndex, index_b: SideIndex, align: Align) -> DiffRow:
    a, b = _cell(joined.key_a, index_a), _cell(joined.key_b, index_b)
    if a is None or b is None:
        return _lonely(joined, a, b, index_b.label if b is None else index_a.label)
    if a.tactic == b.tactic:
        same = Same()
        return DiffRow(
            joined.tokens,
            a.key,
            b.key,
            a.tactic,
            b.tactic,
            same.verdict,
            same,
            IDENTICAL,
            IDENTICAL,
            (),
            same.sentence(),
        )
    pair = Pair(a, b, joined.tokens, align)
    evidence = decide(pair)
    return DiffRow(
        joined.tokens,
        a.key,
        b.key,
        a.tactic,
        b.tactic,
        evidence.verdict,
        evidence,
        pair.a_on_b,
        pair.b_on_a,
        differing_fields(a.tactic, b.tactic),
        evidence.sentence(),
        _unchecked(pair),
    )


def decide(pair: Pair) -> Evidence:
    """The first cause of the cascade that holds, else what is missing to tell."""
    for find in CASCADE:
        evidence = find(pair)
        if evidence is not None:
            return evidence
    return undecided.conclude(pair)


def _cell(key: Key | None, index: SideIndex) -> Cell | None:
    return None if key is None else Cell(index, key, index.side.decisions[key])


def _lonely(joined: Joined, a: Cell | None, b: Cell | None, absent: str) -> DiffRow:
    evidence = NoPartner(Verdict.ONLY_A if b is None else Verdict.ONLY_B, absent)
    return DiffRow(
        joined.tokens,
        joined.key_a,
        joined.key_b,
        None if a is None else a.tactic,
        None if b is None else b.tactic,
        evidence.verdict,
        evidence,
        NO_REGRET,
        NO_REGRET,
        (),
        evidence.sentence(),
    )


def differing_fields(a: Tactic, b: Tactic) -> tuple[str, ...]:
    """Names of the fields in which two tactics differ, a GEMM's own as `gemm1.block_n`, a library's `gemm1.options`."""
    own = ("family", "tile_size", "gather", "activation", "finalize")
    names = [name for name in own if getattr(a, name) != getattr(b, name)]
    for stage in STAGES:
        first, second = getattr(a, stage), getattr(b, stage)
        if isinstance(first, GemmTactic) and isinstance(second, GemmTactic):
            differing = [f.name for f in fields(GemmTactic) if getattr(first, f.name) != getattr(second, f.name)]
            names += [f"{stage}.{name}" for name in differing]
        elif first != second:
            names.append(f"{stage}.{OPTIONS}")
    return tuple(names)


def _unchecked(pair: Pair) -> tuple[str, ...]:
    """Stages that could not hold because a fact is missing."""
    notes = []
    for cell in (pair.a, pair.b):
        if cell.environment is None:
            notes.append(f"versions of {cell.label} (environment {cell.decision.environment_id} is not in the store)")
        elif cell.target is None:
            notes.append(f"legality on {cell.label} (arch {cell.environment.arch!r} is not known)")
        if cell.regime is None:
            notes.append(f"regime of {cell.label} (no time of its choice is recorded)")
        elif cell.measurement is not None and is_composed(cell.measurement):
            notes.append(f"execution of {cell.label} (its time is a sum of recorded parts)")
    return tuple(notes)
