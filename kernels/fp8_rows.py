"""A pass over activations that quantises them (twin: `fp8.quantize_rows`), where no epilogue of a product makes them:
behind the embedding and attention.
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.dependent_launch import begin, pdl_options, release
from weft.kernels.fp8 import BLOCK, Fp8Rows
from weft.kernels.fp8_triton import power_of_two, saturated

BLOCKS = 16
"""of a row that a program works on"""


@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x, weight, count, M, K, values, scale, stride, BLOCKS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0)
    live = M
    if count is not None:
        live = tl.minimum(tl.load(count), M)
    if row < live:
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        base = row.to(tl.int64) * K
        z = tl.load(x + base + at, mask=at < K, other=0.0).to(tl.float32)
        if weight is not None:
            z *= tl.load(weight + at, mask=at < K, other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(z), axis=1)
        if PAIRS:
            both = tl.max(tl.reshape(amax, (BLOCKS // 2, 2)), axis=1)
            amax = tl.reshape(tl.broadcast_to(both[:, None], (BLOCKS // 2, 2)), (BLOCKS,))
        s, inverse = power_of_two(amax)
        tl.store(scale + block * stride + row, s, mask=block * 128 < K)
        tl.store(values + base + at, saturated(z * inverse[:, None]), mask=at < K)


def quantize_rows(
    x: Tensor, weight: Tensor | None = None, *, out: Fp8Rows, num_tokens: Tensor | None = None
) -> Fp8Rows:
    """`x [T, K]` of 16 bits, times a norm's `weight [K]`, into `out`, with scales for `out.span` columns; rows from
    `num_tokens` on are left."""
    if not (x.is_contiguous() and out.values.is_contiguous()):
        raise ValueError("rows must be contiguous")
    tokens, width = x.shape
    blocks = -(-width // BLOCK)
    _quantize_kernel[(tokens, -(-blocks // BLOCKS))](
        x, weight, num_tokens, tokens, width, out.values, out.scale, out.scale.stride(0), BLOCKS=BLOCKS,
        PAIRS=out.span > BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out
