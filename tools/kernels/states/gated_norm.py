"""RMS norm of groups of columns with a gate (reference: `states.gated_norm`)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.tools.kernels.states.state_pages import silu

TILE = 4096  # Scalars per task.
PROGRAMS = 4  # Programs per SM.


@triton.jit(do_not_specialize=["T"])
def _norm_kernel(
    x, stride_x, z, stride_z, weight, out, stride_out, limits, T, eps, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    SHARED: tl.constexpr, NORM_FIRST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    first = 0
    last = T
    if limits is not None:
        first = tl.load(limits)
        last = tl.minimum(tl.load(limits + 1), T)
    column = tl.arange(0, BC)
    for task in range(tl.program_id(0), tl.cdiv((last - first) * GROUPS, BR), tl.num_programs(0)):
        at = task * BR + tl.arange(0, BR)
        row = (first + at // GROUPS).to(tl.int64)
        columns = (at % GROUPS * WIDTH)[:, None] + column[None, :]
        mask = (row < last)[:, None] & (column < WIDTH)[None, :]
        y = tl.load(x + row[:, None] * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
        gate = silu(tl.load(z + row[:, None] * stride_z + columns, mask=mask, other=0.0).to(tl.float32))
        if not NORM_FIRST:
            y *= gate
        y *= tl.rsqrt(tl.sum(y * y, axis=1) / WIDTH + eps)[:, None]
        if SHARED:
            y *= tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
        else:
            y *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
        if NORM_FIRST:
            y *= gate
        tl.store(out + row[:, None] * stride_out + columns, y.to(out.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, *, groups: int, norm_first: bool, out: Tensor, num_sms: int,
    limits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See the reference: `out [T, W]`, which may be x. limits `[2]` int32 in device memory: the first row and the one
    after the last; others are kept."""
    tokens, width = x.shape[0], x.shape[1] // groups
    columns = triton.next_power_of_2(width)
    rows = max(1, TILE // columns)
    _norm_kernel[(max(1, min(triton.cdiv(tokens * groups, rows), PROGRAMS * num_sms)),)](
        x, x.stride(0), z, z.stride(0), weight, out, out.stride(0), limits, tokens, eps, GROUPS=groups, WIDTH=width,
        SHARED=weight.shape[0] == width and groups > 1, NORM_FIRST=norm_first, BR=rows, BC=columns, num_warps=8,
        **pdl_options(),
    )  # fmt: skip
    return out
