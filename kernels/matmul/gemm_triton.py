"""GEMMs of a layer in plain Triton with fused epilogues: one persistent loop, an epilogue per `KIND`.

Every operand arrives through a host-side TMA descriptor, so a launch allocates nothing and can be captured. The grid is
`num_sms` programs that walk the tiles; the token count may be in device memory, and tiles past it are skipped.

The loop has two forms:

- many tokens: tokens are the rows of the MMA, one program per SM, deep TMA pipeline;
- few tokens (`swap`): 64 or more rows of the weight are the left operand and the tokens its columns, so 8 tokens fill
  an MMA, and `split` programs share one tile's K so that every SM streams weights. Partial sums go to a workspace, and
  the last program adds them in a fixed order: the result does not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.common.dependent_launch import begin, begin_with_previous, release
from weft.kernels.matmul.adapter_depth import More
from weft.kernels.matmul.adapter_work import STEP_COLUMNS
from weft.kernels.matmul.gemm_activations import activate, gate_with, soft_cap
from weft.kernels.matmul.gemm_launch import Launch, Workspace, check_workspace
from weft.kernels.matmul.gemm_tiles import (
    accumulate,
    accumulate_more,
    columns,
    join_splits,
    live_tokens,
    prefetch_first,
    rotated,
    row_scale,
    uneven_tile_of,
)

BLOCK_TOKENS = 128
MORE_ROWS = tl.constexpr(BLOCK_TOKENS)
"""Rows of the tiles for which `More.steps` is read."""
EARLY = tl.constexpr(2048)
"""Partial squares of a tile's rows up to which they are fetched before the loop over K, to hide the latency. More would
take the loop's registers: a 128 x 128 tile with 40 sums took thirty times as long."""


