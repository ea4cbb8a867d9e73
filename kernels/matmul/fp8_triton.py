"""FP8 GEMMs of a layer in plain Triton with fused epilogues.

Each 128-wide K step is summed by the tensor cores; the step's sum is scaled and accumulated in float32. For few tokens
the operands are swapped (`swap`): tokens are the columns of the MMA. Several programs may share a tile's K; their sums
are added in a fixed order. It serves all GPUs that multiply e4m3, with any number of tokens that neither
`fp8_few_hopper` nor `fp8_hopper` serves. The loop is otherwise that of `gemm_triton`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows, Fp8Weight
from weft.kernels.formats.fp8_triton import power_of_two, saturated
from weft.kernels.matmul.gemm_activations import activate, gate_with
from weft.kernels.matmul.gemm_launch import Launch, Workspace, check_workspace
from weft.kernels.matmul.gemm_tiles import columns, join_splits, live_tokens, row_scale, tile_of
from weft.kernels.matmul.gemm_triton import load_cos_sin, rotate


@triton.jit
def _prefetch_first(weights, N, K, unit, tile_n, share, BN: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch the first `AHEAD` steps of the weight into L2: they do not depend on the previous kernel."""
    rows = tile_n * BN + tl.arange(0, BN)
    cols = (unit % SPLIT * share + tl.arange(0, AHEAD)) * 128
    at = tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + tl.minimum(cols, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weights + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def accumulate(
    a, w, sa, stride_sa, sw, stride_sw, row, col, live, N, first, last,
    BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, A_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum steps [first, last) of one tile, including block scales: `[BM, BN]` float32, or transposed.

    W_BLOCKS: kind of weight scales. 0: per channel; 1: per 128x128 block; 2: block scales repeated per row."""
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    acc = tl.zeros([BN, BM], tl.float32) if SWAP else tl.zeros([BM, BN], tl.float32)
    if A_BLOCKS:
        factor = tl.load(sa + first * stride_sa + rows, mask=rows < live, other=0.0)
    for step in range(first, last):
        x = a.load([row, step * 128])
        y = w.load([col, step * 128])
        if A_BLOCKS:  # prefetch: one step early
            following = tl.load(sa + tl.minimum(step + 1, last - 1) * stride_sa + rows, mask=rows < live, other=0.0)
        part = tl.dot(y, x.T) if SWAP else tl.dot(x, y.T)
        if A_BLOCKS:
            part *= factor[None, :] if SWAP else factor[:, None]
            factor = following
        if W_BLOCKS > 0:
            place = (cols // 128 if W_BLOCKS == 1 else cols).to(tl.int64) * stride_sw
            scale = tl.load(sw + place + step, mask=cols < N, other=0.0)
            part *= scale[:, None] if SWAP else scale[None, :]
        acc += part
    return acc


@triton.jit
def dequantized(y, scale, sw, bias, col, N, W: tl.constexpr, W_BLOCKS: tl.constexpr):
    """Apply channel scales, row factors and bias to `y [BM, W]`."""
    at = col + tl.arange(0, W)
    if W_BLOCKS == 0:
        y = y * tl.load(sw + at, mask=at < N, other=0.0)[None, :]
    y = y * scale[:, None]
    if bias is not None:
        y += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def store_quantized(z, q_out, q_scale, stride_q, rows, live, col, width, W: tl.constexpr):
    """Write a block `z [BM, W]` of the next GEMM's operand, with rows of length `width`."""
    at = col + tl.arange(0, W)
    scale, inverse = power_of_two(tl.max(tl.abs(z), axis=1))
    tl.store(q_scale + col // 128 * stride_q + rows, scale, mask=rows < tl.where(col < width, live, 0))
    target = q_out + rows.to(tl.int64)[:, None] * width + at[None, :]
    tl.store(target, saturated(z * inverse[:, None]), mask=(rows < live)[:, None] & (at < width)[None, :])


@triton.jit
def _heads(
    total, scale, sw, rows, live, tile_n, N, eps, bias, rotary, positions, slots, kv, kv_inverse, layer, layers, q_out,
    q_norm, k_norm, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    OUT: tl.constexpr, W_BLOCKS: tl.constexpr, KV8: tl.constexpr,
):  # fmt: skip
    """Apply bias, head norm and rotary embedding like `gemm_triton._heads`; q goes to `q_out`, K and V to pages."""
    W: tl.constexpr = min(BN, D, 64 if q_norm is None else 128)
    position = tl.load(positions + rows, mask=rows < live, other=0).to(tl.int64)
    slot = tl.load(slots + rows, mask=rows < live, other=0).to(tl.int64)
    page_row = (slot // PAGE * layers + layer) * (2 * PAGE) + slot % PAGE
    d = tl.arange(0, W)
    for s in tl.static_range(BN // W):
        col = tile_n * BN + s * W
        head = col // D
        at = col % D + d
        is_v = (head >= HQ + HKV).to(tl.int32)
        y = dequantized(columns(total, s, BN // W), scale, sw, bias, col, N, W, W_BLOCKS)
        if q_norm is not None:
            tl.static_assert(W == D, "a head norm needs the whole head in one tile")
            weight = tl.load(q_norm + at, mask=at < tl.where(head < HQ, D, 0), other=0.0).to(tl.float32)
            weight += tl.load(k_norm + at, mask=at < tl.where(head < HQ, 0, D), other=0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)
            y = tl.where(is_v == 0, y * inverse[:, None] * weight[None, :], y)
        cos_sin = load_cos_sin(rotary, position, rows, live, col, HQ + HKV, D, W)
        y = rotate(y, cos_sin, is_v != 0).to(OUT)
        target = q_out + rows.to(tl.int64)[:, None] * (HQ * D) + (col + d)[None, :]
        tl.store(target, y, mask=(rows < tl.where(head < HQ, live, 0))[:, None])
        kv_head = head - HQ - is_v * HKV
        target = kv + (page_row + is_v * PAGE)[:, None] * (HKV * D) + (kv_head * D + at)[None, :]
        mine = (rows < tl.where((head >= HQ) & (head < HQ + 2 * HKV), live, 0))[:, None]
        if KV8:
            first = tl.where((head >= HQ) & (head < HQ + 2 * HKV), head - HQ, 0)
            inverse_scale = tl.load(kv_inverse + layer * (2 * HKV) + first)
            tl.store(target, saturated(y.to(tl.float32) * inverse_scale), mask=mine)
        else:
            tl.store(target, y, mask=mine)


@triton.jit(do_not_specialize=["M", "layer", "stride_sumsq", "stride_sa", "stride_q"])
def product_kernel(
    a, w, weights, sa, stride_sa, sw, stride_sw, partial, arrived, count, M, N, K, x, out, q_out, q_scale, stride_q,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, OUT: tl.constexpr, A_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, KV8: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
    next_norm=None, sumsq=None, stride_sumsq=None, eps=None, bias=None, rotary=None, positions=None, slots=None,
    kv=None, kv_inverse=None, layer=None, layers=None, q_norm=None, k_norm=None, PARTS: tl.constexpr = 0,
    HQ: tl.constexpr = None, HKV: tl.constexpr = None, D: tl.constexpr = None, PAGE: tl.constexpr = None,
    ACT: tl.constexpr = "",
):  # fmt: skip
    """`KIND` is "linear", "residual", "gate_up" or "qkv"; inputs that its epilogue does not read are None."""
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, 128)
    share = tl.cdiv(steps, SPLIT)
    if AHEAD > 0:
        _, first_n = tile_of(tl.program_id(0) // SPLIT, tl.cdiv(M, BM), tiles_n, GROUP)
        _prefetch_first(weights, N, K, tl.program_id(0), first_n, share, BN, SPLIT, AHEAD)
    begin(PDL)
    live = live_tokens(count, M)
    tiles_m = tl.cdiv(live, BM)
    for unit in range(tl.program_id(0), tiles_m * tiles_n * SPLIT, tl.num_programs(0)):
        tile = unit // SPLIT
        part = unit % SPLIT
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        first = part * share
        acc = accumulate(a, w, sa, stride_sa, sw, stride_sw, tile_m * BM, tile_n * BN, live, N, first,
                          tl.minimum(first + share, steps), BM, BN, SWAP, A_BLOCKS, W_BLOCKS)  # fmt: skip
        done = True
        if ONCE:
            release(PDL)
        if SPLIT > 1:
            acc, done = join_splits(acc, partial, arrived, tile, part, SPLIT)
        if done:
            total = tl.trans(acc) if SWAP else acc
            rows = tile_m * BM + tl.arange(0, BM)
            scale = tl.full([BM], 1.0, tl.float32)
            if PARTS > 0:
                scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
            if not A_BLOCKS:
                scale *= tl.load(sa + rows, mask=rows < live, other=0.0)
            if KIND == "qkv":
                _heads(total, scale, sw, rows, live, tile_n, N, eps, bias, rotary, positions, slots, kv, kv_inverse,
                       layer, layers, out, q_norm, k_norm, HQ, HKV, D, PAGE, BN, OUT, W_BLOCKS, KV8)  # fmt: skip
            elif KIND == "gate_up":
                for s in tl.static_range(BN // 256):
                    col = tile_n * BN + s * 256
                    y = dequantized(columns(total, s, BN // 256), scale, sw, bias, col, N, 256, W_BLOCKS)
                    gate, up = tl.split(tl.reshape(y, (BM, 128, 2)))
                    h = gate_with(gate, up, ACT)
                    store_quantized(h, q_out, q_scale, stride_q, rows, live, col // 2, N // 2, 128)
            else:
                W: tl.constexpr = min(128, BN)
                squares = tl.zeros([BM], tl.float32)
                for s in tl.static_range(BN // W):
                    col = tile_n * BN + s * W
                    at = col + tl.arange(0, W)
                    mask = (rows < live)[:, None] & (at < N)[None, :]
                    place = rows.to(tl.int64)[:, None] * N + at[None, :]
                    y = dequantized(columns(total, s, BN // W), scale, sw, bias, col, N, W, W_BLOCKS)
                    if KIND == "residual":
                        y = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) + y).to(OUT)
                        tl.store(out + place, y, mask=mask)
                        z = tl.where(mask, y.to(tl.float32), 0.0)
                        squares += tl.sum(z * z, axis=1)
                        if q_out is not None:
                            if next_norm is not None:
                                z *= tl.load(next_norm + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
                            store_quantized(z, q_out, q_scale, stride_q, rows, live, col, N, W)
                    else:
                        tl.store(out + place, activate(y, ACT).to(OUT), mask=mask)
                if KIND == "residual":
                    tl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)
    release(PDL)


def weight_blocks(weight: Fp8Weight) -> int:
    """Return `W_BLOCKS` of the kernels."""
    return 0 if not weight.blocked else 2 if len(weight.scale) == len(weight.values) else 1


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch_gemm(
    kind: str, launch: Launch, a: Fp8Rows, weight: Fp8Weight, out: Tensor | None, quantized: Fp8Rows | None,
    num_tokens: Tensor | None, space: Workspace | None, x: Tensor | None, *, dtype: torch.dtype, **fields: Any,
) -> None:  # fmt: skip
    """Run `product_kernel` for a `kind`; `fields` are the epilogue's inputs."""
    c = launch.config
    (m, k), n = a.values.shape, weight.values.shape[0]
    ws = check_workspace(space, launch, m, n)
    kv = fields.get("kv")

    def tiles(tensor: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, BLOCK])

    early = pdl_options()
    product_kernel[launch.grid](
        tiles(a.values, c.tokens), tiles(weight.values, c.features), weight.values, a.scale, a.scale.stride(0),
        weight.scale, weight.scale.stride(0), ws.partial if ws else None, ws.arrived if ws else None, num_tokens, m, n,
        k, x, out, None if quantized is None else quantized.values, None if quantized is None else quantized.scale,
        0 if quantized is None else quantized.scale.stride(0), KIND=kind, BM=c.tokens, BN=c.features, GROUP=c.group,
        SPLIT=launch.split, SWAP=c.swap, OUT=_DTYPES[dtype], A_BLOCKS=a.scale.shape[0] > 1,
        W_BLOCKS=weight_blocks(weight), KV8=kv is not None and kv.element_size() == 1,
        AHEAD=c.ahead if early["PDL"] else 0, num_warps=c.warps, num_stages=c.stages, **launch.options, **fields,
        **early,
    )  # fmt: skip
