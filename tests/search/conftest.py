"""Synthetic times with a known optimum for search tests: field effects, interactions, a stage's own luck, failures."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest

from fitune import space
from fitune.measure.protocol import Outcome
from fitune.problem import LayerShape, Problem
from fitune.record import Measurement, Regime, Status
from fitune.search.pool import stage_features
from fitune.tactic import GemmTactic, Stage, StageName, Tactic
from fitune.target import KNOWN_TARGETS, Environment, Target

TARGET = KNOWN_TARGETS["sm_90"]
SHAPE = LayerShape(7168, 2048, 256, 8)
ENVIRONMENT = Environment(TARGET.device, TARGET.arch, TARGET.num_sms, "0.1.0", "kernelhash", triton="3.6.0")


def problem(num_tokens: int = 512, local_experts: int = 16) -> Problem:
    return Problem(SHAPE, local_experts, num_tokens)


def luck(*parts: object) -> float:
    """A number in [-1, 1] that depends on the parts alone."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**63 - 1.0


@dataclass(frozen=True)
class Form:
    """A landscape's own numbers: (optimum, drift with the tokens, weight) by feature, and pairs that interact."""

    features: tuple[tuple[float, float, float], ...]
    pairs: tuple[tuple[int, int, float, float], ...]


@lru_cache(maxsize=256)
def _form(seed: int, stage: StageName, count: int) -> Form:
    features = []
    for row in range(count):
        middle = (6.0, 7.0, 6.0, 4.0, 2.5, 0.5)[row] if row < 6 else 0.5
        best = middle + 1.5 * luck(seed, stage, "best", row)
        weight = 0.06 * (1.0 + luck(seed, stage, "weight", row))
        features.append((best, luck(seed, "shift", row), weight))
    pulls = ((row, other, luck(seed, stage, "pair", row, other)) for row in range(count) for other in range(row))
    pairs = [
        (row, other, 0.05 * (pull - 0.6), 2.0 * luck(seed, row, other)) for row, other, pull in pulls if pull > 0.6
    ]
    return Form(tuple(features), tuple(pairs))


@dataclass(frozen=True)
class Landscape:
    """Times that know nothing of the cost model: quadratic in each feature, with pairwise interactions."""

    seed: int = 0
    roughness: float = 0.04
    failing: float = 0.05

    def time_us(self, stage: Stage, key: Problem) -> float:
        """µs; NaN where the stage fails, as every library's GEMM does: the landscape has our own kernels' axes."""
        if not isinstance(stage.gemm, GemmTactic):
            return math.nan
        shift = math.log2(max(key.num_tokens, 1)) / 14.0
        values = stage_features(stage)
        form = _form(self.seed, stage.stage, len(values))
        total = math.log(30.0 + 200.0 * key.local_experts / 16 + key.num_tokens / 20)
        for value, (best, drift, weight) in zip(values, form.features, strict=True):
            total += weight * (value - best - shift * drift) ** 2
        for row, other, strength, centre in form.pairs:
            total += strength * abs(values[row] - values[other] - centre)
        if luck(self.seed, "fail", stage.gemm.num_warps, stage.gemm.block_n, stage.tile_size) > 1.0 - 2 * self.failing:
            return math.nan
        return math.exp(total + self.roughness * luck(self.seed, stage, "own"))


@dataclass
class SyntheticMeasurer:
    """A measurer over a landscape, with seeded noise. Counts what it is asked; may be told to break off."""

    landscape: Landscape = field(default_factory=Landscape)
    noise_share: float = 0.003
    stop_after: int | None = None
    name: str = "synthetic"
    target = TARGET
    environment: Environment = ENVIRONMENT
    asked: list[tuple[Problem, Stage]] = field(default_factory=list)
    finals_asked: list[tuple[Problem, tuple[Tactic, ...]]] = field(default_factory=list)
    hopeless_seen: list[float | None] = field(default_factory=list)

    def stages(self, problem: Problem, candidates: Sequence[Stage], hopeless_us: float | None) -> Iterator[Outcome]:
        self.hopeless_seen.append(hopeless_us)
        for stage in candidates:
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append((problem, stage))
            yield self.outcome(stage, self.landscape.time_us(stage, problem), len(self.asked))

    def outcome(self, tactic: Stage | Tactic, truth: float, draw: int) -> Outcome:
        if math.isnan(truth):
            return Outcome(tactic, Status.COMPILE_ERROR, error="the landscape has a hole here")
        seen = truth * (1.0 + self.noise_share * luck("noise", draw, tactic))
        low, high = seen * (1 - self.noise_share), seen * (1 + self.noise_share)
        return Outcome(tactic, Status.OK, Measurement(seen, low, high, 5, Regime()))

    def layer_us(self, problem: Problem, tactic: Tactic) -> float:
        return sum(self.landscape.time_us(tactic.stage(name), problem) for name in ("gemm1", "gemm2")) + 3.0

    def finals(self, problem: Problem, candidates: Sequence[Tactic], rounds: int) -> list[Outcome]:
        self.finals_asked.append((problem, tuple(candidates)))
        return [self.outcome(tactic, self.layer_us(problem, tactic), rounds) for tactic in candidates]

    def noise(self, problem: Problem, tactic: Tactic) -> float:
        return 2.0 * self.noise_share

    def warm(self, problem: Problem, candidates: Sequence[Stage]) -> None:
        return

    def close(self) -> None:
        return


def best_layer_us(measurer: SyntheticMeasurer, key: Problem) -> float:
    """The true optimum over all legal pairs."""
    return _best_layer_us(measurer.landscape, key)


@lru_cache(maxsize=256)
def _best_layer_us(landscape: Landscape, key: Problem) -> float:
    sides: dict[StageName, dict[tuple[str, int], float]] = {}
    names: tuple[StageName, ...] = ("gemm1", "gemm2")
    for name in names:
        best: dict[tuple[str, int], float] = {}
        for stage in space.pool(key, TARGET, name):
            time_us = landscape.time_us(stage, key)
            head = (stage.family, stage.tile_size)
            if not math.isnan(time_us):
                best[head] = min(best.get(head, math.inf), time_us)
        sides[name] = best
    shared = sides["gemm1"].keys() & sides["gemm2"].keys()
    return 3.0 + min(sides["gemm1"][head] + sides["gemm2"][head] for head in shared)


@dataclass(frozen=True)
class FewStages:
    """A space of a random `count` stages of every legal pool, the default and its partners among them."""

    count: int = 60

    def pool(self, key: Problem, target: Target, stage: StageName) -> list[Stage]:
        return few_stages(key, stage, self.count)

    def missing(self, key: Problem, target: Target, stage: StageName) -> int:
        return 0

    def default(self, key: Problem, target: Target) -> Tactic:
        return space.default_tactic(key, target)


def few_stages(key: Problem, name: StageName, count: int = 300, seed: int = 0) -> list[Stage]:
    """A random part of the legal pool of our own kernels, so that tests are quick."""
    pool = [stage for stage in space.pool(key, TARGET, name) if isinstance(stage.gemm, GemmTactic)]
    rng = np.random.default_rng(seed)
    rows = sorted(rng.choice(len(pool), min(count, len(pool)), replace=False).tolist())
    return [pool[row] for row in rows]


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The landscape and its helpers."""
    names = [
        "Landscape",
        "SyntheticMeasurer",
        "FewStages",
        "problem",
        "best_layer_us",
        "few_stages",
        "luck",
        "TARGET",
        "ENVIRONMENT",
    ]
    return SimpleNamespace(**{name: globals()[name] for name in names})