@triton.jit
def _store(total, out, tile_m, tile_n, BM: tl.constexpr, BN: tl.constexpr, SLICES: tl.constexpr, OUT: tl.constexpr):
    """Store the result without an epilogue."""
    for s in tl.static_range(SLICES):
        piece = columns(total, s, SLICES)
        out.store([tile_m * BM, tile_n * BN + s * (BN // SLICES)], piece.to(OUT))


@triton.jit
def _bias_of(bias, col, N, W: tl.constexpr):
    """Return `[1, W]` float32 of columns `col ..`."""
    at = col + tl.arange(0, W)
    return tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _linear(
    total, scale, bias, factor, out, tile_m, tile_n, N, ACT: tl.constexpr, SOFTCAP: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SLICES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Apply row scale, bias, activation, factor and soft cap, and store."""
    for s in tl.static_range(SLICES):
        col = tile_n * BN + s * (BN // SLICES)
        y = columns(total, s, SLICES)
        if scale is not None:
            y = y * scale[:, None]
        if bias is not None:
            y += _bias_of(bias, col, N, BN // SLICES)
        y = activate(y, ACT)
        if factor is not None:
            y = soft_cap(y * factor, SOFTCAP)
        out.store([tile_m * BM, col], y.to(OUT))


@triton.jit
def _add_residual(
    total, x, out, bias, sumsq, stride_sumsq, live, tile_m, tile_n, N, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Store `x` plus the result and its bias, and this tile's partial sums of squares."""
    W: tl.constexpr = BN // SLICES
    squares = tl.zeros([BM], tl.float32)
    for s in tl.static_range(SLICES):
        col = tile_n * BN + s * W
        y = x.load([tile_m * BM, col]).to(tl.float32) + columns(total, s, SLICES)
        if bias is not None:
            y += _bias_of(bias, col, N, W)
        y = y.to(OUT)
        out.store([tile_m * BM, col], y)
        squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    rows = tile_m * BM + tl.arange(0, BM)
    tl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)


@triton.jit
def _gated(
    total, scale, bias, out, tile_m, tile_n, N, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Apply the gated activation and store; columns alternate between gate and up."""
    W: tl.constexpr = BN // SLICES
    for s in tl.static_range(SLICES):
        y = columns(total, s, SLICES)
        if scale is not None:
            y = y * scale[:, None]
        if bias is not None:
            y += _bias_of(bias, tile_n * BN + s * W, N, W)
        gate, up = tl.split(tl.reshape(y, (BM, W // 2, 2)))
        h = gate_with(gate, up, ACT)
        out.store([tile_m * BM, (tile_n * BN + s * W) // 2], h.to(OUT))


@triton.jit
def _head_scale(
    total, scale, bias, col, N, eps, INDEX: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Return 1 / rms of head INDEX of the COUNT heads in a tile: `[BM]`."""
    y = columns(total, INDEX, COUNT) * scale[:, None]
    tl.static_assert(y.shape[1] == D, "a head norm needs the whole head in one tile")
    if HAS_BIAS:
        at = col + tl.arange(0, D)
        y += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    return tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)


@triton.jit
def load_cos_sin(rotary, position, rows, live, col, LAST: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """Load (cos, sin) pairs of columns `col .. col + W` for each row: `[BM, W]`; nothing for heads from LAST on."""
    at = col % D + tl.arange(0, W)
    mask = (rows < tl.where(col // D < LAST, live, 0))[:, None]
    return tl.load(rotary + position[:, None] * D + at[None, :], mask=mask, other=0.0)


@triton.jit
def rotate(y, cos_sin, skip):
    """Rotate neighbor pairs of `y [BM, W]` float32 by (cos, sin) pairs, except where `skip`."""
    BM: tl.constexpr = y.shape[0]
    W: tl.constexpr = y.shape[1]
    a, b = tl.split(tl.reshape(y, (BM, W // 2, 2)))
    cos, sin = tl.split(tl.reshape(cos_sin, (BM, W // 2, 2)))
    cos = tl.where(skip, 1.0, cos)
    a, b = rotated(a, b, cos, sin)
    return tl.reshape(tl.join(a, b), (BM, W))


@triton.jit
def _heads(
    total, scale, rows, live, tile_n, N, eps, bias, rotary, positions, slots, kv, layer, layers, q_out, q_norm, k_norm,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """Apply bias, head norm and rotary embedding; q goes to `q_out`, K and V to their pages."""
    HEAD: tl.constexpr = min(D, BN)
    # an epilogue slice lies within one head and is narrow: few live registers
    W: tl.constexpr = min(32 if BN >= 128 else 64, HEAD)
    HAS_BIAS: tl.constexpr = bias is not None
    position = tl.load(positions + rows, mask=rows < live, other=0).to(tl.int64)
    slot = tl.load(slots + rows, mask=rows < live, other=0).to(tl.int64)
    page_row = (slot // PAGE * layers + layer) * (2 * PAGE) + slot % PAGE
    d = tl.arange(0, W)
    # no branches in here: the loops could not be fused otherwise. Masked accesses cost no traffic.
    for s in tl.static_range(BN // W):
        col = tile_n * BN + s * W
        head = col // D
        at = col % D + d
        is_v = (head >= HQ + HKV).to(tl.int32)
        y = columns(total, s, BN // W) * scale[:, None]
        if HAS_BIAS:
            y += tl.load(bias + col + d, mask=col + d < N, other=0.0).to(tl.float32)[None, :]
        if q_norm is not None:
            if s % (HEAD // W) == 0:
                inverse = _head_scale(total, scale, bias, col, N, eps, s // (HEAD // W), BN // HEAD, D, HAS_BIAS)
            weight = tl.load(q_norm + at, mask=at < tl.where(head < HQ, D, 0), other=0.0).to(tl.float32)
            weight += tl.load(k_norm + at, mask=at < tl.where(head < HQ, 0, D), other=0.0).to(tl.float32)
            y = tl.where(is_v == 0, y * inverse[:, None] * weight[None, :], y)
        cos_sin = load_cos_sin(rotary, position, rows, live, col, HQ + HKV, D, W)
        y = rotate(y, cos_sin, is_v != 0).to(OUT)
        target = q_out + rows.to(tl.int64)[:, None] * (HQ * D) + (col + d)[None, :]
        tl.store(target, y, mask=(rows < tl.where(head < HQ, live, 0))[:, None])
        row = page_row + is_v * PAGE
        kv_head = head - HQ - is_v * HKV
        target = kv + row[:, None] * (HKV * D) + (kv_head * D + at)[None, :]
        tl.store(target, y, mask=(rows < tl.where((head >= HQ) & (head < HQ + 2 * HKV), live, 0))[:, None])


@triton.jit(do_not_specialize=["M", "layer", "stride_sumsq"])
def product_kernel(
    a, w, weights, partial, arrived, count, M, N, K, x, out,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, SLICES: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    sumsq=None, stride_sumsq=None, eps=None, bias=None, rotary=None, positions=None, slots=None, kv=None, layer=None,
    layers=None, q_out=None, q_norm=None, k_norm=None, PARTS: tl.constexpr = None, HQ: tl.constexpr = None,
    HKV: tl.constexpr = None, D: tl.constexpr = None, PAGE: tl.constexpr = None, factor=None,
    ACT: tl.constexpr = "", SOFTCAP: tl.constexpr = 0.0, more_a=None, more_w=None, more_steps=None, more_counts=None,
    MORE: tl.constexpr = 0,
):  # fmt: skip
    """`KIND` is "plain", "linear", "residual", "gate_up" or "qkv"; inputs that its epilogue does not read are None.

    MORE: columns of `more_steps`; 0: no further depth."""
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLIT)
    if AHEAD > 0:
        prefetch_first(weights, M, N, K, share, BM, BN, BK, GROUP, SPLIT, AHEAD)
    if MORE == 0:
        begin(PDL)
    else:
        begin_with_previous(PDL)  # `shrink_terms`
    live = live_tokens(count, M)
    tiles_m = tl.cdiv(live, BM)
    for unit in tl.range(
        tl.program_id(0), tiles_m * tiles_n * SPLIT, tl.num_programs(0), flatten=(SPLIT == 1) & (MORE == 0)
    ):
        tile = unit // SPLIT
        part = unit % SPLIT
        tile_m, tile_n = uneven_tile_of(tile, tiles_m, tiles_n, GROUP, MORE)
        first = part * share
        scale = None
        if KIND == "gate_up" or KIND == "linear":
            rows = tile_m * BM + tl.arange(0, BM)
            if PARTS > 0 and BM * PARTS <= EARLY:
                scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
        acc = accumulate(a, w, tile_m * BM, tile_n * BN, first, tl.minimum(first + share, steps), BM, BN, BK, SWAP)
        if MORE > 0:
            begin(PDL)
            stripe = tile_m * BM // MORE_ROWS
            acc = accumulate_more(
                acc, more_a, more_w, more_steps + stripe * MORE, tl.load(more_counts + stripe), part, tile_m * BM,
                tile_n * BN, SPLIT, SWAP,
            )  # fmt: skip
        done = True
        if ONCE:
            release(PDL)
        if SPLIT > 1:
            acc, done = join_splits(acc, partial, arrived, tile, part, SPLIT)
        if done:
            total = tl.trans(acc) if SWAP else acc
            if KIND == "plain":
                _store(total, out, tile_m, tile_n, BM, BN, SLICES, OUT)
            if KIND == "residual":
                _add_residual(
                    total, x, out, bias, sumsq, stride_sumsq, live, tile_m, tile_n, N, BM, BN, SLICES, OUT
                )  # fmt: skip
            if (KIND == "gate_up" or KIND == "linear") and BM * PARTS > EARLY:
                scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
            if KIND == "gate_up":
                _gated(total, scale, bias, out, tile_m, tile_n, N, ACT, BM, BN, SLICES, OUT)
            if KIND == "linear":
                _linear(total, scale, bias, factor, out, tile_m, tile_n, N, ACT, SOFTCAP, BM, BN, SLICES, OUT)
            if KIND == "qkv":
                rows = tile_m * BM + tl.arange(0, BM)
                scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
                _heads(total, scale, rows, live, tile_n, N, eps, bias, rotary, positions, slots, kv, layer, layers,
                       q_out, q_norm, k_norm, HQ, HKV, D, PAGE, BN, OUT)  # fmt: skip
    if MORE > 0:
        begin(PDL)  # a program without a tile may not end before the previous kernel either
    release(PDL)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch_gemm(
    kind: str, launch: Launch, a: Tensor, weight: Tensor, out: Tensor, num_tokens: Tensor | None,
    space: Workspace | None, x: Tensor | None = None, more: More | None = None, **fields: Any,
) -> None:  # fmt: skip
    """Run `product_kernel` for a `kind`; `fields` are the epilogue's inputs."""
    c = launch.config
    m, n, k = a.shape[0], weight.shape[0], a.shape[1]
    width = c.features // c.slices
    ws = check_workspace(space, launch, m, n)

    def tiles(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols])

    if more is not None:
        if BLOCK_TOKENS % c.tokens:
            raise ValueError(f"tiles of {c.tokens} tokens cannot have further depth")
        steps = more.steps[BLOCK_TOKENS]
        fields |= {
            "more_a": tiles(more.terms, c.tokens, STEP_COLUMNS), "more_w": tiles(more.b, c.features, STEP_COLUMNS),
            "more_steps": steps.blocks, "more_counts": steps.counts, "MORE": steps.blocks.shape[1],
        }  # fmt: skip

    product_kernel[launch.grid](
        tiles(a, c.tokens, c.depth), tiles(weight, c.features, c.depth), weight, ws.partial if ws else None,
        ws.arrived if ws else None, num_tokens, m, n, k, None if x is None else tiles(x, c.tokens, width),
        None if kind == "qkv" else tiles(out, c.tokens, width // 2 if kind == "gate_up" else width),
        q_out=out if kind == "qkv" else None, KIND=kind, BM=c.tokens, BN=c.features, BK=c.depth, GROUP=c.group,
        SPLIT=launch.split, SWAP=c.swap, SLICES=c.slices, OUT=_DTYPES[out.dtype], **fields, **launch.options,
    )  # fmt: skip
