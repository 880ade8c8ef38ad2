"""Arithmetic that several kernels share: SiLU, and rounding to e4m3 with a scale."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def scale_of(largest, FP8_MAX: tl.constexpr):
    """The scale that brings `largest` to the end of the range; 1 where all is zero."""
    return tl.where(largest > 0.0, largest / FP8_MAX, 1.0)


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
