"""A product of plain Triton whose operands come by TMA, for `share.py`."""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.dependent_launch import begin, release


@triton.jit
def tma_product(a, w, out, depth, tiles_n, PDL: tl.constexpr):
    """out `[M, N]` = a `[M, K]` times w `[N, K]` transposed, a tile of 128 x 128 a program."""
    begin(PDL)
    row, col = tl.program_id(0) // tiles_n * 128, tl.program_id(0) % tiles_n * 128
    acc = tl.zeros((128, 128), tl.float32)
    for k in range(0, depth, 64):
        acc = tl.dot(a.load([row, k]), w.load([col, k]).T, acc)
    release(PDL)
    out.store([row, col], acc.to(tl.bfloat16))
