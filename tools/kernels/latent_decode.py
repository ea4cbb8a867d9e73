"""Latent attention of one query token per request, absorbed (reference: `reference/latent.py: latent_attention`).

A token's row of C + R numbers is the key of all heads, and its first C are the values. So a program takes a block of
heads, loads each row once and uses it twice: as the left operand of the scores, and transposed for the sum. With 64
heads that is 120 operations a byte, near the ratio of the hardware; more heads read the rows again, from the L2 cache.
Work items, splits and their sum are those of `decode_attention`, with blocks of heads in place of KV heads. No GPU
executor launches it yet, so it is not in the wheel.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.attention.decode_attention import finish
from weft.kernels.attention.decode_workspace import DecodeWorkspace, decode_workspace
from weft.kernels.attention.output import check_inputs
from weft.kernels.attention.scores import log2_scale
from weft.kernels.common.block_sizes import head_block
from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import gpu, is_hopper


class Tile(NamedTuple):
    """The tile of a program: as much as the shared memory of an SM holds."""

    heads: int
    keys: int
    stages: int
    warps: int


HOPPER, LARGE, SMALL = Tile(64, 64, 2, 8), Tile(32, 32, 2, 8), Tile(16, 32, 1, 4)


def tile() -> Tile:
    """Return the tile for the GPU: others than Hopper have 99 KiB or at least 163 KiB of shared memory an SM."""
    here = gpu()
    if here is None or here.capability[0] == 9:
        return HOPPER
    return SMALL if here.capability in ((8, 6), (8, 9), (12, 0), (12, 1)) else LARGE


def head_blocks(heads: int) -> int:
    """Return how many blocks of equal size the heads are split into."""
    return next(count for count in range(-(-heads // tile().heads), heads + 1) if heads % count == 0)


def latent_workspace(slots: int, rows: int, heads: int, rank: int, device: torch.device | str) -> DecodeWorkspace:
    """Return scratch for `slots` splits of `rows` requests."""
    blocks = head_blocks(heads)
    return decode_workspace(slots, rows, blocks, max(16, heads // blocks), rank, device)


@triton.jit(do_not_specialize=["layer"])
def _latent_kernel(
    q, latents, rotations, kv, out, table, stride_table, items, num_items, partial, arrived, layer, layers, scale,
    HB: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    release(PDL)
    begin(PDL)
    W: tl.constexpr = C + R
    dtype = kv.dtype.element_ty
    column = tl.arange(0, GP)
    c = tl.arange(0, CP)
    r = tl.arange(0, RP)
    for task in range(tl.program_id(0), tl.load(num_items) * HB, tl.num_programs(0)):
        block = task % HB
        item = items + (task // HB) * 8
        row = tl.load(item).to(tl.int64)
        pages = table + tl.load(item + 1).to(tl.int64) * stride_table
        end = tl.load(item + 3)
        heads = (row * HB + block) * G + column
        mine = (column < G)[None, :] & (c < C)[:, None]
        own = q + heads[None, :] * W
        q_latent = tl.load(own + c[:, None], mask=mine, other=0.0)
        q_rotated = tl.load(own + (C + r)[:, None], mask=(column < G)[None, :] & (r < R)[:, None], other=0.0)
        m = tl.full([GP], -1e30, tl.float32)
        norm = tl.zeros([GP], tl.float32)
        acc = tl.zeros([CP, GP], tl.float32)
        for first in tl.range(tl.load(item + 2), end, BN, num_stages=STAGES):
            if TMA:
                # The last block starts early enough to end with the last token (see `decode_attention`).
                slab = tl.load(pages + first // PAGE) * layers + layer
                shift = tl.maximum(first + BN - end, 0)
                real = tl.arange(0, BN) >= shift
                latent = latents.load([slab, first % PAGE - shift, 0]).reshape([BN, CP])
                rotated = rotations.load([slab, first % PAGE - shift, C]).reshape([BN, RP])
            else:
                token = first + tl.arange(0, BN)
                real = token < end
                page = tl.load(pages + token // PAGE, mask=real, other=0).to(tl.int64)
                at = kv + ((page * layers + layer) * PAGE + token % PAGE)[:, None] * W
                latent = tl.load(at + c[None, :], mask=real[:, None] & (c < C)[None, :], other=0.0)
                rotated = tl.load(at + (C + r)[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0)
            s = tl.dot(latent, q_latent, input_precision=EXACT)
            s = tl.dot(rotated, q_rotated, s, input_precision=EXACT) * scale
            s = tl.where(real[:, None], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, axis=0))
            p = tl.exp2(s - m_new[None, :])
            alpha = tl.exp2(m - m_new)
            norm = norm * alpha + tl.sum(p, axis=0)
            acc = tl.dot(tl.trans(latent), p.to(dtype), acc * alpha[None, :], input_precision=EXACT)
            m = m_new
        finish(
            m, norm, acc, None, tl.load(item + 5), item, row, block, out + heads[None, :] * C + c[:, None], mine,
            column, c, None, None, partial, arrived, None, HB, G, GP, CP, dtype,
        )  # fmt: skip


def latent_decode(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *, out: Tensor,
    num_sms: int, space: DecodeWorkspace, scale: float, rank: int,
) -> Tensor:  # fmt: skip
    """Attention of the rows of `q [T, H, C + R]` in the work items over their pages; `rank` is C.

    Writes the same rows of `out [T, H * C]` in q's dtype, which is the pool's. kv `[pages, layers, 1, page_size, 1, C +
    R]`; page_table `[rows, max_pages]` int32; items `[max_items, 8]` int32 from `decode_items` with `head_blocks(H)` KV
    heads; num_items `[1]` int32 in device memory; space from `latent_workspace`. The query token's row is already in
    its page. Raises `ValueError` for layouts that the kernel does not read."""
    layers, planes, page_size, width = kv.shape[1], kv.shape[2], kv.shape[3], kv.shape[5]
    check_inputs(q, kv, items, page_table)
    if planes != 1 or kv.shape[4] != 1 or q.shape[2] != width or not 0 < rank < width or q.dtype != kv.dtype:
        raise ValueError(f"pages {tuple(kv.shape)} hold no latents for queries {tuple(q.shape)}")
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    shape, blocks = tile(), head_blocks(q.shape[1])
    group = q.shape[1] // blocks
    widths = {"C": rank, "CP": head_block(rank), "R": width - rank, "RP": head_block(width - rank)}
    tma = is_hopper() and page_size % shape.keys == 0 and rank == widths["CP"] and width * kv.element_size() % 16 == 0
    slabs = kv.view(-1, page_size, width)  # rows of one page and layer
    tiles = [TensorDescriptor.from_tensor(slabs, [1, shape.keys, widths[of]]) if tma else None for of in ("CP", "RP")]
    _latent_kernel[(num_sms,)](
        q, *tiles, kv, out, page_table, page_table.stride(0), items, num_items, space.partial, space.arrived, layer,
        layers, log2_scale(scale, width), HB=blocks, G=group, GP=max(16, triton.next_power_of_2(group)), PAGE=page_size,
        BN=shape.keys, TMA=tma, STAGES=shape.stages, EXACT="tf32x3" if q.dtype == torch.float32 else "tf32",
        num_warps=shape.warps, **widths, **pdl_options(),
    )  # fmt: skip
    return out
