"""The output of attention: 16-bit rows or, for head size 128, the next GEMM's FP8 operand without a separate pass.

The reference is attention rounded to 16 bits, then `fp8.quantize_rows`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import TypeVar

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.formats.fp8_triton import power_of_two, saturated

Output = Tensor | Fp8Rows  # `[T, Hq * D]` in the queries' dtype, or e4m3 with a scale for each head of a token.
Out = TypeVar("Out", bound=Output)


def output_args(out: Output, num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor | None, int | None]:
    """Return the kernel arguments for `out`: its rows and, for an operand, its scales and block stride, else None.

    Raises `ValueError` for unsupported memory layouts or head sizes."""
    if isinstance(out, Tensor):
        rows, scale = out, None
    else:
        rows, scale = out.values, out.scale
        if head_dim != BLOCK or out.span != BLOCK:
            raise ValueError(f"attention writes FP8 operands only for heads of {BLOCK}, with a scale for each")
        if scale.shape[0] != rows.shape[1] // BLOCK or scale.shape[1] < num_tokens or scale.stride(1) != 1:
            raise ValueError("scales must be [Hq, T], rows of them contiguous")
    if not rows.is_contiguous():
        raise ValueError("out must be contiguous")
    return rows, scale, None if scale is None else scale.stride(0)


def check_inputs(q: Tensor, kv: Tensor, items: Tensor, page_table: Tensor) -> None:
    """Raise `ValueError` for inputs that no attention kernel reads."""
    if not (kv.is_contiguous() and q.is_contiguous() and items.is_contiguous()):
        raise ValueError("q, kv and items must be contiguous")
    if page_table.stride(1) != 1:
        raise ValueError("rows of the page table must be contiguous")


def slice_output(out: Output, tokens: slice) -> Output:
    """Return a view of some tokens' rows."""
    return out[tokens] if isinstance(out, Tensor) else out.of_tokens(tokens)


@triton.jit
def write_heads(y, at, mask, scales, stride, head, token, real, AXIS: tl.constexpr):
    """Write 16-bit heads, which run along AXIS of `y`, to `at` where `mask`; with scales, write e4m3 and the scale of
    `head` of `token` where `real`."""
    if scales is None:
        tl.store(at, y, mask=mask)
    else:
        z = y.to(tl.float32)
        scale, inverse = power_of_two(tl.max(tl.abs(z), axis=AXIS))
        tl.store(scales + head * stride + token, scale, mask=real)
        tl.store(at, saturated(z * tl.expand_dims(inverse, AXIS)), mask=mask)
