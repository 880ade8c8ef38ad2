"""An analytic estimate of one stage's time: what orders candidates and gives the search its prior.

The model is a roofline with four limits, joined by a smooth maximum:

    memory      weights of the active experts and activations over DRAM, slower where too few bytes are in flight
    tensor      padded work of the busiest SM at the rate that the tile's shape reaches on the tensor core
    traffic     tile loads of the busiest SM through its L2 port
    latency     rounds of the resident programs, each a chain of k-steps that the pipeline stages can only partly hide

plus what every kernel pays: launches, the filling and draining of each tile, and the small kernels that belong to
the stage (permute, activation, combine). Rankings matter here, not absolute times: a chip's constants were set from
measured H200 times, other chips scale from their data sheets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fitune.footprint import (
    column_blocks,
    gemm_size,
    k_steps,
    programs_launched,
    programs_resident,
    step_bytes,
)
from fitune.problem import LayerShape, Problem
from fitune.tactic import Stage, num_tiles
from fitune.target import Target

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chip:
    """Rates of one chip: DRAM and per-SM L2 bytes a µs, bf16 tensor flops a µs, µs of a launch and of one load.

    `scaled_sums_per_us`: elements of partial products that one SM scales and adds, for block scales.
    """

    dram_bytes_per_us: float
    port_bytes_per_us: float
    tensor_flops_per_us: float
    launch_us: float = 1.5
    load_us: float = 0.9
    scaled_sums_per_us: float = 100e3


CHIPS: Final[dict[str, Chip]] = {
    "sm_80": Chip(1.9e6, 85e3, 290e6, 2.0, 1.0),
    "sm_89": Chip(0.85e6, 90e3, 180e6, 2.0, 1.0),
    "sm_90": Chip(4.7e6, 120e3, 790e6),
    "sm_100": Chip(7.5e6, 125e3, 2000e6),
    "gfx942": Chip(4.3e6, 60e3, 900e6, 3.0, 1.2),
}
TILE_FIXED_US: Final = 1.4
"""Filling and draining one tile's pipeline, when nothing else runs on the SM meanwhile."""
FLAT_FIXED_US: Final = 0.25
EMPTY_PROGRAM_US: Final = {"tile": 0.145, "gemv": 0.077}
"""What an SM spends on a launched program that finds no work: a grid covers the worst routing, EP leaves most idle."""
VECTOR_FLOPS_SHARE: Final = 0.05
"""Multiply-adds outside the tensor core, as a share of its rate: what the gemv family has."""
_SHARPNESS: Final = 4.0


@dataclass(frozen=True, slots=True)
class CostTerms:
    """The estimate of one stage with the quantities it is made of.

    `tiles` counts row tiles and `units` row tiles times column tiles; `resident` programs run at once, so the units
    take `rounds` rounds of which the last is partly empty; `busiest_units` fall on the busiest SM. `weight_bytes` is
    each active expert once, `dram_weight_bytes` with re-reads that L2 does not catch, `port_bytes` everything the
    SMs load. `empty_programs` were launched and find no work, which takes `empty_us`. `tensor_rate` is the share of the
    chip's peak that the tile shape reaches. `memory_us`, `tensor_us`, `traffic_us` and `latency_us` are the four
    limits, `fixed_us` the exposed filling and draining of tiles, `extra_us` the stage's small kernels, `launch_us` all
    launches.
    """

    expected_rows: float
    expected_active_experts: float
    padded_rows: float
    tiles: float
    units: float
    resident: int
    rounds: float
    busiest_units: float
    weight_bytes: float
    dram_weight_bytes: float
    activation_bytes: float
    port_bytes: float
    tensor_rate: float
    memory_us: float
    tensor_us: float
    traffic_us: float
    latency_us: float
    fixed_us: float
    empty_programs: float
    empty_us: float
    extra_us: float
    launch_us: float
    predicted_us: float

    @property
    def waves(self) -> float:
        """Units over resident programs, not rounded up."""
        return self.units / self.resident

    @property
    def padding(self) -> float:
        """Padded rows over routed rows; 1 without any."""
        return self.padded_rows / self.expected_rows if self.expected_rows else 1.0

    @property
    def bound(self) -> str:
        """Which limit is the largest: memory, tensor, traffic or latency."""
        limits = {
            "memory": self.memory_us,
            "tensor": self.tensor_us,
            "traffic": self.traffic_us,
            "latency": self.latency_us,
        }
        return max(limits, key=lambda name: limits[name])


def rows_of_active_expert(problem: Problem) -> float:
    """Expected rows of a local expert that has any."""
    return problem.expected_routed_rows / max(problem.expected_active_experts, 1e-9) if problem.num_tokens else 0.0


