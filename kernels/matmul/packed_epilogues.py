"""Epilogues of `packed_triton`: those of `gemm_triton`, and a residual that also writes the next product's operand.

They are copies, because plans name the digest of `gemm_triton`'s source.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.matmul.gemm_activations import activate, gate_with, soft_cap
from weft.kernels.matmul.gemm_tiles import columns
from weft.kernels.matmul.gemm_triton import load_cos_sin, rotate


@triton.jit
def _bias_of(bias, col, N, W: tl.constexpr):
    """Return `[1, W]` float32 of columns `col ..`."""
    at = col + tl.arange(0, W)
    return tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def finish_linear(
    total, scale, bias, factor, out, tile_m, tile_n, N, ACT: tl.constexpr, SOFTCAP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SLICES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Apply row scale, bias, activation, factor and soft cap, and store."""
    for s in tl.static_range(SLICES):
        col = tile_n * BN + s * (BN // SLICES)
        y = columns(total, s, SLICES)
        if scale is not None:
            y = y * scale[:, None]
        if bias is not None:
            y += _bias_of(bias, col, N, BN // SLICES)
        y = activate(y, ACT)
        if factor is not None:
            y = soft_cap(y * factor, SOFTCAP)
        out.store([tile_m * BM, col], y.to(OUT))


@triton.jit
def finish_residual(
    total, x, out, bias, sumsq, stride_sumsq, normed, next_norm, live, tile_m, tile_n, N, BM: tl.constexpr,
    BN: tl.constexpr, SLICES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Store `x` plus the result and its bias, and this tile's partial sums of squares. `normed` gets the same times the
    weight of the norm that follows, `next_norm [N]`."""
    rows = tile_m * BM + tl.arange(0, BM)
    W: tl.constexpr = BN // SLICES
    squares = tl.zeros([BM], tl.float32)
    for s in tl.static_range(SLICES):
        col = tile_n * BN + s * W
        y = x.load([tile_m * BM, col]).to(tl.float32) + columns(total, s, SLICES)
        if bias is not None:
            y += _bias_of(bias, col, N, W)
        y = y.to(OUT)
        out.store([tile_m * BM, col], y)
        squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
        if normed is not None:
            at = col + tl.arange(0, W)
            z = y.to(tl.float32) * tl.load(next_norm + at, mask=at < N, other=0.0)[None, :]
            mask = (rows < live)[:, None] & (at < N)[None, :]
            tl.store(normed + rows.to(tl.int64)[:, None] * N + at[None, :], z.to(OUT), mask=mask)
    tl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)


@triton.jit
def finish_gated(
    total, scale, bias, out, tile_m, tile_n, N, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Apply the gated activation and store; columns alternate between gate and up."""
    W: tl.constexpr = BN // SLICES
    for s in tl.static_range(SLICES):
        y = columns(total, s, SLICES)
        if scale is not None:
            y = y * scale[:, None]
        if bias is not None:
            y += _bias_of(bias, tile_n * BN + s * W, N, W)
        gate, up = tl.split(tl.reshape(y, (BM, W // 2, 2)))
        h = gate_with(gate, up, ACT)
        out.store([tile_m * BM, (tile_n * BN + s * W) // 2], h.to(OUT))


@triton.jit
def _head_scale(
    total, scale, bias, col, N, eps, INDEX: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Return 1 / rms of head INDEX of the COUNT heads in a tile: `[BM]`."""
    y = columns(total, INDEX, COUNT) * scale[:, None]
    tl.static_assert(y.shape[1] == D, "a head norm needs the whole head in one tile")
    if HAS_BIAS:
        at = col + tl.arange(0, D)
        y += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    return tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)


@triton.jit
def finish_heads(
    total, scale, rows, live, tile_n, N, eps, bias, rotary, positions, slots, kv, layer, layers, q_out, q_norm, k_norm,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Apply bias, head norm and rotary embedding; q goes to `q_out`, K and V to their pages."""
    HEAD: tl.constexpr = min(D, BN)
    # an epilogue slice lies within one head and is narrow: few live registers
    W: tl.constexpr = min(32 if BN >= 128 else 64, HEAD)
    HAS_BIAS: tl.constexpr = bias is not None
    position = tl.load(positions + rows, mask=rows < live, other=0).to(tl.int64)
    slot = tl.load(slots + rows, mask=rows < live, other=0).to(tl.int64)
    page_row = (slot // PAGE * layers + layer) * (2 * PAGE) + slot % PAGE
    d = tl.arange(0, W)
    # no branches in here: the loops could not be fused otherwise. Masked accesses cost no traffic.
    for s in tl.static_range(BN // W):
        col = tile_n * BN + s * W
        head = col // D
        at = col % D + d
        is_v = (head >= HQ + HKV).to(tl.int32)
        y = columns(total, s, BN // W) * scale[:, None]
        if HAS_BIAS:
            y += tl.load(bias + col + d, mask=col + d < N, other=0.0).to(tl.float32)[None, :]
        if q_norm is not None:
            if s % (HEAD // W) == 0:
                inverse = _head_scale(total, scale, bias, col, N, eps, s // (HEAD // W), BN // HEAD, D, HAS_BIAS)
            weight = tl.load(q_norm + at, mask=at < tl.where(head < HQ, D, 0), other=0.0).to(tl.float32)
            weight += tl.load(k_norm + at, mask=at < tl.where(head < HQ, 0, D), other=0.0).to(tl.float32)
            y = tl.where(is_v == 0, y * inverse[:, None] * weight[None, :], y)
        cos_sin = load_cos_sin(rotary, position, rows, live, col, HQ + HKV, D, W)
        y = rotate(y, cos_sin, is_v != 0).to(OUT)
        target = q_out + rows.to(tl.int64)[:, None] * (HQ * D) + (col + d)[None, :]
        tl.store(target, y, mask=(rows < tl.where(head < HQ, live, 0))[:, None])
        row = page_row + is_v * PAGE
        kv_head = head - HQ - is_v * HKV
        target = kv + row[:, None] * (HKV * D) + (kv_head * D + at)[None, :]
        tl.store(target, y, mask=(rows < tl.where((head >= HQ) & (head < HQ + 2 * HKV), live, 0))[:, None])
