"""Rows of the embedding table with their sums of squares, and the final norm of the rows that need logits."""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.dependent_launch import begin, pdl_options, release


@triton.jit
def _embed_kernel(ids, table, x, sumsq, V, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # padding may hold any id; it must not fault
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(table + token * H + at, mask=at < H, other=0.0)
        tl.store(x + row * H + at, value, mask=at < H)
        squares += value.to(tl.float32) * value.to(tl.float32)
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def embed(token_ids: Tensor, table: Tensor, *, out: Tensor, sumsq: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `table [V, H]` for `token_ids [T]` into `out [T, H]`; returns out and `sumsq[:1]`, `[1, T]` float32."""
    tokens, hidden = token_ids.shape[0], table.shape[1]
    _embed_kernel[(tokens,)](token_ids, table, out, sumsq, table.shape[0], hidden, BLOCK=min(
        2048, triton.next_power_of_2(hidden)), num_warps=8 if hidden > 2048 else 4, **pdl_options())  # fmt: skip
    return out, sumsq[:1]


@triton.jit
def _row_sumsq_kernel(x, sumsq, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * H + at, mask=at < H, other=0.0).to(tl.float32)
        squares += value * value
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def row_sumsq(x: Tensor, *, out: Tensor) -> Tensor:
    """Sums of squares of the rows of `x [T, H]` into `out [1, T]` float32, in an order that depends on H alone."""
    hidden = x.shape[1]
    _row_sumsq_kernel[(x.shape[0],)](
        x, out, hidden, BLOCK=min(2048, triton.next_power_of_2(hidden)), num_warps=8 if hidden > 2048 else 4,
        **pdl_options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["T", "stride_sumsq"])
def _final_norm_kernel(x, sumsq, stride_sumsq, rows, weight, out, T, H, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    begin(PDL)
    release(PDL)
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + target).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), T - 1)
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    total = tl.sum(tl.load(sumsq + part * stride_sumsq + row, mask=part < PARTS, other=0.0), axis=0)
    scale = tl.rsqrt(total / H + eps)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * H + at, mask=at < H, other=0.0)
        h = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
        h *= tl.load(weight + at, mask=at < H, other=0.0).to(tl.float32)
        tl.store(out + target * H + at, h.to(value.dtype), mask=at < H)


def final_norm(x: Tensor, sumsq: Tensor, rows: Tensor, norm_weight: Tensor, eps: float, *, out: Tensor) -> Tensor:
    """Normed rows `x[rows]` -> `out [S, H]`, ready for the vocabulary matrix (`gemm.matmul`). sumsq `[parts, T]`."""
    sumsq = sumsq if sumsq.dim() == 2 else sumsq[None]
    hidden = x.shape[1]
    _final_norm_kernel[(rows.shape[0],)](
        x, sumsq, sumsq.stride(0), rows, norm_weight, out, x.shape[0], hidden, eps,
        PARTS=sumsq.shape[0], BLOCK=min(2048, triton.next_power_of_2(hidden)), num_warps=8 if hidden > 2048 else 4,
        **pdl_options(),
    )  # fmt: skip
    return out
