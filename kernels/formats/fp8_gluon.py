"""Gluon device functions that quantize to e4m3, with the same scales as `fp8_triton`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.kernels.formats.fp8_triton import power_of_two


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
