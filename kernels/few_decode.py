"""Paged attention of one query token for each of a few requests, whose K and V arrive while the kernel before ends
(twin: `reference.paged_attention`; of pages in e4m3 over `fp8_reference.kv_values`).

A few requests' K and V are little to read: what counts is one latency behind another. But all of it is old, except the
query's own token: so a program has its first block in registers, if need be as float16, before it waits for the kernel
that computes q, and reads that token's K and V with q, when that kernel has ended. A part of a long request is a block
at least, read by eight warps; whoever comes last adds all parts with one look at them.

It reads work lists and page tables before it waits, as the kernels for many requests do, and pages too: what wrote
them must have ended before the kernel in front began. So it is where that one waits for the one before it.

Plain Triton for pages of either format. Sums differ in their order from those of the kernels for many requests.
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.attention_output import Out, output_places, write_heads
from weft.kernels.decode_workspace import DecodeWorkspace, group_block, head_block
from weft.kernels.dependent_launch import begin, pdl_options, release
from weft.kernels.fp8 import E4M3, KvScales
from weft.kernels.scores import bend, log2_scale, with_sink

MOST_TOKENS = 16
"""of an iteration: more requests keep the memory busy anyway"""
_BLOCK_NUMBERS = 128 * 128
"""of K or V that a program holds"""
_JOINED = 16 * 128 * 8
"""sums of parts that are on their way at once"""
_PER_SM = 2
"""programs: one has the registers of an SM, but the next one is there when it ends"""


@triton.jit
def _values(kv, at, mask, EIGHT: tl.constexpr):
    """Numbers of pages; e4m3 (as bytes) becomes float16."""
    found = tl.load(kv + at, mask=mask, other=0)
    if EIGHT:
        found = found.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return found


@triton.jit
def _block(kv, pages, token, old, column, real, layer, layers, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
           EIGHT: tl.constexpr, IS_V: tl.constexpr):  # fmt: skip
    """K or V of tokens `[BN]`, where `old`; zeros elsewhere."""
    page = tl.load(pages + token // PAGE, mask=old, other=0).to(tl.int64)
    row = (page * layers + layer) * (2 * PAGE) + IS_V * PAGE + token % PAGE
    mask = old[:, None]
    if column.shape[0] != D:
        mask = mask & real[None, :]
    return _values(kv, row[:, None] * (HKV * D) + column[None, :], mask, EIGHT)


@triton.jit
def _join(base, parts, m, norm, acc, d, column, mine, HKV: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
          JOINED: tl.constexpr):  # fmt: skip
    """All parts of a request, JOINED at a time: `acc [GP, DP]`, `m, norm [GP]`."""
    SIZE: tl.constexpr = (DP + 2) * GP
    for first in range(0, parts, JOINED):
        part = first + tl.arange(0, JOINED)
        there = (part < parts)[:, None] & mine[None, :]
        at = base + part.to(tl.int64) * (HKV * SIZE)
        row = at[:, None] + DP * GP + column[None, :]
        m_parts = tl.load(row, mask=there, other=float("-inf"), cache_modifier=".cg")
        norms = tl.load(row + GP, mask=there, other=0.0, cache_modifier=".cg")
        block = at[:, None, None] + column[None, :, None] * DP + d[None, None, :]
        sums = tl.load(block, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(m_parts, axis=0))
        weight = tl.exp2(m_parts - m_new[None, :])
        alpha = tl.exp2(m - m_new)
        norm = norm * alpha + tl.sum(norms * weight, axis=0)
        acc = acc * alpha[:, None] + tl.sum(sums * weight[:, :, None], axis=0)
        m = m_new
    return m, norm, acc


@triton.jit(do_not_specialize=["layer"])
def _few_kernel(
    q, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, partial, arrived, layer,
    layers, scale, sinks,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, JOINED: tl.constexpr, EIGHT: tl.constexpr, DTYPE: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WORK: tl.constexpr = tl.float16 if EIGHT else DTYPE
    column = tl.arange(0, GP)
    d = tl.arange(0, DP)
    mine = column < G
    real = d < D
    tasks = tl.load(num_items) * HKV
    if tasks == 0:  # who has no task ends at once; if all did, the next kernel would pass the one in front
        begin(PDL)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = task % HKV
        item = items + (task // HKV) * 8
        row = tl.load(item).to(tl.int64)
        pages = table + tl.load(item + 1).to(tl.int64) * stride_table
        start = tl.load(item + 2)
        end = tl.load(item + 3)
        parts = tl.load(item + 5)
        part = tl.load(item + 6)
        seen = start
        if WINDOWED:
            seen = tl.maximum(start, tl.load(item + 7))
        newest = end - 1  # the query's own token, where the last part ends with it
        old_end = tl.where(part == parts - 1, newest, end)
        own_row = (tl.load(pages + newest // PAGE).to(tl.int64) * layers + layer) * (2 * PAGE) + newest % PAGE
        own_at = own_row * (HKV * D) + head * D + d
        token = start + tl.arange(0, BN)
        old = (token >= seen) & (token < old_end)
        k = _block(kv, pages, token, old, head * D + d, real, layer, layers, HKV, D, PAGE, EIGHT, 0)
        v = _block(kv, pages, token, old, head * D + d, real, layer, layers, HKV, D, PAGE, EIGHT, 1)
        factor = scale
        v_scale = 1.0
        if EIGHT:
            factor = scale * tl.load(kv_scale + layer * (2 * HKV) + head)
            v_scale = tl.load(kv_scale + layer * (2 * HKV) + HKV + head)

        begin(PDL)
        heads = (row * HKV + head) * G + column
        whole = mine[None, :] & real[:, None]
        query = tl.load(q + heads[None, :] * D + d[:, None], mask=whole, other=0.0).to(WORK)
        k_own = _values(kv, own_at, real, EIGHT)
        v_own = _values(kv, own_at + PAGE * (HKV * D), real, EIGHT)
        release(PDL)
        # the query's own token is where the sums begin
        is_own = part == parts - 1
        s_own = bend(tl.sum(query.to(tl.float32) * k_own.to(tl.float32)[:, None], axis=0) * factor, SOFTCAP)
        m = tl.where(is_own, s_own, -1e30)
        norm = tl.full([GP], tl.where(is_own, 1.0, 0.0), tl.float32)
        acc = tl.zeros([DP, GP], tl.float32) + tl.where(is_own, v_own.to(tl.float32), 0.0)[:, None]
        for first in range(start, old_end, BN):
            s = bend(tl.dot(k, query) * factor, SOFTCAP)
            s = tl.where(old[:, None], s, float("-inf"))
            token += BN
            old = token < old_end
            if first + BN < old_end:
                k = _block(kv, pages, token, old, head * D + d, real, layer, layers, HKV, D, PAGE, EIGHT, 0)
            m_new = tl.maximum(m, tl.max(s, axis=0))
            p = tl.exp2(s - m_new[None, :])
            alpha = tl.exp2(m - m_new)
            norm = norm * alpha + tl.sum(p, axis=0)
            acc = tl.dot(tl.trans(v), p.to(WORK), acc * alpha[None, :])
            if first + BN < old_end:
                v = _block(kv, pages, token, old, head * D + d, real, layer, layers, HKV, D, PAGE, EIGHT, 1)
            m = m_new

        last = True
        acc = tl.trans(acc)
        if parts > 1:
            SIZE: tl.constexpr = (DP + 2) * GP
            base = partial + (tl.load(item + 4).to(tl.int64) * HKV + head) * SIZE
            at = base + part.to(tl.int64) * (HKV * SIZE)
            tl.store(at + column[:, None] * DP + d[None, :], acc, mask=mine[:, None])
            tl.store(at + DP * GP + column, m, mask=mine)
            tl.store(at + (DP + 1) * GP + column, norm, mask=mine)
            tl.debug_barrier()  # every thread's store precedes the release below
            last = tl.atomic_add(arrived + row * HKV + head, 1, sem="acq_rel") == parts - 1
            if last:
                m = tl.full([GP], -1e30, tl.float32)
                norm = tl.zeros([GP], tl.float32)
                acc = tl.zeros([GP, DP], tl.float32)
                m, norm, acc = _join(base, parts, m, norm, acc, d, column, mine, HKV, DP, GP, JOINED)
                tl.store(arrived + row * HKV + head, 0)
        if last:
            norm = with_sink(norm, m, sinks, head * G + column, mine)
            y = (acc / norm[:, None] * v_scale).to(DTYPE)
            target = out + heads[:, None] * D + d[None, :]
            place = mine[:, None] & real[None, :]
            write_heads(y, target, place, out_scale, stride_scale, head * G + column, row, mine, 1)


def few_decode(
    q: Tensor, kv: Tensor, scales: KvScales | None, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, space: DecodeWorkspace, scale: float | None = None, windowed: bool = False,
    softcap: float = 0.0, sinks: Tensor | None = None, per_sm: int = _PER_SM, registers: int | None = None,
) -> Out:  # fmt: skip
    """As `decode_attention.decode_attention`, or `fp8_attention.decode_attention` where there are scales of pages in
    e4m3. Unlike them it takes for granted that K and V of all but the queries' own tokens are in their pages when the
    kernel in front begins.

    per_sm (programs for an SM) and registers (of a thread, at most) are for who measures.

    Raises `ValueError` for tensors that are not contiguous, `TypeError` for pages of another format.
    """
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    if not (kv.is_contiguous() and q.is_contiguous() and items.is_contiguous()):
        raise ValueError("q, kv and items must be contiguous")
    if page_table.stride(1) != 1:
        raise ValueError("rows of the page table must be contiguous")
    if (kv.dtype == E4M3) != (scales is not None):
        raise TypeError(f"pages of {kv.dtype} {'have' if scales is not None else 'need'} scales")
    group = q.shape[1] // num_kv_heads
    columns, width = group_block(group), head_block(head_dim)
    _few_kernel[(num_sms * per_sm,)](
        q, kv if scales is None else kv.view(torch.uint8), None if scales is None else scales.scale,
        *output_places(out, len(q), head_dim), page_table, page_table.stride(0), items, num_items, space.partial,
        space.arrived, layer, layers, log2_scale(scale, head_dim), sinks,
        HKV=num_kv_heads, G=group, GP=columns, D=head_dim, DP=width, PAGE=page_size,
        BN=min(128, max(16, _BLOCK_NUMBERS // width)), JOINED=max(1, _JOINED // (width * columns)),
        EIGHT=scales is not None,
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[q.dtype],
        WINDOWED=windowed, SOFTCAP=softcap, num_warps=8, maxnreg=registers, **pdl_options(),
    )  # fmt: skip
    return out
