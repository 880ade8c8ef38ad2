"""The footprint's counts against what the kernels' launches really ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fitune.footprint import programs_launched
from fitune.kernels.layer import LayerArgs, Workspace, run_stage
from fitune.problem import LayerShape, Problem
from fitune.space import pool
from fitune.tactic import STAGES, StageName
from fitune.target import target_named

SHAPE = LayerShape(512, 256, 16, 4)
TARGET = target_named("sm_90")


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("local_experts", [16, 3])
@pytest.mark.parametrize("num_tokens", [1, 3, 200])
def test_programs_launched_are_those_of_the_launch(name: StageName, local_experts: int, num_tokens: int) -> None:
    problem = Problem(SHAPE, local_experts, num_tokens)
    args, ws, out = tensors(problem)
    stages = pool(problem, TARGET, name)
    for stage in stages[:: max(1, len(stages) // 40)]:
        grids: list[int] = []

        def keep(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
            if "gem" in kernel.fn.__name__:
                grids.append(grid[0])  # noqa: B023 - called before the next turn

        run_stage(stage, args, ws, out, launch=keep)
        assert grids == [programs_launched(stage, problem, TARGET.num_sms)], str(stage)


def test_only_a_grid_grows_with_what_might_be_routed_here() -> None:
    few, many = Problem(SHAPE, 2, 1024), Problem(SHAPE, 2, 16384)
    for stage in (each for each in pool(many, TARGET, "gemm2") if each.family != "grouped_mm"):
        small, large = (programs_launched(stage, problem, TARGET.num_sms) for problem in (few, many))
        if stage.gemm.schedule == "grid":
            assert large > 8 * small
        else:
            assert large <= stage.gemm.programs_per_sm * TARGET.num_sms


def tensors(problem: Problem) -> tuple[LayerArgs, Workspace, torch.Tensor]:
    """A call of the problem on the meta device."""
    n, shape = problem.num_tokens, problem.shape
    bf16 = {"dtype": torch.bfloat16, "device": "meta"}
    x = torch.empty(n, shape.hidden_size, **bf16)  # type: ignore[call-overload]
    w13 = torch.empty(problem.local_experts, 2 * shape.intermediate_size, shape.hidden_size, **bf16)  # type: ignore[call-overload]
    w2 = torch.empty(problem.local_experts, shape.hidden_size, shape.intermediate_size, **bf16)  # type: ignore[call-overload]
    weights = torch.empty(n, shape.top_k, device="meta")
    ids = torch.empty(n, shape.top_k, dtype=torch.int32, device="meta")
    ws = Workspace.allocate(shape, problem.local_experts, n, "meta", num_sms=TARGET.num_sms)
    return LayerArgs(x, w13, w2, weights, ids), ws, torch.empty_like(x)
