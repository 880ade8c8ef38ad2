"""From the best stages of both GEMMs to the whole layers that are measured against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fitune.search.decide import MARGIN
from fitune.search.pool import Head, head_of
from fitune.tactic import LibraryGemm, Stage, Tactic

Ranked = Mapping[Head, Sequence[tuple[float, Stage]]]

OTHER_HEAD_MARGIN: Final = 0.08
"""Stages are timed alone; another tile_size this close may still win as a layer."""
PREFERRED_MARGIN: Final = 0.05
RUNNER_UP_MARGIN: Final = 0.04
TIED_MARGIN: Final = MARGIN / 2.0
"""Pairs whose sums are this close to the fastest are as good as it: what a decision may give away."""
DEPTH: Final = 3


@dataclass(frozen=True, slots=True)
class Finalist:
    """A whole layer that is worth measuring; `sum_us` adds its stages' times (0 where they were not measured)."""

    tactic: Tactic
    origin: str
    sum_us: float


def finalists(
    default: Tactic,
    first: Ranked,
    second: Ranked,
    preferred: Mapping[Tactic, str],
    count: int,
    order: Callable[[Tactic], tuple[int, int, int, str]] | None = None,
) -> list[Finalist]:
    """At most `count` layers, the default first, then the fastest sum of stages, then of the pairs that are tied with
    it the first by `order`: among many equal ones, two searches find another fastest, but the same first.

    Room that is left goes, in this order, to the best pair launched otherwise, to what neighbours use (`preferred`,
    with its origin) where its sum is close, to the best pairs of other heads, and to runner-up stages. Deterministic
    for the same times.
    """
    pairs = _pairs(first, second)
    sums = {tactic: total for total, tactic in pairs}
    found = [Finalist(default, "default", _sum_of(default, first, second))]
    if not pairs:
        return found
    best_us = pairs[0][0]
    leaders = list({(tactic.family, tactic.tile_size): (total, tactic) for total, tactic in reversed(pairs)}.values())
    leaders.sort(key=lambda item: (item[0], str(item[1])))
    near = []
    for tactic in preferred:
        total = sums.get(tactic) or _sum_of(tactic, first, second)
        if 0.0 < total <= best_us * (1.0 + PREFERRED_MARGIN):
            near.append((total, tactic))
    near = near[: max(1, (count - 2) // 2)]
    others = [item for item in leaders[1:] if item[0] <= best_us * (1.0 + OTHER_HEAD_MARGIN)]
    runners = [item for item in pairs[1:] if item[0] <= best_us * (1.0 + RUNNER_UP_MARGIN)]
    twin = _launched_otherwise(pairs[0][1])
    twins = [(total, twin)] if (total := _sum_of(twin, first, second)) and twin != pairs[0][1] else []
    tied = [] if order is None else [min(_tied(first, second, best_us), key=lambda item: order(item[1]))]
    for total, tactic in [pairs[0], *tied, *twins, *near, *others, *runners]:
        if len(found) < count and all(tactic != item.tactic for item in found):
            found.append(Finalist(tactic, preferred.get(tactic, "sampler"), total))
    return found


def _launched_otherwise(tactic: Tactic) -> Tactic:
    """The same layer with programmatic dependent launch on both GEMMs, or on neither.

    What it gains lies between kernels, so the time of a stage alone does not show it. The tactic itself where its
    kernels have no such launch.
    """
    first, second = tactic.gemm1, tactic.gemm2
    if tactic.family != "gemv" or isinstance(first, LibraryGemm) or isinstance(second, LibraryGemm):
        return tactic
    early = not (first.pdl and second.pdl)
    return replace(tactic, gemm1=replace(first, pdl=early), gemm2=replace(second, pdl=early))


def best_pair_us(first: Ranked, second: Ranked) -> float | None:
    """The smallest sum of two stages with one head, in µs."""
    sums = [first[head][0][0] + second[head][0][0] for head in first.keys() & second.keys()]
    return min(sums, default=None)


def _pairs(first: Ranked, second: Ranked) -> list[tuple[float, Tactic]]:
    """Pairs of the DEPTH best stages per head, fastest sum first, then by text."""
    pairs = [
        (a_us + b_us, Tactic.of(a, b))
        for head in first.keys() & second.keys()
        for a_us, a in first[head][:DEPTH]
        for b_us, b in second[head][:DEPTH]
    ]
    return sorted(pairs, key=lambda item: (item[0], str(item[1])))


def _tied(first: Ranked, second: Ranked, best_us: float) -> list[tuple[float, Tactic]]:
    """All pairs whose sum is within TIED_MARGIN of the best, with their sums in µs."""
    limit_us = best_us * (1.0 + TIED_MARGIN)
    return [
        (a_us + b_us, Tactic.of(a, b))
        for head in first.keys() & second.keys()
        for a_us, a in first[head]
        if a_us + second[head][0][0] <= limit_us
        for b_us, b in second[head]
        if a_us + b_us <= limit_us
    ]


def _sum_of(tactic: Tactic, first: Ranked, second: Ranked) -> float:
    total = 0.0
    for stage, ranked in ((tactic.stage("gemm1"), first), (tactic.stage("gemm2"), second)):
        times = [time_us for time_us, other in ranked.get(head_of(stage), ()) if other == stage]
        if not times:
            return 0.0
        total += times[0]
    return total