def power_at_least(value: float) -> int:
    """The smallest power of two that is no less."""
    power = 1
    while power < value:
        power *= 2
    return power


def expected_tiles(problem: Problem, tile_size: int, expert_rows: Sequence[int] | None = None) -> float:
    """Row tiles over all local experts: of `expert_rows` where given, else expected under the routing profile."""
    if expert_rows is not None:
        return float(sum(num_tiles(rows, tile_size) for rows in expert_rows))
    return _expected_tiles(problem, tile_size)


@dataclass(frozen=True, slots=True)
class Load:
    """What the routing puts on one stage: rows, experts with rows, row tiles, and the GEMM's columns and K."""

    rows: float
    active: float
    tiles: float
    columns: int
    k: int


def load_of(stage: Stage, problem: Problem, expert_rows: Sequence[int] | None) -> Load:
    if expert_rows is None:
        rows, active = problem.expected_routed_rows, expected_tiles(problem, 1 << 30)
    else:
        rows, active = float(sum(expert_rows)), float(sum(count > 0 for count in expert_rows))
    tiles = rows if stage.tile_size == 1 else expected_tiles(problem, stage.tile_size, expert_rows)
    return Load(rows, active, tiles, *gemm_size(stage, problem.shape))


def tile_terms(stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None) -> CostTerms:
    """The estimate of a stage of the tile family. `expert_rows` [local_experts] replaces the expected rows."""
    chip, load = CHIPS.get(target.arch, CHIPS["sm_80"]), load_of(stage, problem, expert_rows)
    gemm, shape, sms = stage.own_gemm, problem.shape, target.num_sms
    item, steps, blocks = shape.item_bytes, k_steps(stage, shape), column_blocks(stage, shape)
    resident = programs_resident(stage, shape, target)
    per_sm = resident // sms
    units = load.tiles * blocks
    rounds, busiest = math.ceil(units / resident), math.ceil(units / sms)
    rate = _tensor_rate(stage, target, item)
    step_flops = 2.0 * stage.tile_size * gemm.block_n * gemm.block_k
    loaded_bytes = float(step_bytes(stage, shape))
    flat = gemm.schedule == "persistent" and gemm.flatten
    tile_us = FLAT_FIXED_US if flat else TILE_FIXED_US

    weight = load.active * load.k * load.columns * item
    dram_weight = weight * _rereads(load, gemm.group_m, item, target)
    activation = load.rows * (load.k * item + _columns_out(stage, load) * _bytes_out(stage, shape))
    in_flight = per_sm * (gemm.num_stages - 1) * gemm.block_n * gemm.block_k * item
    needed = chip.dram_bytes_per_us * 0.75 * chip.load_us / sms
    starved = smooth_max(1.0, needed / max(in_flight, 1.0))
    memory_us = (dram_weight + activation) / chip.dram_bytes_per_us * starved
    tensor_us = busiest * steps * step_flops / (chip.tensor_flops_per_us / sms * rate)
    if shape.scales == "block":  # partial products are scaled and added while other programs multiply
        tensor_us += busiest * steps * stage.tile_size * gemm.block_n / (chip.scaled_sums_per_us * per_sm)
    traffic_us = busiest * steps * loaded_bytes / chip.port_bytes_per_us
    latency_us = rounds * (steps * chip.load_us / max(gemm.num_stages - 1, 0.7) + tile_us)
    fixed_us = (busiest * tile_us / per_sm if units else 0.0) + (TILE_FIXED_US if flat else 0.0)
    extra_us, extra_launches = extras(stage, problem, load, chip)
    launch_us = chip.launch_us * (1 + extra_launches)
    empty, empty_us = _empty_programs(stage, problem, sms, units)
    body = smooth_max(memory_us, tensor_us, traffic_us, latency_us)
    # What a tile exposes matters in full where the tensor core sets the pace; DRAM keeps streaming meanwhile.
    share = max(tensor_us, traffic_us, latency_us) / max(body, 1e-9)
    return CostTerms(
        expected_rows=load.rows,
        expected_active_experts=load.active,
        padded_rows=load.tiles * stage.tile_size,
        tiles=load.tiles,
        units=units,
        resident=resident,
        rounds=float(rounds),
        busiest_units=float(busiest),
        weight_bytes=weight,
        dram_weight_bytes=dram_weight,
        activation_bytes=activation,
        port_bytes=units * steps * loaded_bytes,
        tensor_rate=rate,
        memory_us=memory_us,
        tensor_us=tensor_us,
        traffic_us=traffic_us,
        latency_us=latency_us,
        fixed_us=fixed_us * min(1.0, share),
        empty_programs=empty,
        empty_us=empty_us,
        extra_us=extra_us,
        launch_us=launch_us,
        predicted_us=body + fixed_us * min(1.0, share) + empty_us + extra_us + launch_us,
    )


