"""Sides of a diff built by hand or by a simulated tuner, and the tactics that the tests compare."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fitune import footprint, space
from fitune.diff import DiffRow, Side, diff_sides
from fitune.problem import Key, LayerKey, LayerShape, Problem, key_of
from fitune.record import Decision, Measurement, Member, Record, Regime, Status
from fitune.tactic import STAGES, GemmTactic, Stage, Tactic, parse_tactic
from fitune.target import Environment, target_named

PAIRED = 8
SHAPE = LayerShape(7168, 2048, 256, 8)
TARGET = target_named("sm_90")
ENVIRONMENT = Environment(TARGET.device, "sm_90", 132, "0.1.0", "k1", triton="3.6.0", torch="2.11", driver="570")
REGIME = Regime(interleaved=True)
SMALL = parse_tactic("t64 gather:fused act:fused g1:128x64/g8/w4/s4/grid/tma g2:128x64/g8/w4/s4/grid/tma fin:reduce")
LARGE = parse_tactic("t128 gather:fused act:fused g1:128x64/g8/w8/s4/grid/tma g2:128x64/g8/w8/s4/grid/tma fin:reduce")


def key(num_tokens: int = 1024, local_experts: int = 256, **layer: object) -> Key:
    made = key_of(Problem(SHAPE, 1, num_tokens), TARGET.device)
    return replace(made, layer=replace(made.layer, local_experts=local_experts, **layer))  # type: ignore[arg-type]


def time(median_us: float, half: float = 0.001, regime: Regime = REGIME, **more: object) -> Measurement:
    return Measurement(median_us, median_us * (1 - half), median_us * (1 + half), 30, regime, **more)  # type: ignore[arg-type]


def decided(
    at: Key,
    times: Sequence[tuple[Tactic, float]],
    *,
    tied: Iterable[Tactic] = (),
    noise: float = 0.005,
    half: float = 0.001,
    regime: Regime = REGIME,
    environment: Environment = ENVIRONMENT,
    **measured: object,
) -> Decision:
    """A decision whose first tactic won; the others are its finalists."""
    chosen = times[0][0]
    equal = {chosen, *tied}
    members = tuple(Member(tactic, time(us, half, regime, **measured), tactic in equal) for tactic, us in times)
    return Decision(at, chosen, members, chosen, times[0][1], noise, "", environment.id, "run", 0.0)


def tried(
    at: Key,
    tactic: Tactic | Stage,
    us: float | None,
    *,
    half: float = 0.001,
    status: Status = Status.OUT_OF_RESOURCES,
    regime: Regime = REGIME,
    environment: Environment = ENVIRONMENT,
    parts_us: tuple[tuple[str, float], ...] = (),
    **more: object,
) -> Record:
    """A record; without a time it failed with `status`."""
    part = tactic.stage if isinstance(tactic, Stage) else "layer"
    ok = us is not None
    measurement = time(us, half, regime, parts_us=parts_us) if us is not None else None
    status = Status.OK if ok else status
    return Record(at, part, tactic, status, environment.id, "run", 0.0, measurement=measurement, **more)  # type: ignore[arg-type]


def side(label: str, decisions: Iterable[Decision], records: Iterable[Record] = (), *others: Environment) -> Side:
    environments = {environment.id: environment for environment in (ENVIRONMENT, *others)}
    return Side(label, {decision.key: decision for decision in decisions}, tuple(records), environments)


@lru_cache(maxsize=100_000)
def _true_us(stage: Stage, problem: Problem, place: float) -> float:
    """Made up and kept apart from the cost model, which the diff itself asks: weights once over DRAM or padded tiles
    in whole waves, whichever takes longer, off by up to 5 % by stage, and by up to `place` by stage and problem."""
    active = problem.expected_active_experts
    rows = problem.expected_routed_rows
    tiles = rows if stage.family == "gemv" else active * -(-rows // (active * stage.tile_size))
    n, k = footprint.gemm_size(stage, SHAPE)
    resident = footprint.programs_resident(stage, SHAPE, TARGET)
    waves = math.ceil(tiles * footprint.column_blocks(stage, SHAPE) / resident)
    flops = 2.0 * stage.tile_size * stage.gemm.block_n * k * resident
    rate = 790e6 * (0.05 if stage.family == "gemv" else 1.0 - 16.0 / (stage.tile_size + stage.gemm.block_n))
    us = 5.0 + max(active * n * k * 2 / 4.7e6, waves * (flops / rate + 1.0))
    own = zlib.crc32(str(stage).encode()) / 2**32
    here = zlib.crc32(f"{stage} {problem.num_tokens} {problem.local_experts}".encode()) / 2**32
    return us * (0.95 + 0.1 * own) * (1.0 - place + 2.0 * place * here)


def own(stages: Iterable[Stage]) -> list[Stage]:
    """Those of our own kernels, which the made-up chip knows."""
    return [stage for stage in stages if isinstance(stage.gemm, GemmTactic)]


@dataclass
class Tuner:
    """Tunes keys on a made-up chip with fixed true stage times."""

    seed: int
    noise: float = 0.01
    stages: int = 40
    finalists: int = 6
    sort_us: float = 6.0
    place: float = 0.005
    run: str = "run"
    environment: Environment = ENVIRONMENT
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def true_us(self, stage: Stage, problem: Problem) -> float:
        return _true_us(stage, problem, self.place)

    def true_layer_us(self, tactic: Tactic, problem: Problem) -> float:
        return sum(self.true_us(tactic.stage(name), problem) for name in STAGES) + self.sort_us_of(tactic)

    def sort_us_of(self, tactic: Tactic) -> float:
        """Single rows are not sorted."""
        return self.sort_us if tactic.family == "tile" else 0.0

    def measure(
        self, true_us: float, *, interleaved: bool, parts_us: tuple[tuple[str, float], ...] = ()
    ) -> Measurement:
        seen = true_us * (1.0 + self.noise * float(self.rng.normal()) / (2.0 if interleaved else 1.0))
        half = self.noise / 4.0
        regime = replace(REGIME, interleaved=interleaved)
        return Measurement(seen, seen * (1 - half), seen * (1 + half), 30, regime, parts_us=parts_us)

    def tune(self, at: Key) -> tuple[list[Record], Decision]:
        """Records of a sampled search over the pool and the decision it ends with."""
        problem = at.problem()
        found: dict[str, list[tuple[float, Stage]]] = {}
        records = []
        pools = {name: own(space.pool(problem, TARGET, name)) for name in STAGES}
        for name in STAGES:
            picks = self.rng.permutation(len(pools[name]))[: self.stages]
            found[name] = []
            for pick in picks:
                stage = pools[name][pick]
                measured = self.measure(self.true_us(stage, problem), interleaved=False)
                found[name].append((measured.median_us, stage))
                records.append(
                    Record(at, name, stage, Status.OK, self.environment.id, self.run, 0.0, measurement=measured)
                )
        return records, self._decide(at, found)

    def _pairs(self, found: dict[str, list[tuple[float, Stage]]]) -> Iterator[tuple[float, Tactic]]:
        """Sums of the fastest stages of each family and tile size: only such can be joined, and gemv needs no sort."""
        fastest: dict[str, dict[tuple[str, int], list[tuple[float, Stage]]]] = {name: {} for name in STAGES}
        for name in STAGES:
            for us, stage in sorted(found[name], key=lambda item: item[0]):
                fastest[name].setdefault((stage.family, stage.tile_size), []).append((us, stage))
        for head, firsts in fastest["gemm1"].items():
            seconds = fastest["gemm2"].get(head, [])
            for (first_us, first), (second_us, second) in product(firsts[:PAIRED], seconds[:PAIRED]):
                tactic = Tactic.of(first, second)
                yield first_us + second_us + self.sort_us_of(tactic), tactic

    def _decide(self, at: Key, found: dict[str, list[tuple[float, Stage]]]) -> Decision:
        problem = at.problem()
        pairs = sorted(self._pairs(found), key=lambda item: item[0])[: self.finalists]
        members = []
        for _, tactic in pairs:
            true_us = self.true_layer_us(tactic, problem)
            parts = (("sort", self.sort_us_of(tactic)),) if tactic.family == "tile" else ()
            members.append((tactic, self.measure(true_us, interleaved=True, parts_us=parts)))
        members.sort(key=lambda item: item[1].median_us)
        best = members[0][1]
        made = tuple(
            Member(
                tactic,
                seen,
                seen.ci_low_us <= best.ci_high_us or seen.median_us / best.median_us - 1 <= 1.4 * self.noise,
            )
            for tactic, seen in members
        )
        chosen = made[0].tactic
        band = 1.4 * self.noise  # 95 of 100 pairs of finals of one tactic are closer than this
        return Decision(at, chosen, made, chosen, best.median_us, band, "", self.environment.id, self.run, 0.0)


def only_row(a: Any, b: Any, align: Any = "tokens") -> DiffRow:
    (row,) = diff_sides(a, b, align).rows
    return row


def stage_times(at: Any, tactic: Tactic, first: float, second: float, **more: Any) -> list[Any]:
    return [tried(at, tactic.stage(name), us, **more) for name, us in zip(STAGES, (first, second), strict=True)]


def two_ep(ab: float, ba: float, **more: Any) -> tuple[Any, Any]:
    """EP 1 chose LARGE, EP 16 chose SMALL; `ab` is what LARGE costs EP 16, `ba` what SMALL costs EP 1."""
    one, sixteen = key(2048, 256), key(2048, 16)
    a = side("EP 1", [decided(one, [(LARGE, 1000.0), (SMALL, 1000.0 * (1 + ba))], **more)])
    b = side("EP 16", [decided(sixteen, [(SMALL, 100.0), (LARGE, 100.0 * (1 + ab))], **more)])
    return a, b


def composed_sides(ab: float, ba: float) -> tuple[Any, Any]:
    one, sixteen = key(2048, 256), key(2048, 16)
    sort = (("sort", 10.0),)
    home_a = stage_times(one, LARGE, 600.0, 390.0) + stage_times(one, SMALL, 600.0 + 1000.0 * ba, 390.0)
    home_b = stage_times(sixteen, SMALL, 60.0, 30.0) + stage_times(sixteen, LARGE, 60.0, 30.0 + 100.0 * ab)
    a = side("EP 1", [decided(one, [(LARGE, 1000.0)], parts_us=sort)], home_a)
    b = side("EP 16", [decided(sixteen, [(SMALL, 100.0)], parts_us=sort)], home_b)
    return a, b


@pytest.fixture
def make() -> SimpleNamespace:
    """Everything above, so that tests need no import of this file."""
    return SimpleNamespace(
        SHAPE=SHAPE,
        TARGET=TARGET,
        ENVIRONMENT=ENVIRONMENT,
        REGIME=REGIME,
        SMALL=SMALL,
        LARGE=LARGE,
        LayerKey=LayerKey,
        Tuner=Tuner,
        key=key,
        time=time,
        decided=decided,
        tried=tried,
        side=side,
        only_row=only_row,
        stage_times=stage_times,
        two_ep=two_ep,
        composed_sides=composed_sides,
    )
