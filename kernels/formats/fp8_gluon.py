"""Gluon device functions that quantize to e4m3, with the same scales as `fp8_triton`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def power_of_two(amax):
    """Return `fp8.power_of_two_scale` and its inverse."""
    bits = amax.to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    exponent = gl.minimum(gl.maximum(exponent, -40), 120)
    exponent = gl.where((bits >> 23) == 255, 128, exponent)
    scale = ((exponent + 127) << 23).to(gl.float32, bitcast=True)
    return scale, (gl.maximum(127 - exponent, 0) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def quantized(y, AXIS: gl.constexpr):
    """Quantize numbers along AXIS to e4m3; returns them and their common scale."""
    z = y.to(gl.float32)
    scale, inverse = power_of_two(gl.max(gl.abs(z), axis=AXIS))
    return (z * gl.expand_dims(inverse, AXIS)).to(gl.float8e4nv), scale


@gluon.jit
def quantized_pairs(even, odd, AXIS: gl.constexpr):
    """Quantize as `quantized`, for even and odd numbers held separately; returns int16, one per pair."""
    low = even.to(gl.float32)
    high = odd.to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(low), axis=AXIS), gl.max(gl.abs(high), axis=AXIS))
    scale, inverse = power_of_two(amax)
    inverse = gl.expand_dims(inverse, AXIS)
    pairs = gl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low * inverse, high * inverse], dtype=gl.int16,
        is_pure=True, pack=1,
    )  # fmt: skip
    return pairs, scale