def gemv_terms(stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None) -> CostTerms:
    """One program per row and few weight rows, products summed on the vector units: near a plain read."""
    chip, load = CHIPS.get(target.arch, CHIPS["sm_80"]), load_of(stage, problem, expert_rows)
    gemm, shape, sms = stage.own_gemm, problem.shape, target.num_sms
    item, steps = shape.item_bytes, k_steps(stage, shape)
    resident = programs_resident(stage, shape, target)
    per_sm = resident // sms
    units = load.tiles * column_blocks(stage, shape)
    weight = load.active * load.k * load.columns * item
    swept = load.rows * load.k * load.columns * item
    activation = load.rows * (load.k + _columns_out(stage, load)) * shape.io_bytes
    in_flight = per_sm * gemm.block_n * min(gemm.block_k, load.k) * item
    starved = smooth_max(1.0, chip.dram_bytes_per_us * 0.75 * chip.load_us / sms / in_flight)
    memory_us = (weight + activation) / chip.dram_bytes_per_us * starved
    tensor_us = 2.0 * load.rows * load.k * load.columns / (chip.tensor_flops_per_us * VECTOR_FLOPS_SHARE)
    traffic_us = swept / (chip.port_bytes_per_us * sms) * 1.3
    rounds, busiest = math.ceil(units / resident), math.ceil(units / sms)
    latency_us = rounds * (chip.load_us * steps * 0.6 + 0.3)
    extra_us, extra_launches = extras(stage, problem, load, chip)
    launch_us = chip.launch_us * (1 + extra_launches)
    empty, empty_us = _empty_programs(stage, problem, sms, units)
    return CostTerms(
        expected_rows=load.rows,
        expected_active_experts=load.active,
        padded_rows=load.rows,
        tiles=load.tiles,
        units=units,
        resident=resident,
        rounds=float(rounds),
        busiest_units=float(busiest),
        weight_bytes=weight,
        dram_weight_bytes=weight,
        activation_bytes=activation,
        port_bytes=swept,
        tensor_rate=VECTOR_FLOPS_SHARE,
        memory_us=memory_us,
        tensor_us=tensor_us,
        traffic_us=traffic_us,
        latency_us=latency_us,
        fixed_us=0.0,
        empty_programs=empty,
        empty_us=empty_us,
        extra_us=extra_us,
        launch_us=launch_us,
        predicted_us=smooth_max(memory_us, tensor_us, traffic_us, latency_us) + empty_us + extra_us + launch_us,
    )


def _empty_programs(stage: Stage, problem: Problem, num_sms: int, units: float) -> tuple[float, float]:
    """Programs launched beyond the expected units of work, and the µs they take."""
    empty = max(0.0, programs_launched(stage, problem, num_sms) - units)
    return empty, empty / num_sms * EMPTY_PROGRAM_US.get(stage.family, EMPTY_PROGRAM_US["tile"])


def _columns_out(stage: Stage, load: Load) -> float:
    """Columns written per row: half of gemm1's when its epilogue applies the activation."""
    return load.columns / 2.0 if stage.activation == "fused" else float(load.columns)


def _bytes_out(stage: Stage, shape: LayerShape) -> int:
    """Bytes of one element that the GEMM stores: quantised already, or as it passes between kernels."""
    quantised = shape.scales and stage.activation == "fused" and stage.quantize == "fused"
    return shape.item_bytes if quantised else shape.io_bytes


def extras(stage: Stage, problem: Problem, load: Load, chip: Chip) -> tuple[float, int]:
    """µs and number of the small kernels of a stage, each at some three quarters of the DRAM rate."""
    shape, moved, launches = problem.shape, 0.0, 0
    row, io = float(shape.hidden_size), shape.io_bytes
    rewritten = io + (shape.item_bytes if shape.scales else io)  # read, and written quantised or not
    if stage.gather == "permute":
        moved, launches = moved + load.rows * row * rewritten, launches + 1
    elif stage.gather == "fused" and shape.scales and (stage.family, shape.scales) != ("gemv", "block"):
        moved, launches = moved + problem.num_tokens * row * rewritten, launches + 1
    if stage.activation == "separate" or stage.quantize == "separate":
        halves = 2 if stage.activation == "separate" else 1
        moved += load.rows * shape.intermediate_size * (halves * io + rewritten - io)
        launches += 1
    if stage.finalize == "reduce":
        moved, launches = moved + (load.rows + problem.num_tokens) * row * io, launches + 1
    if stage.finalize == "fused" and stage.family == "gemv":
        moved += problem.num_tokens * row * io
    elif stage.finalize == "fused":  # float32 atomics, zeroed before and cast after
        moved, launches = moved + (16.0 * load.rows + 4.0 * problem.num_tokens) * row * io, launches + 2
    return moved / (0.75 * chip.dram_bytes_per_us), launches


