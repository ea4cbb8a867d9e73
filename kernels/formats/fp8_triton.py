"""FP8 arithmetic for Triton kernels: power-of-two scales and saturating conversion to e4m3."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(amax):
    """Return `fp8.power_of_two_scale` and its inverse."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -40), 120)
    exponent = tl.where((bits >> 23) == 255, 128, exponent)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return scale, (tl.maximum(127 - exponent, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def saturated(y):
    """Convert float32 as `fp8.saturated`."""
    y = tl.where(y > 448.0, 448.0, y)
    return tl.where(y < -448.0, -448.0, y).to(tl.float8e4nv)
