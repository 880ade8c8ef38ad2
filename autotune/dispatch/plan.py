"""Launch plans: what a call does once its tactic is known, prepared once for each bucket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fitune.cache import Entry
from fitune.kernels.layer import LayerArgs, Workspace, run_sort, run_stage
from fitune.tactic import Tactic

Launch = Callable[[LayerArgs, Workspace, Tensor], None]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a token count gets: its tactic and, on a hit, the table's entry; on a miss, why there is none."""

    tactic: Tactic
    hit: bool
    reason: str
    entry: Entry | None


@dataclass(slots=True)
class Plan:
    """A tactic ready to launch. `calls` counts how often it was; `ran` says that its kernels are compiled."""

    tactic: Tactic
    launch: Launch
    entry: Entry | None = None
    stale: bool = False
    calls: int = 0
    ran: bool = False


def prepare(tactic: Tactic, entry: Entry | None = None, *, stale: bool = False) -> Plan:
    """Take a tactic apart once, so that a call only launches."""
    family, tile_size = tactic.family, tactic.tile_size
    gemm1, gemm2 = tactic.stage("gemm1"), tactic.stage("gemm2")

    def launch(args: LayerArgs, workspace: Workspace, out: Tensor) -> None:
        run_sort(family, tile_size, args, workspace)
        run_stage(gemm1, args, workspace, out)
        run_stage(gemm2, args, workspace, out)

    return Plan(tactic, launch, entry, stale)


def warm_counts(low: int, high: int, top_k: int) -> list[int]:
    """Token counts of `low..high` that between them meet every binary one tactic can compile to.

    Triton compiles anew for an integer argument of 1 and for multiples of 16, and kernels that see all slots at once
    are compiled for the power of two at or above the number of slots.
    """
    if high - low < 16:
        return list(range(low, high + 1))
    marks = {low, low + 1, low | 1, -(-low // 16) * 16, high}
    for bits in range((low * top_k).bit_length() - 1, (high * top_k).bit_length() + 1):
        edge = (1 << bits) // top_k
        marks |= {edge, edge + 1}
    return sorted(mark for mark in marks if low <= mark <= high)
