"""Arithmetic that several kernels share: SiLU, rounding to e4m3 with a scale, and where scales of rows lie."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

GROUPS_AT_ONCE: Final = 8
"""Neighbouring groups of columns whose scales of one row lie side by side, in the 32 bytes that a load brings to L1.

A GEMM walks the groups one by one: seven of eight steps find their scales in L1, where each would wait for L2 if those
of all rows stood group by group (H200, gemm1 of 8,192 tokens in fp8 at EP 16: 285 µs instead of 330).
"""
_AT_ONCE: tl.constexpr = tl.constexpr(GROUPS_AT_ONCE)


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def scale_of(largest, FP8_MAX: tl.constexpr):
    """The scale that brings `largest` to the end of the range; 1 where all is zero."""
    return tl.where(largest > 0.0, largest / FP8_MAX, 1.0)


@triton.jit
def place_of_group(group, stride_line):
    """Offset of a group's scale from the first scale of its row."""
    return group // _AT_ONCE * stride_line + group % _AT_ONCE


@triton.jit
def quantize_groups(x, AXIS: tl.constexpr, FP8_MAX: tl.constexpr):
    """(x / scale, scale) with one scale for all values along AXIS; not yet rounded."""
    scale = scale_of(tl.max(tl.abs(x), AXIS), FP8_MAX)
    return tl.clamp(x / tl.expand_dims(scale, AXIS), -FP8_MAX, FP8_MAX), scale


@triton.jit
def to_e4m3(x, DTYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """Round float32 of at most FP8_MAX to e4m3, ties to even.

    BY_HAND rounds first in float32, for the interpreter, whose cast is off by a step for some values: three bits of
    mantissa, or multiples of the smallest step where the result is subnormal (2^-9, or 2^-10 in the fnuz form).
    """
    if BY_HAND:
        STEPS: tl.constexpr = 1024.0 if DTYPE.exponent_bias == 8 else 512.0
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
        small = (x * STEPS + 12582912.0) - 12582912.0
        x = tl.where(tl.abs(x) < 8.0 / STEPS, small / STEPS, bits.to(tl.float32, bitcast=True))
    return x.to(DTYPE)
