"""A plain roofline for GEMMs that a library runs: what a family without a cost model of its own is predicted with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from fitune.problem import Problem
from fitune.roofline import CHIPS, CostTerms, expected_tiles, extras, load_of, smooth_max
from fitune.tactic import Stage
from fitune.target import Target

LIBRARY_TILE: Final = 128
"""Rows and columns of the tiles that a library's GEMM is thought to have."""
LIBRARY_TENSOR_RATE: Final = 0.75


def library_terms(
    stage: Stage,
    problem: Problem,
    target: Target,
    expert_rows: Sequence[int] | None = None,
    *,
    tensor_rate: float = LIBRARY_TENSOR_RATE,
    launches: int = 1,
) -> CostTerms:
    """Weights of the active experts and activations over the DRAM rate, padded flops over a share of the tensor rate.

    Small kernels that the stage's gather, activation and finalize name are added, and so are `launches` of the GEMM.
    """
    chip = CHIPS.get(target.arch, CHIPS["sm_80"])
    load, item = load_of(stage, problem, expert_rows), problem.shape.item_bytes
    tiles = expected_tiles(problem, LIBRARY_TILE, expert_rows)
    units = tiles * -(-load.columns // LIBRARY_TILE)
    weight = load.active * load.k * load.columns * item
    activation = load.rows * (load.k + load.columns) * item
    memory_us = (weight + activation) / chip.dram_bytes_per_us
    flops = 2.0 * tiles * LIBRARY_TILE * load.k * load.columns * (2.0 if item == 4 else 1.0)
    tensor_us = flops / (chip.tensor_flops_per_us * tensor_rate)
    extra_us, extra_launches = extras(stage, problem, load, chip)
    launch_us = chip.launch_us * (launches + extra_launches)
    return CostTerms(
        expected_rows=load.rows,
        expected_active_experts=load.active,
        padded_rows=tiles * LIBRARY_TILE,
        tiles=tiles,
        units=units,
        resident=target.num_sms,
        rounds=float(math.ceil(units / target.num_sms)),
        busiest_units=float(math.ceil(units / target.num_sms)),
        weight_bytes=weight,
        dram_weight_bytes=weight,
        activation_bytes=activation,
        port_bytes=units * 2.0 * LIBRARY_TILE * load.k * item,
        tensor_rate=tensor_rate,
        memory_us=memory_us,
        tensor_us=tensor_us,
        traffic_us=0.0,
        latency_us=0.0,
        fixed_us=0.0,
        empty_programs=0.0,
        empty_us=0.0,
        extra_us=extra_us,
        launch_us=launch_us,
        predicted_us=smooth_max(memory_us, tensor_us) + extra_us + launch_us,
    )
