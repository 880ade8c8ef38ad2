"""Why a tactic that is right on one problem is wrong on another: counts of tiles, waves and bytes, put into words.

Every number comes from the cost model's terms, so that the report and the search's prior follow one rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fitune.cost import CostTerms, terms
from fitune.problem import Problem
from fitune.tactic import STAGES, LibraryGemm, Stage, StageName, Tactic
from fitune.target import Target

MATTERS: Final = 0.02
"""A factor below this share says nothing."""


@dataclass(frozen=True, slots=True)
class StageNumbers:
    """What one stage does on one problem; expected values under the problem's routing.

    `padding` is padded rows over useful ones. `tiles` are row tiles, `units` row tiles times column blocks: what
    programs work on. `resident` programs run at once, so units take `rounds` rounds (`waves` not rounded up), and
    `last_round_idle` of the resident programs have nothing to do in the last one. `idle_share` is the share of SM
    time without work while the busiest SM finishes.
    `empty_programs` were launched for a routing that might have been, and take `empty_us` to find that out.
    `weight_bytes` counts every active expert once, `weight_bytes_read` what comes from DRAM with re-reads,
    `loaded_bytes` all operands that SMs load. `bound` names the largest limit of the cost model.
    """

    stage: str
    useful_rows: float
    padded_rows: float
    padding: float
    tiles: float
    units: float
    resident: int
    waves: float
    rounds: int
    last_round_idle: float
    idle_share: float
    empty_programs: float
    empty_us: float
    weight_bytes: float
    weight_bytes_read: float
    activation_bytes: float
    loaded_bytes: float
    tensor_rate: float
    bound: str
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Numbers:
    """One tactic on one problem, stage by stage."""

    tactic: str
    ep: str
    num_tokens: int
    gemm1: StageNumbers
    gemm2: StageNumbers

    @property
    def predicted_us(self) -> float:
        return self.gemm1.predicted_us + self.gemm2.predicted_us

    def stage(self, name: StageName) -> StageNumbers:
        return self.gemm1 if name == "gemm1" else self.gemm2


@dataclass(frozen=True, slots=True)
class Factor:
    """One way in which the foreign tactic does more than the home one on the same problem: how many times as much."""

    stage: StageName
    term: str
    foreign: float
    home: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What a foreign tactic (chosen for another problem) costs at home, in numbers and one sentence.

    `factors` are sorted by weight, largest first. `predicted` is the cost model's regret of the foreign tactic over
    both GEMMs, `measured` the one that is to be explained, `unexplained` their difference.
    """

    foreign_away: Numbers
    foreign_here: Numbers
    home_here: Numbers
    home_away: Numbers
    factors: tuple[Factor, ...]
    predicted: float
    measured: float
    unexplained: float
    sentence: str


def stage_numbers(stage: Stage, problem: Problem, target: Target) -> StageNumbers:
    """Counts of one stage on one problem."""
    cost = terms(stage, problem, target)
    return StageNumbers(
        stage=str(stage),
        useful_rows=cost.expected_rows,
        padded_rows=cost.padded_rows,
        padding=cost.padding,
        tiles=cost.tiles,
        units=cost.units,
        resident=cost.resident,
        waves=cost.waves,
        rounds=int(cost.rounds),
        last_round_idle=max(0.0, cost.rounds - cost.waves) if cost.units else 0.0,
        idle_share=_idle_share(cost, target),
        empty_programs=cost.empty_programs,
        empty_us=cost.empty_us,
        weight_bytes=cost.weight_bytes,
        weight_bytes_read=cost.dram_weight_bytes,
        activation_bytes=cost.activation_bytes,
        loaded_bytes=cost.port_bytes,
        tensor_rate=cost.tensor_rate,
        bound=cost.bound,
        predicted_us=cost.predicted_us,
    )


def _idle_share(cost: CostTerms, target: Target) -> float:
    slots = cost.busiest_units * target.num_sms
    return max(0.0, 1.0 - cost.units / slots) if slots else 0.0


def numbers(tactic: Tactic, problem: Problem, target: Target) -> Numbers:
    """Counts of a whole tactic on one problem."""
    first, second = (stage_numbers(tactic.stage(name), problem, target) for name in STAGES)
    return Numbers(str(tactic), problem.ep_label, problem.num_tokens, first, second)


@dataclass(frozen=True, slots=True)
class Place:
    """A tactic where it was chosen: its problem, chip, and what reports call it."""

    label: str
    tactic: Tactic
    problem: Problem
    target: Target


def mechanism(away: Place, here: Place, measured: float) -> Mechanism:
    """Explain why `away`'s tactic costs `measured` (a regret, 0.09 = 9 % slower) on the problem of `here`."""
    foreign_here = numbers(away.tactic, here.problem, here.target)
    home_here = numbers(here.tactic, here.problem, here.target)
    foreign_away = numbers(away.tactic, away.problem, away.target)
    home_away = numbers(here.tactic, away.problem, away.target)
    predicted = foreign_here.predicted_us / home_here.predicted_us - 1.0
    factors = tuple(sorted(_factors(foreign_here, home_here), key=lambda item: -item.ratio))
    unexplained = measured - predicted
    load = _load_sentence(away, here, foreign_away, foreign_here)
    sentence = f"{load}; {_factor_sentence(away, here, foreign_here, home_here, factors)}"
    return Mechanism(
        foreign_away, foreign_here, home_here, home_away, factors, predicted, measured, unexplained, sentence
    )


