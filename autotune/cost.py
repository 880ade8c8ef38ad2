"""The estimate of one stage's time, by its family: what orders candidates and gives the search its prior."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fitune.families.registry import family_named
from fitune.problem import Problem
from fitune.roofline import CHIPS, Chip, CostTerms, Floats, expected_tiles
from fitune.tactic import Stage
from fitune.target import Target

__all__ = ["CHIPS", "Chip", "CostTerms", "expected_tiles", "predict_many_us", "predict_us", "terms"]


def predict_us(stage: Stage, problem: Problem, target: Target) -> float:
    """Estimated µs of a stage, small kernels and launches included. Raises InputError for a family not installed."""
    return terms(stage, problem, target).predicted_us


def predict_many_us(stages: Sequence[Stage], problem: Problem, target: Target) -> Floats:
    """`predict_us` of many stages, float64 [len(stages)]."""
    return np.array([predict_us(stage, problem, target) for stage in stages], dtype=np.float64)


def terms(stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None) -> CostTerms:
    """The estimate with its parts. `expert_rows` [local_experts] replaces the routing profile's expectation.

    Raises InputError for a family that is not installed.
    """
    return family_named(stage.family).cost(stage, problem, target, expert_rows)
