"""Reference implementation of `fp8_projections` in plain torch, which also serves on the CPU.

Roundings are those of the kernels: sums as in `fp8.scaled_matmul`, epilogues in float32, the residual rounded to its
dtype before it is squared and quantized, the result of an MLP's gate quantized from float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.formats.fp8 import E4M3, Fp8Rows, Fp8Weight, KvScales, quantize_kv, quantize_rows, scaled_matmul
from weft.kernels.reference import layer as reference
from weft.kernels.reference.layer import ACTIVATIONS, gated, rms_scale, row_sumsq


def _normed_product(x: Fp8Rows, sumsq: Tensor | None, weight: Fp8Weight, bias: Tensor | None, eps: float) -> Tensor:
    """`[T, N]` float32. sumsq `[T]`: of the rows of what was quantised, before a norm's weight."""
    y = scaled_matmul(x, weight)
    if sumsq is not None:
        y *= rms_scale(sumsq, x.values.shape[1], eps)[:, None]
    return y if bias is None else y + bias.float()


def norm_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    *,
    centred: bool,
) -> Fp8Rows:
    """The operand of a GEMM after a norm. The rows' 1 / rms is included if the norm has a bias: see `fp8_rows`. sumsq
    `[T]`."""
    h = x.float()
    if centred:
        h = h - h.mean(-1, keepdim=True)
    if bias is None:
        return quantize_rows(h, weight)
    assert sumsq is not None
    h = h * rms_scale(sumsq, x.shape[1], eps)[:, None]
    if weight is not None:
        h = h * weight.float()
    return quantize_rows(h + bias.float())


def qkv_project(
    x: Fp8Rows,
    sumsq: Tensor,
    weight: Fp8Weight,
    bias: Tensor | None,
    eps: float,
    rotary: Tensor,
    positions: Tensor | slice,
    slot_mapping: Tensor,
    kv: Tensor,
    layer: int,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    kv_scales: KvScales | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Like `reference.qkv_project` -> q `[T, Hq, D]` of `dtype`; kv may be e4m3, with its scales."""
    num_kv_heads, head_dim = kv.shape[-2], kv.shape[-1]
    qkv = _normed_product(x, sumsq, weight, bias, eps).view(len(x.values), -1, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = reference.head_norm(q, q_norm, eps), reference.head_norm(k, k_norm, eps)
    q, k = reference.rotate(torch.cat((q, k), 1), rotary[positions]).split((num_heads, num_kv_heads), dim=1)
    page, offset = slot_mapping // kv.shape[3], slot_mapping % kv.shape[3]
    for i, part in enumerate((k.to(dtype), v.to(dtype))):
        if kv_scales is None:
            kv[page, layer, i, offset] = part.to(kv.dtype)
        else:  # torch cannot index e4m3 on the CPU
            stored = quantize_kv(part, kv_scales.inverse[layer, i])
            kv.view(torch.uint8)[page, layer, i, offset] = stored.view(torch.uint8)
    return q.to(dtype)


def residual_project(
    a: Fp8Rows, weight: Fp8Weight, x: Tensor, *, bias: Tensor | None = None, next_norm: Tensor | None = None
) -> tuple[Tensor, Tensor, Fp8Rows]:
    """`x + a @ weight.T`, rounded once, its sum of squares `[T]`, and it as the next GEMM's operand."""
    y = (x.float() + _normed_product(a, None, weight, bias, 0.0)).to(x.dtype)
    return y, row_sumsq(y), quantize_rows(y, next_norm)


def gate_up_project(
    x: Fp8Rows,
    sumsq: Tensor | None,
    weight: Fp8Weight,
    eps: float,
    *,
    activation: str = "silu",
    bias: Tensor | None = None,
) -> Fp8Rows:
    """Norm, gate-up matrix `[2 I, H]` (rows alternate), bias, SwiGLU or a variant of it -> the next GEMM's operand."""
    y = _normed_product(x, sumsq, weight, bias, eps)
    return quantize_rows(gated(activation, y[:, 0::2], y[:, 1::2]))


def linear_project(
    x: Fp8Rows,
    sumsq: Tensor | None,
    weight: Fp8Weight,
    eps: float = 0.0,
    *,
    activation: str = "",
    bias: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """Norm, matrix, bias, activation -> `[T, N]` of `dtype`."""
    y = _normed_product(x, sumsq, weight, bias, eps)
    return (ACTIVATIONS[activation](y) if activation else y).to(dtype)


def kv_values(kv: Tensor, scales: KvScales) -> Tensor:
    """The values of pages `[pages, layers, 2, page_size, Hkv, D]` in e4m3: float32 of the same shape."""
    assert kv.dtype == E4M3
    return kv.float() * scales.scale[:, :, None, :, None]