def _factors(foreign: Numbers, home: Numbers) -> Iterator[Factor]:
    """Where the foreign tactic does more work, by more than a share that matters."""
    for name in STAGES:
        f, h = foreign.stage(name), home.stage(name)
        pairs = {
            "padding": (f.padding, h.padding),
            "idle": (1.0 / max(1e-9, 1.0 - f.idle_share), 1.0 / max(1e-9, 1.0 - h.idle_share)),
            "weights": (f.weight_bytes_read, h.weight_bytes_read),
            "loads": (f.loaded_bytes, h.loaded_bytes),
            "tile shape": (1.0 / f.tensor_rate, 1.0 / h.tensor_rate),
            "empty": (1.0 + f.empty_us / h.predicted_us, 1.0 + h.empty_us / h.predicted_us),
        }
        for term, (more, less) in pairs.items():
            if _bears(term, f) and less > 0.0 and more / less > 1.0 + MATTERS:
                yield Factor(name, term, more, less, more / less)


def _bears(term: str, stage: StageNumbers) -> bool:
    """Whether a term can matter under the limit that binds the stage."""
    if term == "weights":
        return stage.bound == "memory"
    if term == "loads":
        return stage.bound == "traffic"
    if term == "empty":
        return True
    if term in ("padding", "tile shape"):
        return stage.bound in ("tensor", "traffic")
    return stage.bound != "memory"


def _load_sentence(away: Place, here: Place, before: Numbers, after: Numbers) -> str:
    """What the change of problem does to the foreign tactic's tiles."""
    a, b = before.gemm1.tiles, after.gemm1.tiles
    if away.problem == here.problem or a == 0.0 or abs(b / a - 1.0) <= MATTERS:
        return f"{here.label} has the same row tiles as {away.label} ({_count(b)})"
    return f"{here.label} has {_times(b / a)} row tiles of {away.label} ({_count(a)} -> {_count(b)})"


def _factor_sentence(away: Place, here: Place, foreign: Numbers, home: Numbers, factors: tuple[Factor, ...]) -> str:
    if not factors:
        return (
            "padding, waves, weight traffic, tile shape and empty programs do not tell the tactics apart: "
            "the cause is not counted"
        )
    top = factors[0]
    f, h = foreign.stage(top.stage), home.stage(top.stage)
    mine, theirs = _short(away.tactic.stage(top.stage)), _short(here.tactic.stage(top.stage))
    where = f"{top.stage} on {here.label}"
    if top.term == "padding":
        return (
            f"{where}: {mine} pads {_count(f.useful_rows)} rows to {_count(f.padded_rows)}, "
            f"{theirs} to {_count(h.padded_rows)}"
        )
    if top.term == "idle":
        return (
            f"{where}: {mine} leaves {100 * f.idle_share:.0f} % of SM time idle ({_count(f.units)} units in "
            f"{f.waves:.2f} waves of {f.resident}), {theirs} {100 * h.idle_share:.0f} % "
            f"({_count(h.units)} in {h.waves:.2f} of {h.resident})"
        )
    if top.term == "empty":
        return (
            f"{where}: {mine} launches {_count(f.empty_programs)} programs that find no work, {theirs} "
            f"{_count(h.empty_programs)}; that takes {f.empty_us:.1f} against {h.empty_us:.1f} µs (estimated)"
        )
    if top.term == "weights":
        return (
            f"{where}: {mine} reads {_bytes(f.weight_bytes_read)} of weights, {theirs} {_bytes(h.weight_bytes_read)}; "
            f"once is {_bytes(h.weight_bytes)}"
        )
    if top.term == "loads":
        return f"{where}: {mine} loads {_bytes(f.loaded_bytes)} into the SMs, {theirs} {_bytes(h.loaded_bytes)}"
    return (
        f"{where}: {mine} reaches {100 * f.tensor_rate:.0f} % of the tensor cores' rate, "
        f"{theirs} {100 * h.tensor_rate:.0f} % (estimated)"
    )


def _short(stage: Stage) -> str:
    family = "" if stage.family == "tile" else f"{stage.family} "
    if isinstance(stage.gemm, LibraryGemm):
        return f"{family}{stage.gemm}"
    swap = " swapped" if stage.gemm.swap_ab else ""
    return f"{family}t{stage.tile_size} x {stage.gemm.block_n}{swap}"


def _times(ratio: float) -> str:
    """0.0625 -> `1/16 of the`, 16 -> `16 times the`."""
    inverse = 1.0 / ratio
    if inverse >= 1.5 and abs(inverse - round(inverse)) <= MATTERS * inverse:
        return f"1/{round(inverse)} of the"
    if ratio >= 1.5 and abs(ratio - round(ratio)) <= MATTERS * ratio:
        return f"{round(ratio)} times the"
    return f"{ratio:.2f} times the"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or math.isclose(value, round(value), abs_tol=1e-6) else f"{value:.1f}"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"
