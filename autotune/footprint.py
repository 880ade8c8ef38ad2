"""What a stage asks of the chip: the size of its GEMM, and the shared memory and registers of one program.

The one place for these numbers. The space asks whether a stage fits, the cost model how many programs run at once, a
decision which of two tied tactics needs less.
"""

from __future__ import annotations

from typing import Final

from fitune.problem import LayerShape, Problem
from fitune.tactic import Stage, max_tiles
from fitune.target import Target

REGISTERS_BESIDE_ACCUMULATOR: Final = 40
RESERVED_SHARED_BYTES: Final = 1024
FLAT_SCRATCH_BYTES_PER_THREAD: Final = 64
"""A flattened loop stores one tile while it loads the next, so that the store's scratch lies beside the pipeline.

Compiled for sm_90, stores need 64 B a thread, or 128 B where a thread holds 64 accumulators or more at 8 warps;
float32 atomics 4 * 16 * warps * block_n B and more. Only the part common to all is counted.
"""
MAX_THREADS_PER_SM: Final = 2048
MAX_PROGRAMS_PER_SM: Final = 32
MAX_REGISTERS_PER_THREAD: Final = 255


def gemm_size(stage: Stage, shape: LayerShape) -> tuple[int, int]:
    """(N, K) of the stage's GEMM: weight rows of one expert, and the reduction length."""
    if stage.stage == "gemm1":
        return 2 * shape.intermediate_size, shape.hidden_size
    return shape.hidden_size, shape.intermediate_size


def result_columns(stage: Stage) -> int:
    """Columns that one tile stores: half its weight rows where SwiGLU is fused."""
    return stage.own_gemm.block_n // 2 if stage.activation == "fused" else stage.own_gemm.block_n


def column_blocks(stage: Stage, shape: LayerShape) -> int:
    """Column blocks of the GEMM: programs per row tile."""
    n, _ = gemm_size(stage, shape)
    return -(-n // stage.own_gemm.block_n)


def k_steps(stage: Stage, shape: LayerShape) -> int:
    """Steps of the loop over the reduction length."""
    _, k = gemm_size(stage, shape)
    return -(-k // stage.own_gemm.block_k)


def step_bytes(stage: Stage, shape: LayerShape) -> int:
    """Bytes of both operands that one step loads."""
    return (stage.tile_size + stage.own_gemm.block_n) * stage.own_gemm.block_k * shape.item_bytes


def shared_memory_bytes(stage: Stage, shape: LayerShape, target: Target) -> int:
    """Shared memory of one program: pipelined operands, and what the epilogue needs on top or in their place.

    Barriers are not counted. On sm_90 it is never more than a program really takes; chips that load without TMA keep
    one buffer less than is counted.
    """
    if stage.family == "gemv":
        return 0
    gemm = stage.own_gemm
    pipeline = gemm.num_stages * step_bytes(stage, shape)
    swiglu_by_tma = gemm.swap_ab and stage.activation == "fused" and gemm.loads == "tma"
    if swiglu_by_tma and not gemm.reads_gate_and_up_apart and target.has_wgmma:
        # Gate and up rows come as one box of four dimensions; reshaped, they need a buffer less.
        pipeline -= gemm.block_n * gemm.block_k * shape.item_bytes
    if gemm.flatten and target.has_wgmma:
        return pipeline + FLAT_SCRATCH_BYTES_PER_THREAD * target.warp_size * gemm.num_warps
    return max(pipeline, stage.tile_size * result_columns(stage) * shape.item_bytes)


def accumulator_registers(stage: Stage, shape: LayerShape) -> int:
    """Registers per thread that hold the accumulators, and a step's partial products that are added to them in fp8.

    For gemv those that hold the weights in flight: its accumulators are few.
    """
    gemm = stage.own_gemm
    threads = gemm.num_warps * 32
    if stage.family == "gemv":
        return gemm.block_n * gemm.block_k * shape.item_bytes * gemm.num_stages // (4 * threads)
    return stage.tile_size * gemm.block_n // threads * (2 if shape.scales else 1)


def programs_per_sm(stage: Stage, shape: LayerShape, target: Target) -> int:
    """Programs of the stage that one SM can hold at once: an estimate from shared memory, registers and threads."""
    threads = stage.own_gemm.num_warps * target.warp_size
    registers = min(MAX_REGISTERS_PER_THREAD, accumulator_registers(stage, shape) + REGISTERS_BESIDE_ACCUMULATOR)
    by_registers = target.registers_per_sm // (threads * registers)
    by_shared = target.shared_bytes // (shared_memory_bytes(stage, shape, target) + RESERVED_SHARED_BYTES)
    return max(1, min(by_registers, by_shared, MAX_THREADS_PER_SM // threads, MAX_PROGRAMS_PER_SM))


def programs_resident(stage: Stage, shape: LayerShape, target: Target) -> int:
    """Programs of the stage that the whole chip holds at once: no more than a persistent loop starts."""
    fit = programs_per_sm(stage, shape, target)
    if stage.own_gemm.schedule == "persistent":
        fit = min(fit, stage.own_gemm.programs_per_sm)
    return fit * target.num_sms


def programs_launched(stage: Stage, problem: Problem, num_sms: int) -> int:
    """Programs of the GEMM's launch. No launch waits for the routing: `grid` must cover the worst case there is."""
    blocks = column_blocks(stage, problem.shape)
    rows = problem.max_routed_rows
    if stage.family == "gemv":
        tiles = rows if stage.stage == "gemm1" else problem.num_tokens  # gemm2 has a program for every token's columns
    else:
        tiles = max_tiles(rows, problem.local_experts, stage.tile_size)
    worst = tiles * blocks
    return worst if stage.own_gemm.schedule == "grid" else min(worst, num_sms * stage.own_gemm.programs_per_sm)
