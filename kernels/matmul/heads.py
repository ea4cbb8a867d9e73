"""Head norm, rotation and page writes after an unfused QKV GEMM (reference: end of `reference/layer.py: qkv_project`).

A program processes one token; heads are padded to a power of two.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.block_sizes import head_block
from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.formats.fp8 import E4M3, KvScales
from weft.kernels.formats.fp8_triton import saturated
from weft.kernels.matmul.gemm_tiles import rotated

BLOCK = 2048  # Numbers that a program processes at once.


@triton.jit
def _inverse_rms(row, width, eps, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(row + at, mask=at < width, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares, axis=0) / width + eps)


@triton.jit(do_not_specialize=["M", "layer"])
def _place_kernel(
    raw, count, M, q_norm, k_norm, eps, rotary, positions, slots, kv, kv_inverse, layer, layers, q_out,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    OVER_ALL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    token = tl.program_id(0)
    live = M
    if count is not None:
        live = tl.minimum(tl.load(count), M)
    if token < live:
        row = raw + token.to(tl.int64) * ((HQ + 2 * HKV) * D)
        position = tl.load(positions + token).to(tl.int64)
        slot = tl.load(slots + token).to(tl.int64)
        page = (slot // PAGE * layers + layer) * (2 * PAGE) + slot % PAGE
        d = tl.arange(0, DP)
        cos_sin = tl.load(rotary + position * D + d, mask=d < D, other=0.0)
        cos, sin = tl.split(tl.reshape(cos_sin, (DP // 2, 2)))
        if OVER_ALL:
            q_inverse = _inverse_rms(row, HQ * D, eps, BLOCK)
            k_inverse = _inverse_rms(row + HQ * D, HKV * D, eps, BLOCK)
        for first in range(0, HQ + 2 * HKV, HEADS):
            head = first + tl.arange(0, HEADS)
            real = (head < HQ + 2 * HKV)[:, None] & (d < D)[None, :]
            at = head[:, None] * D + d[None, :]
            value = tl.load(row + at, mask=real, other=0.0)
            y = value.to(tl.float32)
            is_q = (head < HQ)[:, None]
            is_v = (head >= HQ + HKV)[:, None]
            if q_norm is not None:
                if OVER_ALL:
                    inverse = tl.where(head < HQ, q_inverse, k_inverse)
                    weight = tl.load(q_norm + at, mask=real & is_q, other=0.0).to(tl.float32)
                    k_at = at - HQ * D
                    weight += tl.load(k_norm + k_at, mask=real & (is_q == 0) & (is_v == 0), other=0.0).to(tl.float32)
                else:
                    inverse = tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)
                    q_weight = tl.load(q_norm + d, mask=d < D, other=0.0).to(tl.float32)
                    k_weight = tl.load(k_norm + d, mask=d < D, other=0.0).to(tl.float32)
                    weight = tl.where(is_q, q_weight[None, :], k_weight[None, :])
                y = tl.where(is_v, y, y * inverse[:, None] * weight)
            a, b = tl.split(tl.reshape(y, (HEADS, DP // 2, 2)))
            a, b = rotated(a, b, cos[None, :], sin[None, :])
            y = tl.where(is_v, y, tl.reshape(tl.join(a, b), (HEADS, DP))).to(value.dtype)
            tl.store(q_out + token.to(tl.int64) * (HQ * D) + at, y, mask=real & is_q)
            kv_head = (head - HQ)[:, None] - tl.where(is_v, HKV, 0)
            target = kv + (page + tl.where(is_v, PAGE, 0)) * (HKV * D) + kv_head * D + d[None, :]
            if kv_inverse is not None:
                plane = layer * (2 * HKV) + head - HQ
                inverse = tl.load(kv_inverse + plane, mask=(head >= HQ) & (head < HQ + 2 * HKV), other=1.0)
                tl.store(target, saturated(y.to(tl.float32) * inverse[:, None]), mask=real & (is_q == 0))
            else:
                tl.store(target, y, mask=real & (is_q == 0))


def place_heads(
    raw: Tensor, eps: float, rotary: Tensor, positions: Tensor, slot_mapping: Tensor, kv: Tensor, layer: int,
    num_heads: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, kv_scales: KvScales | None = None, *,
    out: Tensor, num_tokens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write raw q, k and v `[T, (Hq + 2 Hkv) D]` to `out [T, Hq, D]` and the pages; see `projections.qkv_project`.

    Rows from `num_tokens` on do not change. kv_scales: of e4m3 pages."""
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    if not raw.is_contiguous():
        raise ValueError("raw must be contiguous")
    if (kv_scales is None) == (kv.dtype == E4M3):
        raise ValueError("e4m3 pages need scales, and other pages must have none")
    width = head_block(head_dim)
    all_heads = triton.next_power_of_2(num_heads + 2 * num_kv_heads)
    _place_kernel[(raw.shape[0],)](
        raw, num_tokens, raw.shape[0], q_norm, k_norm, eps, rotary, positions, slot_mapping, kv,
        None if kv_scales is None else kv_scales.inverse, layer, layers, out,
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, DP=width, HEADS=min(all_heads, BLOCK // width), PAGE=page_size,
        OVER_ALL=q_norm is not None and q_norm.numel() != head_dim, BLOCK=BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out
