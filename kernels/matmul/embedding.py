"""Embedding lookup with row sums of squares and an optional FP8 operand, and the final norm before the logits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, release
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.matmul.fp8_rows import leave_blocks
from weft.kernels.matmul.rows import row_mean, row_options


@triton.jit
def _embedded(table, position_table, at, place_at, mask, scale):
    """Load part of a table row, rounded after each step: times the scale, plus the position embedding."""
    value = tl.load(table + at, mask=mask, other=0.0)
    if scale is not None:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    if position_table is not None:
        more = tl.load(position_table + place_at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _embed_kernel(
    ids, table, x, sumsq, V, H, scale, position_table, positions, P, next_norm, q_out, q_scale, stride_q,
    CENTRED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), V - 1)  # padding may hold any id; it must not fault
    place = token * 0
    if position_table is not None:
        place = tl.minimum(tl.maximum(tl.load(positions + row).to(tl.int64), 0), P - 1)
    mean = 0.0
    if CENTRED:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, H, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += _embedded(table, position_table, token * H + at, place * H + at, at < H, scale).to(tl.float32)
        mean = tl.sum(total, axis=0) / H
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = _embedded(table, position_table, token * H + at, place * H + at, at < H, scale)
        tl.store(x + row * H + at, value, mask=at < H)
        if CENTRED:
            off = tl.where(at < H, value.to(tl.float32) - mean, 0.0)
            squares += off * off
        else:
            squares += value.to(tl.float32) * value.to(tl.float32)
        if q_out is not None:
            block = start // 128 + tl.arange(0, BLOCK // 128)
            at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
            z = tl.reshape(value, (BLOCK // 128, 128)).to(tl.float32)
            if next_norm is not None:
                z *= tl.load(next_norm + at, mask=at < H, other=0.0).to(tl.float32)
            leave_blocks(z, q_out + row * H, at, q_scale + row, stride_q, block, H, PAIRS)
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def embed(
    token_ids: Tensor, table: Tensor, *, scale: float = 1.0, position_table: Tensor | None = None,
    positions: Tensor | None = None, centred: bool = False, out: Tensor, sumsq: Tensor,
    quantized: Fp8Rows | None = None, next_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Look up rows of `table [V, H]` for `token_ids [T]` into `out [T, H]`; returns out and `sumsq[:1]`, float32 `[1,
    T]`.

    scale is rounded to the table's dtype; position_table `[P, H]` and positions `[T]` are given together (see
    `reference.layer.embed`). `quantized` gets the rows times `next_norm [H]` as the next GEMM's FP8 operand
    (`fp8.quantize_rows`)."""
    tokens, hidden = token_ids.shape[0], table.shape[1]
    options = row_options(hidden)
    if quantized is not None:
        options["BLOCK"] = max(2 * BLOCK, options["BLOCK"])  # scales cover whole blocks
    rounded = None if scale == 1.0 else float(torch.tensor(scale, dtype=table.dtype))
    _embed_kernel[(tokens,)](
        token_ids, table, out, sumsq, table.shape[0], hidden, rounded, position_table,
        *((None, 0) if position_table is None else (positions, position_table.shape[0])), next_norm,
        *((None, None, None) if quantized is None else (quantized.values, quantized.scale, quantized.scale.stride(0))),
        CENTRED=centred, PAIRS=quantized is not None and quantized.span > BLOCK, **options,
    )  # fmt: skip
    return out, sumsq[:1]


@triton.jit(do_not_specialize=["T", "stride_sumsq"])
def _final_norm_kernel(
    x, sumsq, stride_sumsq, rows, weight, bias, out, T, H, eps, PARTS: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    target = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + target).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), T - 1)
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    total = tl.sum(tl.load(sumsq + part * stride_sumsq + row, mask=part < PARTS, other=0.0), axis=0)
    scale = tl.rsqrt(total / H + eps)
    mean = 0.0
    if CENTRED:
        mean = row_mean(x + row * H, H, BLOCK)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * H + at, mask=at < H, other=0.0)
        if CENTRED:
            h = (value.to(tl.float32) - mean) * scale
        else:
            h = (value.to(tl.float32) * scale).to(value.dtype).to(tl.float32)
        h *= tl.load(weight + at, mask=at < H, other=0.0).to(tl.float32)
        if bias is not None:
            h += tl.load(bias + at, mask=at < H, other=0.0).to(tl.float32)
        tl.store(out + target * H + at, h.to(value.dtype), mask=at < H)


def final_norm(
    x: Tensor, sumsq: Tensor, rows: Tensor, norm_weight: Tensor, eps: float, *, norm_bias: Tensor | None = None,
    centred: bool = False, out: Tensor,
) -> Tensor:  # fmt: skip
    """Write normed rows `x[rows]` to `out [S, H]` for the vocabulary GEMM (`gemm.matmul`). sumsq `[sums, T]`.

    norm_weight `[H]`; norm_bias `[H]` of a LayerNorm, which subtracts the rows' mean (`centred`)."""
    sumsq = sumsq if sumsq.dim() == 2 else sumsq[None]
    hidden = x.shape[1]
    _final_norm_kernel[(rows.shape[0],)](
        x, sumsq, sumsq.stride(0), rows, norm_weight, norm_bias, out, x.shape[0], hidden, eps,
        PARTS=sumsq.shape[0], CENTRED=centred, **row_options(hidden),
    )  # fmt: skip
    return out
