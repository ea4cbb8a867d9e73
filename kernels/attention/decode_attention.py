"""Paged attention of one query token per request (reference: `reference/layer.py: paged_attention`).

The kernel is bound by memory: every K and V row is read once. K is the left operand of the MMA and the query heads of
its group are the columns, so a group of up to 8 fills one instruction. Pages arrive by TMA straight from the pool, seen
as slabs `(page * layers + layer) * 2 + k_or_v` of `[page_size, Hkv * D]`. Nothing after a request's last token is
loaded.

The host plans the work (`decode_items`): one item per request or per split of a long one, longest first. Splits write
partial sums to a workspace; the last one adds them in order, so the result does not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out, check_inputs, output_args, write_heads
from weft.kernels.attention.scores import log2_scale, soft_cap, with_sink
from weft.kernels.common.block_sizes import group_block, head_block
from weft.kernels.common.dependent_launch import begin, pdl_options, release


@triton.jit
def decode_step(q, k, v, real, m, norm, acc, scale, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr):
    """Process one block of keys and values `[BN, D]`, where `real`, against `q [D, GP]`; `acc [D, GP]` and `m, norm
    [GP]` are in the log2 domain."""
    s = soft_cap(tl.dot(k, q) * scale, SOFTCAP)
    s = tl.where(real[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=0))
    p = tl.exp2(s - m_new[None, :])
    alpha = tl.exp2(m - m_new)
    norm = norm * alpha + tl.sum(p, axis=0)
    acc = tl.dot(tl.trans(v), p.to(DTYPE), acc * alpha[None, :])
    return m_new, norm, acc


@triton.jit
def _divided(acc, norm, v_scale):
    y = acc / norm[None, :]
    if v_scale is not None:
        y = y * v_scale
    return y


@triton.jit
def finish(
    m, norm, acc, v_scale, parts, item, row, head, target, mine, column, d, out_scale, stride_scale, partial, arrived,
    sinks, HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Write a task's result to `target`; of a split task, store the sums, and the last split adds all and writes."""
    if parts == 1:
        norm = with_sink(norm, m, sinks, head * G + column, column < G)
        y = _divided(acc, norm, v_scale).to(DTYPE)
        write_heads(y, target, mine, out_scale, stride_scale, head * G + column, row, column < G, 0)
    else:
        slot = tl.load(item + 4)
        SIZE: tl.constexpr = (DP + 2) * GP
        base = partial + (slot.to(tl.int64) * HKV + head) * SIZE
        block = d[:, None] * GP + column[None, :]
        mine_at = base + tl.load(item + 6).to(tl.int64) * (HKV * SIZE)
        tl.store(mine_at + block, acc)
        tl.store(mine_at + DP * GP + column, m)
        tl.store(mine_at + (DP + 1) * GP + column, norm)
        tl.debug_barrier()  # all threads store before the release below
        before = tl.atomic_add(arrived + row * HKV + head, 1, sem="acq_rel")
        if before == parts - 1:
            m = tl.full([GP], -1e30, tl.float32)
            norm = tl.zeros([GP], tl.float32)
            acc = tl.zeros([DP, GP], tl.float32)
            for other in range(parts):
                at = base + other * (HKV * SIZE)
                m_other = tl.load(at + DP * GP + column, cache_modifier=".cg")
                m_new = tl.maximum(m, m_other)
                alpha = tl.exp2(m - m_new)
                beta = tl.exp2(m_other - m_new)
                norm = norm * alpha + tl.load(at + (DP + 1) * GP + column, cache_modifier=".cg") * beta
                acc = acc * alpha[None, :] + tl.load(at + block, cache_modifier=".cg") * beta[None, :]
                m = m_new
            norm = with_sink(norm, m, sinks, head * G + column, column < G)
            y = _divided(acc, norm, v_scale).to(DTYPE)
            write_heads(y, target, mine, out_scale, stride_scale, head * G + column, row, column < G, 0)
            tl.store(arrived + row * HKV + head, 0)


@triton.jit
def load_rows(at, mask):
    """Load rows of K or V; zero where masked. e4m3, stored as bytes, becomes float16."""
    x = tl.load(at, mask=mask, other=0)
    if x.dtype == tl.uint8:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return x