def _tensor_rate(stage: Stage, target: Target, item: int) -> float:
    """Share of the bf16 peak that a tile shape reaches when it never waits for loads."""
    gemm = stage.own_gemm
    rows, columns = (gemm.block_n, stage.tile_size) if gemm.swap_ab else (stage.tile_size, gemm.block_n)
    if target.has_wgmma and rows >= 64 and gemm.num_warps % 4 == 0:
        groups = gemm.num_warps // 4
        side_by_side = max(1, groups // max(1, rows // 64))
        width = columns / side_by_side
        rate = width / (width + 40.0) * 1.15 * (0.75 if side_by_side > 1 else 1.0)
    else:
        width = min(rows, columns) * 2.0 if min(rows, columns) < 32 else float(columns)
        rate = (0.5 if target.has_wgmma else 0.95) * width / (width + 40.0)
    rate *= 0.85 if gemm.swap_ab else 1.0
    if gemm.loads == "pointer" or stage.gather == "fused":
        rate *= 0.8
    if gemm.block_k < 64:
        rate *= 0.7
    return min(1.0, rate) * {1: 2.0, 4: 0.5}.get(item, 1.0)


def _rereads(load: Load, group_m: int, item: int, target: Target) -> float:
    """How often an expert's weights come from DRAM: more than once where its tiles are walked in several groups."""
    per_expert = load.tiles / load.active if load.active else 0.0
    groups = max(1.0, math.ceil(per_expert / group_m))
    missed = min(1.0, max(0.0, load.k * load.columns * item / target.l2_bytes - 0.5))
    return 1.0 + missed * (groups - 1.0)


def smooth_max(*values: float) -> float:
    largest = max(values)
    if largest <= 0.0:
        return 0.0
    total: float = sum((value / largest) ** _SHARPNESS for value in values)
    return float(largest * total ** (1.0 / _SHARPNESS))


@lru_cache(maxsize=4096)
def _expected_tiles(problem: Problem, tile_size: int) -> float:
    if problem.num_tokens == 0:
        return 0.0
    shares = _expert_chances(problem)
    if problem.routing == "balanced":
        rows = problem.expected_rows_per_expert
        whole, part = divmod(rows, 1.0)
        high, low = num_tiles(int(whole) + 1, tile_size), num_tiles(int(whole), tile_size)
        return problem.local_experts * (part * high + (1.0 - part) * low)
    chances, counts = np.unique(shares, return_counts=True)
    each = [_binomial_tiles(problem.num_tokens, float(chance), tile_size) for chance in chances]
    return float(np.dot(each, counts) * problem.local_experts / counts.sum())


def _expert_chances(problem: Problem) -> Floats:
    """Chance that a token falls on an expert, per expert rank: all equal but under a Zipf profile."""
    uniform = problem.expected_rows_per_expert / problem.num_tokens
    kind, _, argument = problem.routing.partition(":")
    if kind != "zipf":
        return np.array([min(1.0, uniform)])
    count = problem.shape.num_experts
    weights = np.arange(1, count + 1, dtype=np.float64) ** -float(argument or 1.0)
    # Drawing top_k distinct experts caps each at one slot a token: find the exponent rate that fills top_k slots.
    low, high = 0.0, 1.0
    while float((1.0 - np.exp(-high * weights)).sum()) < problem.shape.top_k * 0.999 and high < 1e12:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        filled = float((1.0 - np.exp(-middle * weights)).sum())
        low, high = (middle, high) if filled < problem.shape.top_k else (low, middle)
    chances: Floats = np.round(1.0 - np.exp(-high * weights), 6)
    return chances


def _binomial_tiles(tokens: int, chance: float, tile_size: int) -> float:
    """Expected tiles of one expert that each of `tokens` tokens chooses with `chance`."""
    if chance >= 1.0:
        return float(num_tiles(tokens, tile_size))
    if chance <= 0.0:
        return 0.0
    spread = 8.0 * math.sqrt(tokens * chance * (1.0 - chance)) + 12.0
    low, high = max(0, int(tokens * chance - spread)), min(tokens, int(tokens * chance + spread))
    rows = np.arange(low, high + 1)
    steps = np.log((tokens - rows[:-1]) / (rows[:-1] + 1.0)) + math.log(chance / (1.0 - chance))
    logs = np.concatenate(([0.0], np.cumsum(steps)))
    weights = np.exp(logs - logs.max())
    return float(np.dot(weights / weights.sum(), -(-rows // tile_size)))
