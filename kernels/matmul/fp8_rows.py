"""Row passes that quantize activations where the previous kernel does not (reference: `fp8.quantize_rows`).

Used after attention with heads of other sizes than 128, for unfused GEMMs, and after a norm that needs the whole row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.formats.fp8_triton import power_of_two, saturated
from weft.kernels.matmul.gemm_tiles import live_tokens
from weft.kernels.matmul.rows import row_mean

BLOCKS = 16  # Blocks of a row per program.


@triton.jit
def leave_blocks(z, values, at, scale, stride, block, K, PAIRS: tl.constexpr):
    """Write blocks `z [blocks, 128]` of a row as e4m3 with scales; PAIRS: two blocks share one."""
    amax = tl.max(tl.abs(z), axis=1)
    if PAIRS:
        BLOCKS: tl.constexpr = z.shape[0]
        both = tl.max(tl.reshape(amax, (BLOCKS // 2, 2)), axis=1)
        amax = tl.reshape(tl.broadcast_to(both[:, None], (BLOCKS // 2, 2)), (BLOCKS,))
    s, inverse = power_of_two(amax)
    tl.store(scale + block * stride, s, mask=block * 128 < K)
    tl.store(values + at, saturated(z * inverse[:, None]), mask=at < K)


@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x, weight, count, M, K, values, scale, stride, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0)
    if row < live_tokens(count, M):
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        base = row.to(tl.int64) * K
        z = tl.load(x + base + at, mask=at < K, other=0.0).to(tl.float32)
        if weight is not None:
            z *= tl.load(weight + at, mask=at < K, other=0.0).to(tl.float32)
        leave_blocks(z, values + base, at, scale + row, stride, block, K, PAIRS)


def quantize_rows(
    x: Tensor, weight: Tensor | None = None, *, out: Fp8Rows, num_tokens: Tensor | None = None
) -> Fp8Rows:
    """Quantize `x [T, K]` of 16 bits, times a norm's `weight [K]`, into `out`, with scales for `out.span` columns.

    Rows from `num_tokens` on do not change."""
    if not (x.is_contiguous() and out.values.is_contiguous()):
        raise ValueError("rows must be contiguous")
    tokens, width = x.shape
    blocks = -(-width // BLOCK)
    _quantize_kernel[(tokens, -(-blocks // BLOCKS))](
        x, weight, num_tokens, tokens, width, out.values, out.scale, out.scale.stride(0), BLOCKS=BLOCKS,
        PAIRS=out.span > BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M", "stride_sumsq", "stride"])
def _norm_kernel(
    x, weight, bias, sumsq, stride_sumsq, eps, count, M, K, values, scale, stride,
    CENTRED: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    row = tl.program_id(0)
    if row < live_tokens(count, M):
        base = row.to(tl.int64) * K
        mean = 0.0
        if CENTRED:
            mean = row_mean(x + base, K, BLOCKS * 128)
        if bias is not None:
            squares = 0.0
            for part in range(PARTS):
                squares += tl.load(sumsq + part * stride_sumsq + row)
            inverse_rms = tl.rsqrt(squares / K + eps)
        for first in range(0, tl.cdiv(K, 128), BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
            z = tl.load(x + base + at, mask=at < K, other=0.0).to(tl.float32)
            if CENTRED:
                z = tl.where(at < K, z - mean, 0.0)
            if bias is not None:
                z *= inverse_rms
            if weight is not None:
                z *= tl.load(weight + at, mask=at < K, other=0.0).to(tl.float32)
            if bias is not None:
                z += tl.load(bias + at, mask=at < K, other=0.0).to(tl.float32)
            leave_blocks(z, values + base, at, scale + row, stride, block, K, False)


def norm_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, sumsq: Tensor | None = None, eps: float = 0.0, *,
    centred: bool, out: Fp8Rows, num_tokens: Tensor | None = None,
) -> Fp8Rows:  # fmt: skip
    """Quantize `x [T, K]` of 16 bits after a norm with `weight [K]` and `bias [K]` into `out`.

    Rows from `num_tokens` on do not change. Without a bias the row factor 1 / rms is left to the following GEMM
    (`fp8_projections`); with a bias it is applied here, from the sums of squares `sumsq [sums, T]` float32. centred:
    the mean is subtracted, before the squares too."""
    if not (x.is_contiguous() and out.values.is_contiguous()):
        raise ValueError("rows must be contiguous")
    if bias is not None and sumsq is None:
        raise ValueError("a norm with a bias needs the sums of squares of the rows")
    tokens, width = x.shape
    _norm_kernel[(tokens,)](
        x, weight, bias, sumsq, 0 if sumsq is None else sumsq.stride(0), eps, num_tokens, tokens, width, out.values,
        out.scale, out.scale.stride(0), CENTRED=centred, PARTS=0 if sumsq is None else sumsq.shape[0], BLOCKS=BLOCKS,
        num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out