@triton.jit(do_not_specialize=["layer"])
def plain_decode_kernel(
    q, kv_tiles, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, partial, arrived,
    layer, layers, scale, sinks,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)  # memory is idle while few requests attend: the next GEMM may already fetch weights
    begin(PDL)
    MMA: tl.constexpr = DTYPE if kv_scale is None else tl.float16
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
        # heads are padded to DP: q is zero there, and results are not stored
        mine = (column < G)[None, :]
        if DP != D:
            mine = mine & (d < D)[:, None]
        query = tl.load(q + heads[None, :] * D + d[:, None], mask=mine, other=0.0).to(MMA)
        factor, v_scale = scale, None
        if kv_scale is not None:
            factor = scale * tl.load(kv_scale + layer * (2 * HKV) + head)
            v_scale = tl.load(kv_scale + layer * (2 * HKV) + HKV + head)
        m = tl.full([GP], -1e30, tl.float32)
        norm = tl.zeros([GP], tl.float32)
        acc = tl.zeros([DP, GP], tl.float32)
        for first in tl.range(start, end, BN, num_stages=STAGES):
            if TMA:
                # The last block starts early enough to end with the last token: TMA fills rows before the page with
                # zeros, and nothing after the last token is ever loaded.
                page = tl.load(pages + first // PAGE)
                slab = (page * layers + layer) * 2
                shift = tl.maximum(first + BN - end, 0)
                real = tl.arange(0, BN) >= shift
                if WINDOWED:
                    real = real & (first + tl.arange(0, BN) - shift >= tl.load(item + 7))
                k = kv_tiles.load([slab, first % PAGE - shift, head * D]).reshape([BN, DP])
                v = kv_tiles.load([slab + 1, first % PAGE - shift, head * D]).reshape([BN, DP])
            else:
                token = first + tl.arange(0, BN)
                real = token < end
                if WINDOWED:
                    real = real & (token >= tl.load(item + 7))
                page = tl.load(pages + token // PAGE, mask=real, other=0).to(tl.int64)
                at = (page * layers + layer) * (2 * PAGE) + token % PAGE
                k_at = kv + at[:, None] * (HKV * D) + (head * D + d)[None, :]
                whole = real[:, None]
                if DP != D:
                    whole = whole & (d < D)[None, :]
                k = load_rows(k_at, whole)
                v = load_rows(k_at + PAGE * HKV * D, whole)
            m, norm, acc = decode_step(query, k, v, real, m, norm, acc, factor, SOFTCAP, MMA)
        target = out + heads[None, :] * D + d[:, None]
        finish(
            m, norm, acc, v_scale, parts, item, row, head, target, mine, column, d, out_scale, stride_scale, partial,
            arrived, sinks, HKV, G, GP, DP, DTYPE,
        )  # fmt: skip


def decode_attention(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *, out: Out, num_sms: int,
    space: DecodeWorkspace, scale: float | None = None, windowed: bool = False, softcap: float = 0.0,
    sinks: Tensor | None = None, per_sm: int = 4, block: int = 64, stages: int = 2, warps: int = 4,
    portable: bool = False,
) -> Out:  # fmt: skip
    """Attention of the rows of `q [T, Hq, D]` in the work items over their pages.

    Writes the same rows of `out [T, Hq * D]`, in q's dtype or as an e4m3 operand (head size 128: `output`). kv `[pages,
    layers, 2, page_size, Hkv, D]`; page_table `[rows, max_pages]` int32; items `[max_items, 8]` int32 from
    `decode_items`; num_items `[1]` int32 in device memory. The query token's K and V are already in its page. windowed:
    the items have a window. softcap, sinks `[Hq]`: see `scores`. On Hopper a warp-specialized kernel runs, one program
    per SM (`decode_hopper`); `portable` forces the Triton kernel here, the only user of `per_sm`, `block`, `stages` and
    `warps`.
    """
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_kv_heads
    check_inputs(q, kv, items, page_table)
    if not portable:
        from weft.kernels.attention.decode_hopper import launch_decode, supports

        if supports(q, kv):
            return launch_decode(
                q, kv, layer, page_table, items, num_items, out=out, num_sms=num_sms, space=space, scale=scale,
                windowed=windowed, softcap=softcap, sinks=sinks,
            )  # fmt: skip
    width = head_block(head_dim)
    tma = page_size % block == 0
    slabs = kv.view(-1, page_size, num_kv_heads * head_dim)  # K or V of one page and layer
    plain_decode_kernel[(num_sms * per_sm,)](
        q, TensorDescriptor.from_tensor(slabs, [1, block, width]) if tma else None, kv, None,
        *output_args(out, len(q), head_dim), page_table, page_table.stride(0), items, num_items, space.partial,
        space.arrived, layer, layers, log2_scale(scale, head_dim), sinks,
        HKV=num_kv_heads, G=group, GP=group_block(group), D=head_dim, DP=width, PAGE=page_size, BN=block, TMA=tma,
        STAGES=stages,
        DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[q.dtype],
        WINDOWED=windowed, SOFTCAP=softcap, num_warps=warps, **pdl_options(),
    )  # fmt: skip
    return out
