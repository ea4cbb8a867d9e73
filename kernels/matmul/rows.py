"""Row passes over the residual stream: sums of squares, a norm after a GEMM, and gathering the rows that are needed."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows


def row_options(hidden: int) -> dict[str, Any]:
    """Return launch options of a program that processes rows of `hidden` numbers."""
    return {
        "BLOCK": min(2048, triton.next_power_of_2(hidden)), "num_warps": 8 if hidden > 2048 else 4, **pdl_options()
    }  # fmt: skip


@triton.jit
def row_mean(row, H, BLOCK: tl.constexpr):
    """Return the mean of the H numbers at `row`, in an order that depends on H alone."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(row + at, mask=at < H, other=0.0).to(tl.float32)
    return tl.sum(total, axis=0) / H


@triton.jit
def _row_sumsq_kernel(x, sumsq, H, CENTRED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    if CENTRED:
        mean = row_mean(x + row * H, H, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * H + at, mask=at < H, other=0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(at < H, value - mean, 0.0)
        squares += value * value
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def row_sumsq(x: Tensor, *, out: Tensor, centred: bool = False) -> Tensor:
    """Write row sums of squares of `x [T, H]` to `out [1, T]` float32, in an order that depends on H alone.

    centred: of rows minus their mean."""
    hidden = x.shape[1]
    _row_sumsq_kernel[(x.shape[0],)](x, out, hidden, CENTRED=centred, **row_options(hidden))
    return out


@triton.jit
def _add_normed_kernel(x, y, weight, sumsq, H, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(y + row * H + at, mask=at < H, other=0.0).to(tl.float32)
        squares += value * value
    scale = tl.rsqrt(tl.sum(squares, axis=0) / H + eps)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        before = tl.load(x + row * H + at, mask=at < H, other=0.0)
        added = tl.load(y + row * H + at, mask=at < H, other=0.0).to(tl.float32) * scale
        added *= tl.load(weight + at, mask=at < H, other=0.0).to(tl.float32)
        after = (before.to(tl.float32) + added).to(before.dtype)
        tl.store(x + row * H + at, after, mask=at < H)
        squares += after.to(tl.float32) * after.to(tl.float32)
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def add_normed(x: Tensor, y: Tensor, weight: Tensor, eps: float, *, sumsq: Tensor) -> Tensor:
    """Add the RMS norm of the rows of `y [T, H]`, times `weight [H]`, to `x [T, H]`, rounded once; returns x.

    Sums of squares of the new x go to `sumsq[0]` (`[sums, T]` float32)."""
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError("x and y must be contiguous")
    hidden = x.shape[1]
    _add_normed_kernel[(x.shape[0],)](x, y, weight, sumsq, hidden, eps, **row_options(hidden))
    return x


@triton.jit
def _gather_kernel(
    x, a, at, count, x_out, a_out, H, A, scale, stride, scale_out, stride_out, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    target = tl.program_id(0).to(tl.int64)
    if target < tl.load(count):
        row = tl.load(at + target).to(tl.int64)
        for start in range(0, H, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * H + column, mask=column < H, other=0.0)
            tl.store(x_out + target * H + column, value, mask=column < H)
        for start in range(0, A, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(a + row * A + column, mask=column < A, other=0.0)
            tl.store(a_out + target * A + column, value, mask=column < A)
        if scale is not None:
            block = tl.arange(0, BLOCKS)
            value = tl.load(scale + block * stride + row, mask=block * 128 < A, other=0.0)
            tl.store(scale_out + block * stride_out + target, value, mask=block * 128 < A)


def gather_rows(
    x: Tensor, a: Tensor | Fp8Rows, rows: Tensor, count: Tensor, *, x_out: Tensor, a_out: Tensor | Fp8Rows
) -> None:
    """Copy the first `count [1]` of `rows [T]` int32 of `x [T, H]` and `a [T, A]`, in order, to the start of x_out,
    a_out.

    a_out has the type of a. Other rows do not change."""
    scales: tuple[Any, ...] = None, None, None, None
    if isinstance(a, Fp8Rows) and isinstance(a_out, Fp8Rows):
        scales = a.scale, a.scale.stride(0), a_out.scale, a_out.scale.stride(0)
        a, a_out = a.values.view(torch.uint8), a_out.values.view(torch.uint8)
    if isinstance(a, Fp8Rows) or isinstance(a_out, Fp8Rows):
        raise TypeError("a and a_out must both be tensors or both FP8 operands")
    hidden, width = x.shape[1], a.shape[1]
    _gather_kernel[(rows.shape[0],)](
        x, a, rows, count, x_out, a_out, hidden, width, *scales,
        BLOCKS=triton.next_power_of_2(-(-width // BLOCK)), **row_options(max(hidden, width)),
    )  # fmt: skip
