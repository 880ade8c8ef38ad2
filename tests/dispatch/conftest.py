"""Small layers, tables made of decisions, and tensors for them. Kernels run under Triton's interpreter here."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fitune.cache.table import Table, table_of
from fitune.dispatch import Runtime
from fitune.problem import Dispatch, Key, LayerShape, Problem, key_of
from fitune.record import Decision, Measurement, Member, Regime
from fitune.tactic import GemmTactic, Tactic, parse_tactic
from fitune.target import Environment, kernel_source_hash

SHAPE = LayerShape(hidden_size=32, intermediate_size=16, num_experts=8, top_k=2, dtype="fp32")
SMALL = GemmTactic(32, 32, 8, 4, 2)
TACTIC = Tactic("tile", 16, SMALL, SMALL)
OTHER = parse_tactic("t32 gather:fused act:separate g1:32x16/g8/w4/s2/p1/ptr g2:32x16/g8/w4/s2/grid/ptr fin:fused")


def environment(kernels: str | None = None, device: str = "cpu") -> Environment:
    return Environment(
        device=device,
        arch="cpu",
        num_sms=4,
        fitune="0.1.0",
        kernels=kernel_source_hash() if kernels is None else kernels,
        triton="3.6.0",
        torch="2.11.0",
    )


@dataclass
class TableMaker:
    """Makes a table of the given layer with one decision for each count."""

    shape: LayerShape = SHAPE
    local_experts: int = 4
    dispatch: Dispatch = "all_gather"
    routing: str = "random"
    device: str = "cpu"
    kernels: str | None = None

    def decisions(self, counts: Iterable[int], tactics: Callable[[int], Tactic]) -> list[Decision]:
        found = []
        for count in counts:
            problem = Problem(self.shape, self.local_experts, count, self.routing, self.dispatch)
            found.append(decision(key_of(problem, self.device), tactics(count), self.environment))
        return found

    def __call__(self, counts: Iterable[int], tactics: Callable[[int], Tactic] | None = None) -> Table:
        choose = tactics or (lambda count: TACTIC)
        return table_of(self.decisions(counts, choose), {self.environment.id: self.environment})

    @property
    def environment(self) -> Environment:
        return environment(self.kernels, self.device)


def decision(key: Key, tactic: Tactic, where: Environment) -> Decision:
    measurement = Measurement(20.0, 19.0, 21.0, 10, Regime())
    slower = replace(measurement, median_us=30.0, ci_low_us=29.0, ci_high_us=31.0)
    default = replace(TACTIC, tile_size=128)
    members = (Member(tactic, measurement, True), Member(default, slower, False))
    return Decision(key, tactic, members, default, 30.0, 0.01, "fastest", where.id, "run", 1.0)


@dataclass
class Tensors:
    """The tensors of one call, as keyword arguments."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return (self.x, self.w13, self.w2, self.topk_weights, self.topk_ids)

    def but(self, **changes: Any) -> Tensors:
        return replace(self, **changes)


def make_tensors(num_tokens: int, shape: LayerShape = SHAPE, local_experts: int = 4, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.5

    ids = torch.rand(num_tokens, shape.num_experts, generator=generator).argsort(1)[:, : shape.top_k]
    weights = torch.rand(num_tokens, shape.top_k, generator=generator) + 0.1
    return Tensors(
        draw(num_tokens, shape.hidden_size),
        draw(local_experts, 2 * shape.intermediate_size, shape.hidden_size),
        draw(local_experts, shape.hidden_size, shape.intermediate_size),
        weights,
        ids.to(torch.int32),
    )


def expected(tensors: Tensors, offset: int = 0) -> torch.Tensor:
    """The layer, written out token by token."""
    x, w13, w2, weights, ids = tensors.args
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot]) - offset
            if int(ids[token, slot]) < 0 or not 0 <= expert < w13.shape[0]:
                continue
            gate, up = (w13[expert] @ x[token]).chunk(2)
            out[token] += weights[token, slot] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.fixture
def runtime() -> Runtime:
    """Nothing was logged or loaded before."""
    return Runtime()


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """The helpers of this file, for tests that cannot import it."""
    return SimpleNamespace(
        shape=SHAPE,
        tactic=TACTIC,
        other=OTHER,
        table=TableMaker,
        environment=environment,
        tensors=make_tensors,
        expected=expected,
    )
