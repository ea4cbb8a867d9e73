"""What attention writes: rows of 16 bits; or, of heads of 128, the operand of the product behind it, so that no pass
over the rows quantises them (twin: attention, rounded to 16 bits, then `fp8.quantize_rows`).
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import TypeVar

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.formats.fp8_triton import power_of_two, saturated

Output = Tensor | Fp8Rows
"""`[T, Hq * D]` of the queries' dtype, or e4m3 with a scale for each head of a token"""
Out = TypeVar("Out", bound=Output)


def output_places(out: Output, num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor | None, int | None]:
    """What kernels are told of `out`: its rows; of an operand its scales and the stride of their blocks, else None.

    Raises `ValueError` for memory or heads that they do not write.
    """
    if isinstance(out, Tensor):
        rows, scale = out, None
    else:
        rows, scale = out.values, out.scale
        if head_dim != BLOCK or out.span != BLOCK:
            raise ValueError(f"attention leaves operands of heads of {BLOCK}, with a scale for each")
        if scale.shape[0] != rows.shape[1] // BLOCK or scale.shape[1] < num_tokens or scale.stride(1) != 1:
            raise ValueError("scales must be [Hq, T], rows of them contiguous")
    if not rows.is_contiguous():
        raise ValueError("out must be contiguous")
    return rows, scale, None if scale is None else scale.stride(0)


def part_of(out: Output, tokens: slice) -> Output:
    """Rows of some tokens; a view."""
    return out[tokens] if isinstance(out, Tensor) else out.part(tokens)


@triton.jit
def write_heads(y, at, mask, scales, stride, head, token, real, AXIS: tl.constexpr):
    """Heads of 16 bits, whose numbers run along AXIS of `y`, to `at` where `mask`; with scales in e4m3, and those
    of `head` of `token` where `real`.
    """
    if scales is None:
        tl.store(at, y, mask=mask)
    else:
        z = y.to(tl.float32)
        scale, inverse = power_of_two(tl.max(tl.abs(z), axis=AXIS))
        tl.store(scales + head * stride + token, scale, mask=real)
        tl.store(at, saturated(z * tl.expand_dims(inverse, AXIS)), mask=mask)
