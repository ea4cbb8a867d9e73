"""Parts of epilogues of `packed_few_hopper`, whose tiles are `[features, tokens]`.

Some are copies from `fp8_few_hopper`, because plans name the digest of its source.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rows_factor(sumsq, live, stride, width, eps, PARTS: gl.constexpr, MOST: gl.constexpr, BM: gl.constexpr,
                 L: gl.constexpr):  # fmt: skip
    """Return 1 / rms of each token from sums of squares `[PARTS, T]`; MOST: PARTS rounded up to a power of two."""
    part = gl.arange(0, MOST, layout=gl.SliceLayout(1, L))
    tok = gl.arange(0, BM, layout=gl.SliceLayout(0, L))
    there = (part < PARTS)[:, None] & (tok < live)[None, :]
    sums = gl.load(sumsq + part[:, None] * stride + tok[None, :], mask=there, other=0.0)
    return gl.rsqrt(gl.sum(sums, axis=0) / width + eps)


@gluon.jit
def pairs(y):
    """Split `[2 R, T]` into even and odd rows `[R, T]`."""
    ROWS: gl.constexpr = y.shape[0] // 2
    return gl.split(gl.permute(gl.reshape(y, (ROWS, 2, y.shape[1])), (0, 2, 1)))


@gluon.jit
def to_heads(
    y, tile, tok, live, eps, cos_sin, page_row, q_norm, k_norm, out, kv,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_NORM: gl.constexpr,
    DTYPE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Write 128 features `y [128, T]` of q, K or V to `out` or the pages: head norm, then rotation."""
    lane = gl.arange(0, 128, layout=gl.SliceLayout(1, L))
    col = tile * 128 + lane
    if HAS_NORM:
        gl.static_assert(D == 128)
        weight = gl.load(q_norm + lane, mask=col < HQ * D, other=0.0).to(gl.float32)
        weight += gl.load(k_norm + lane, mask=(col >= HQ * D) & (col < (HQ + HKV) * D), other=0.0).to(gl.float32)
        inverse = gl.rsqrt(gl.sum(y * y, axis=0) / D + eps)
        y = gl.where((col < (HQ + HKV) * D)[:, None], y * inverse[None, :] * weight[:, None], y)
    a, b = pairs(y)
    cos, sin = pairs(cos_sin)
    turned = gl.join(a * cos - b * sin, b * cos + a * sin)
    turned = gl.convert_layout(gl.reshape(gl.permute(turned, (0, 2, 1)), (128, y.shape[1])), L)
    y = gl.where((col >= (HQ + HKV) * D)[:, None], y, turned).to(DTYPE)
    real = (tok < live)[None, :]
    gl.store(out + tok.to(gl.int64)[None, :] * (HQ * D) + col[:, None], y, mask=real & (col < HQ * D)[:, None])
    is_v = (col >= (HQ + HKV) * D).to(gl.int32)
    within = col - HQ * D + is_v * ((PAGE - 1) * HKV * D)
    kv_at = kv + page_row[None, :] * (HKV * D) + within[:, None]
    is_kv = (col >= HQ * D) & (col < (HQ + 2 * HKV) * D)
    gl.store(kv_at, y, mask=real & is_kv[:, None])
