"""Paged causal attention of prefill chunks with a cached prefix (reference: `reference/layer.py: paged_attention`).

The host plans the work (`prefill_items`): tiles of at most `rows_per_tile // group` query tokens, longest context
first. On Hopper a warp-specialized kernel runs (`prefill_hopper`); the plain Triton kernel here serves everything else,
including the interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.attention.decode_attention import load_rows
from weft.kernels.attention.output import Out, check_inputs, output_args, write_heads
from weft.kernels.attention.scores import log2_scale, soft_cap, with_sink
from weft.kernels.attention.work_lists import TILE_FIELDS, TILE_ROWS
from weft.kernels.common.block_sizes import head_block
from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import is_hopper, on_gpu


@triton.jit
def prefill_step(
    query, k, v, token, position, limit, m, norm, acc, scale, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Process one block of keys and values `[BN, DP]` against `query [BM, DP]`, as `decode_attention.decode_step`."""
    s = soft_cap(tl.dot(query, k.T) * scale, SOFTCAP)
    s = tl.where(token[None, :] <= limit[:, None], s, float("-inf"))
    if WINDOW > 0:
        s = tl.where(token[None, :] > position[:, None] - WINDOW, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    norm = norm * alpha + tl.sum(p, axis=1)
    acc = tl.dot(p.to(DTYPE), v, acc * alpha[:, None])
    return m_new, norm, acc


@triton.jit(do_not_specialize=["layer"])
def plain_prefill_kernel(
    q, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, layer, layers, scale, sinks,
    until, HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    MMA: tl.constexpr = DTYPE if kv_scale is None else tl.float16
    rows = tl.arange(0, BM)
    d = tl.arange(0, DP)  # heads are padded with zeros
    tasks = tl.load(num_items) * HKV
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        head = task % HKV
        item = items + (task // HKV) * 4
        q_row = tl.load(item)
        queries = tl.load(item + 1)
        start = tl.load(item + 2)
        pages = table + tl.load(item + 3).to(tl.int64) * stride_table
        end = start + queries
        position = start + rows // G
        limit = position
        if until is not None:  # they ascend within a chunk
            limit = tl.load(until + q_row + tl.minimum(rows // G, queries - 1))
            end = tl.load(until + q_row + queries - 1) + 1
        mine = (rows // G < queries)[:, None]
        if DP != D:
            mine = mine & (d < D)[None, :]
        at = ((q_row + rows // G).to(tl.int64) * (HKV * G) + head * G + rows % G) * D
        query = tl.load(q + at[:, None] + d[None, :], mask=mine, other=0.0).to(MMA)
        factor, v_scale = scale, None
        if kv_scale is not None:
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
            k_at = kv + row[:, None] * (HKV * D) + (head * D + d)[None, :]
            whole = real[:, None]
            if DP != D:
                whole = whole & (d < D)[None, :]
            k = load_rows(k_at, whole)
            v = load_rows(k_at + PAGE * HKV * D, whole)
            m, norm, acc = prefill_step(query, k, v, token, position, limit, m, norm, acc, factor, WINDOW, SOFTCAP, MMA)
        norm = with_sink(norm, m, sinks, head * G + rows % G, rows // G < queries)
        y = acc / norm[:, None]
        if v_scale is not None:
            y = y * v_scale
        y = y.to(DTYPE)
        whose, token = head * G + rows % G, q_row + rows // G
        write_heads(
            y, out + at[:, None] + d[None, :], mine, out_scale, stride_scale, whose, token, rows // G < queries, 1
        )


class PrefillWorkspace(NamedTuple):
    """Scratch of tiles that are cut along their keys: one per stream that runs prefill attention."""

    partial: Tensor
    """[slots, Hkv, 2, 64 * (padded D + 2)] float32: sums, maxima and row sums of the two halves of a tile's rows."""
    arrived: Tensor  # [slots * Hkv * 2] int32, zero between launches.
    tickets: Tensor
    """[2] int32, zero between launches: tasks drawn, and programs that have drawn their last task."""


def prefill_workspace(slots: int, num_kv_heads: int, head_dim: int, device: torch.device | str) -> PrefillWorkspace:
    return PrefillWorkspace(
        torch.empty(slots, num_kv_heads, 2, 64 * (head_block(head_dim) + 2), dtype=torch.float32, device=device),
        torch.zeros(slots * num_kv_heads * 2, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )


def _hopper(q: Tensor, head_dim: int) -> bool:
    return on_gpu(q.device) and is_hopper() and q.element_size() == 2 and head_block(head_dim) in (64, 128, 256)


def prefill_attention(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *, out: Out, num_sms: int,
    scale: float | None = None, window: int | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
    until: Tensor | None = None, space: PrefillWorkspace | None = None, portable: bool = False,
) -> Out:  # fmt: skip
    """Attention of the chunks' rows of `q [T, Hq, D]` over their pages.

    Writes the same rows of `out [T, Hq * D]`, in q's dtype or as an e4m3 operand (head size 128: `output`). kv `[pages,
    layers, 2, page_size, Hkv, D]`, page_size 16, 32, 64 or 128; page_table `[rows, max_pages]` int32; items
    `[max_items, 4]` int32 from `prefill_items`; num_items `[1]` int32 in device memory. The chunk's K and V are already
    in their pages. window: positions that a query sees, including its own; None: all. softcap, sinks `[Hq]`: see
    `scores`. until `[T]`
    int32: the last position that each query sees, inside its chunk; None: its own. `portable` forces the plain Triton
    kernel. With a `space`, items are `[max_items, 8]` from
    `prefill_splits`: the last split of a tile adds all of them in order, so the result does not depend on timing. This
    requires Hopper, no window and no `until`."""
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_kv_heads
    check_inputs(q, kv, items, page_table)
    written = output_args(out, len(q), head_dim)
    if (space is None) != (items.shape[1] == TILE_FIELDS):
        raise ValueError("cut tiles need a space, and whole tiles must not have one")
    if space is not None and (window is not None or until is not None or portable or not _hopper(q, head_dim)):
        raise ValueError("tiles can be cut only on Hopper, without a window and without `until`")
    factor = log2_scale(scale, head_dim)
    width = head_block(head_dim)
    if portable or not _hopper(q, head_dim):
        plain_prefill_kernel[(num_sms,)](
            q, kv, None, *written, page_table, page_table.stride(0), items, num_items, layer, layers, factor, sinks,
            until, HKV=num_kv_heads, G=group, D=head_dim, DP=width, PAGE=page_size, BM=TILE_ROWS,
            BN=64 if width <= 128 else 32, STAGES=2,
            DTYPE={torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[q.dtype],
            WINDOW=window or 0, SOFTCAP=softcap, num_warps=8, **pdl_options(),
        )  # fmt: skip
        return out
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from weft.kernels.attention.prefill_hopper import prefill_kernel

    block = 128 if width <= 128 else 64
    box = min(page_size, block)
    slabs = kv.view(-1, page_size, num_kv_heads * head_dim)  # K or V of one page and layer
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    tiles = TensorDescriptor.from_tensor(slabs, [1, box, width], layout)
    prefill_kernel[(num_sms,)](
        q, tiles, *written, page_table, page_table.stride(0), items, num_items, layer, layers, factor, sinks,
        space.partial if space is not None else None, space.arrived if space is not None else None, until,
        HKV=num_kv_heads, G=group, D=head_dim, DP=width, PAGE=page_size, BN=block, BOX=box, STAGES=2, DTYPE=dtype,
        WINDOW=window or 0, SOFTCAP=softcap, FIELDS=items.shape[1], num_warps=4,
        **pdl_options(),
    )  # fmt: skip
    return out
