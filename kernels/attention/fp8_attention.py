"""Paged attention over K and V in e4m3, decode and prefill (reference: `reference/layer.py: paged_attention`).

Arithmetic is float16, which represents every e4m3 number exactly. K's scale is part of the score scale; V's scale is
applied with the division by the sum, per head. Queries are converted to float16 when they are read: their heads are
RMS-normed or small enough for float16 (up to 65,504).

Work lists, pages and scratch are those of `decode_attention` and `prefill_attention`. On Hopper, `fp8_decode_warps`
decodes on all SMs, and `fp8_decode` on some. For prefill there, `fp8_unpack` converts the pages that the chunks read to
16 bits once per layer, for the 16-bit kernel. The plain Triton kernels here serve all other cases.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.attention.decode_attention import decode_step, finish
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out, check_inputs, output_args, write_heads
from weft.kernels.attention.prefill_attention import prefill_step
from weft.kernels.attention.scores import log2_scale, with_sink
from weft.kernels.attention.work_lists import TILE_ROWS
from weft.kernels.common.block_sizes import group_block, head_block
from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import gpu
from weft.kernels.formats.fp8 import E4M3, KvScales

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _tokens(kv, at, head, d, mask, HKV: tl.constexpr, D: tl.constexpr):
    """Load rows `at [BN]` of a head as float16 `[BN, DP]`; zero where masked."""
    place = kv + at[:, None] * (HKV * D) + (head * D + d)[None, :]
    return tl.load(place, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit(do_not_specialize=["layer"])
def _decode_kernel(
    q, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, partial, arrived, layer,
    layers, scale, sinks,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    begin(PDL)
    column = tl.arange(0, GP)
    d = tl.arange(0, DP)
    tasks = tl.load(num_items) * HKV
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = task % HKV
        item = items + (task // HKV) * 8
        row = tl.load(item).to(tl.int64)
        pages = table + tl.load(item + 1).to(tl.int64) * stride_table
        start = tl.load(item + 2)
        end = tl.load(item + 3)
        parts = tl.load(item + 5)
        heads = (row * HKV + head) * G + column
        mine = (column < G)[None, :] & (d < D)[:, None]
        query = tl.load(q + heads[None, :] * D + d[:, None], mask=mine, other=0.0).to(tl.float16)
        factor = scale * tl.load(kv_scale + layer * (2 * HKV) + head)
        v_scale = tl.load(kv_scale + layer * (2 * HKV) + HKV + head)
        m = tl.full([GP], -1e30, tl.float32)
        norm = tl.zeros([GP], tl.float32)
        acc = tl.zeros([DP, GP], tl.float32)
        for first in tl.range(start, end, BN, num_stages=STAGES):
            token = first + tl.arange(0, BN)
            real = token < end
            if WINDOWED:
                real = real & (token >= tl.load(item + 7))
            page = tl.load(pages + token // PAGE, mask=real, other=0).to(tl.int64)
            at = (page * layers + layer) * (2 * PAGE) + token % PAGE
            whole = real[:, None] & (d < D)[None, :]
            k = _tokens(kv, at, head, d, whole, HKV, D)
            v = _tokens(kv, at + PAGE, head, d, whole, HKV, D)
            m, norm, acc = decode_step(query, k, v, real, m, norm, acc, factor, SOFTCAP, tl.float16)
        target = out + heads[None, :] * D + d[:, None]
        finish(
            m, norm, acc, v_scale, parts, item, row, head, target, mine, column, d, out_scale, stride_scale, partial,
            arrived, sinks, HKV, G, GP, DP, DTYPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer"])
def _prefill_kernel(
    q, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, layer, layers, scale, sinks,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    rows = tl.arange(0, BM)
    d = tl.arange(0, DP)
    tasks = tl.load(num_items) * HKV
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = task % HKV
        item = items + (task // HKV) * 4
        q_row = tl.load(item)
        queries = tl.load(item + 1)
        start = tl.load(item + 2)
        pages = table + tl.load(item + 3).to(tl.int64) * stride_table
        end = start + queries
        limit = start + rows // G
        mine = (rows // G < queries)[:, None] & (d < D)[None, :]
        at = ((q_row + rows // G).to(tl.int64) * (HKV * G) + head * G + rows % G) * D
        query = tl.load(q + at[:, None] + d[None, :], mask=mine, other=0.0).to(tl.float16)
        factor = scale * tl.load(kv_scale + layer * (2 * HKV) + head)
        v_scale = tl.load(kv_scale + layer * (2 * HKV) + HKV + head)
        m = tl.full([BM], -1e30, tl.float32)
        norm = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(start + 1 - WINDOW, 0)
        for first in tl.range(lowest // BN * BN, end, BN, num_stages=STAGES):
            token = first + tl.arange(0, BN)
            real = token < end
            if WINDOW > 0:
                real = real & (token >= lowest)
            page = tl.load(pages + token // PAGE, mask=real, other=0).to(tl.int64)
            row = (page * layers + layer) * (2 * PAGE) + token % PAGE
            whole = real[:, None] & (d < D)[None, :]
            k = _tokens(kv, row, head, d, whole, HKV, D)
            v = _tokens(kv, row + PAGE, head, d, whole, HKV, D)
            m, norm, acc = prefill_step(query, k, v, token, limit, m, norm, acc, factor, WINDOW, SOFTCAP, tl.float16)
        norm = with_sink(norm, m, sinks, head * G + rows % G, rows // G < queries)
        y = (acc / norm[:, None] * v_scale).to(DTYPE)
        whose, token = head * G + rows % G, q_row + rows // G
        write_heads(
            y, out + at[:, None] + d[None, :], mine, out_scale, stride_scale, whose, token, rows // G < queries, 1
        )


def _check(q: Tensor, kv: Tensor, items: Tensor, page_table: Tensor, scales: KvScales) -> None:
    if kv.dtype != E4M3:
        raise TypeError(f"pages must be e4m3, not {kv.dtype}")
    check_inputs(q, kv, items, page_table)
    if scales.scale.shape != (kv.shape[1], 2, kv.shape[4]) or not scales.scale.is_contiguous():
        raise ValueError("scales must be [layers, 2, Hkv], contiguous")


def decode_attention(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, space: DecodeWorkspace, scale: float | None = None, windowed: bool = False,
    softcap: float = 0.0, sinks: Tensor | None = None, portable: bool = False,
) -> Out:  # fmt: skip
    """Like `decode_attention.decode_attention`, for kv `[pages, layers, 2, page_size, Hkv, D]` in e4m3."""
    _check(q, kv, items, page_table, scales)
    if not portable:
        from weft.kernels.attention import fp8_decode, fp8_decode_warps

        if fp8_decode.supports(q, kv):
            here = gpu(q.device if q.is_cuda else None)
            whole_gpu = here is not None and num_sms >= here.sms  # `fp8_decode_warps` cannot be confined to some SMs
            launch = fp8_decode_warps.launch_decode if whole_gpu else fp8_decode.launch_decode
            return launch(
                q, kv, scales, layer, page_table, items, num_items, out=out, num_sms=num_sms, space=space, scale=scale,
                windowed=windowed, softcap=softcap, sinks=sinks,
            )  # fmt: skip
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_kv_heads
    _decode_kernel[(4 * num_sms,)](
        q, kv.view(torch.uint8), scales.scale, *output_args(out, len(q), head_dim), page_table, page_table.stride(0),
        items, num_items, space.partial, space.arrived, layer, layers, log2_scale(scale, head_dim), sinks,
        HKV=num_kv_heads, G=group, GP=group_block(group), D=head_dim, DP=head_block(head_dim), PAGE=page_size, BN=64,
        STAGES=2, DTYPE=_DTYPES[q.dtype], WINDOWED=windowed, SOFTCAP=softcap, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out


def prefill_attention(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, scale: float | None = None, window: int | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Out:  # fmt: skip
    """Like `prefill_attention.prefill_attention`, for kv `[pages, layers, 2, page_size, Hkv, D]` in e4m3."""
    _check(q, kv, items, page_table, scales)
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    width = head_block(head_dim)
    _prefill_kernel[(num_sms,)](
        q, kv.view(torch.uint8), scales.scale, *output_args(out, len(q), head_dim), page_table, page_table.stride(0),
        items, num_items, layer, layers, log2_scale(scale, head_dim), sinks,
        HKV=num_kv_heads, G=q.shape[1] // num_kv_heads, D=head_dim, DP=width, PAGE=page_size, BM=TILE_ROWS,
        BN=64 if width <= 128 else 32, STAGES=2, DTYPE=_DTYPES[q.dtype], WINDOW=window or 0, SOFTCAP=softcap,
        num_warps=8, **pdl_options(),
    )  # fmt: skip
    return out
