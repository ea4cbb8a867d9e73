"""FP8 GEMMs of a layer for many tokens on Hopper, warp-specialized, with epilogues on the accumulators.

The structure is that of `gemm_hopper`: two warpgroups own 64 rows each of a tile of 128 tokens x 256 (or 128) features,
and one producer warp streams both operands by TMA. Operands are e4m3 and a step is 128 of K. `WAY` selects how steps
are added, which block scales and large K require:

- "promoted": 64 x 128 partial sums of one step, times the step's scales, are added to the accumulator in float32; a
  tile of 256 features does its left half, then its right one, while the other warpgroup uses the tensor cores;
- "paired": the same with partial sums of two steps that share activation scales (`Fp8Rows.span`), which halves the cost
  of moving sums out of the tensor cores, the loss of "promoted" against "fast". Weights with a scale per channel;
- "fast": one accumulator and one scale per token, applied at the end, as most servers do.

An epilogue that produces the next GEMM's operand quantizes it: each row of a tile has its own scales, a power of two
for each 128 columns (`fp8.quantize_rows`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import follow_previous, live_tokens, load_operands, load_tile, ring_barriers, store_tile
from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight
from weft.kernels.formats.fp8_triton import power_of_two
from weft.kernels.matmul.fp8_triton import weight_blocks
from weft.kernels.matmul.gemm_activations import activate
from weft.kernels.matmul.gemm_hopper import (
    load_row_scale,
    multiply,
    normed_head,
    page_rows,
    rotate_half,
    split_halves,
    store_heads,
)
from weft.kernels.matmul.gemm_tiles import tile_of

BLOCK_TOKENS, BLOCK_DEPTH = 128, 128


# The barriers are those of `gemm_hopper` (see the table there): full and empty for each stage of the operands, x_full
# and x_empty for the residual's tile, which is held in `io` as pieces of 64 x 128.


@gluon.jit
def _produce(
    a, w, x, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, tiles_m, tiles_n, steps,
    KIND: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = BN // 128
    count = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            count = load_operands(a, w, tile_m * 128, tile_n * BN, step, a_smem, w_smem, full, empty, count, 128,
                                  (128 + BN) * 128, STAGES)  # fmt: skip
            if KIND == "residual":  # noqa: SIM102 (the outer one is settled when compiled)
                if step == gl.minimum(STAGES, steps - 1):
                    for half in gl.static_range(2):
                        mbarrier.wait(x_empty.index(half), (turn & 1) ^ 1)
                        mbarrier.expect(x_full.index(half), 64 * BN * 2)
                        for piece in gl.static_range(PIECES):
                            load_tile(x, [tile_m * 128 + half * 64, tile_n * BN + piece * 128], x_full.index(half),
                                      io_smem.index(half * PIECES + piece))  # fmt: skip
        turn += 1  # noqa: SIM113


@gluon.jit
def promoted(
    a_smem, w_smem, full, empty, sa, stride_sa, sw, stride_sw, rows, lane, live, block_n, blocks_n, N, count, steps,
    WG: gl.constexpr, BN: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, A_BLOCKS: gl.constexpr,
    W_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Return (left `[64, 128]`, right `[64, 128]` or left again, stages used so far) of one tile of BN features.

    W_BLOCKS: 1: a scale per 128 features; 2: per feature; 3: two per tile, for alternate features."""
    left = gl.zeros([64, 128], gl.float32, layout=HALF)
    right = gl.zeros([64, 128], gl.float32, layout=HALF)
    scale = gl.load(sa + rows, mask=rows < live, other=1.0)
    for step in range(steps):
        stage = count % STAGES
        following = scale
        if A_BLOCKS:
            at = gl.minimum(step + 1, steps - 1).to(gl.int64) * stride_sa
            following = gl.load(sa + at + rows, mask=rows < live, other=1.0)
        mine = scale if A_BLOCKS else gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, HALF))
        second = mine
        if W_BLOCKS == 1:
            first_at = sw + block_n.to(gl.int64) * stride_sw + step
            mine = mine * gl.load(first_at)
            second = second * gl.load(first_at + gl.where(block_n + 1 < blocks_n, stride_sw, 0))
        if W_BLOCKS == 3:
            pair_at = sw + (block_n * 128).to(gl.int64) * stride_sw + step
            pair = gl.where((lane & 1) == 0, gl.load(pair_at), gl.load(pair_at + stride_sw))
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        a_mine = a_smem.index(stage).slice(WG * 64, 64)
        w_mine = w_smem.index(stage)
        zeros = gl.zeros([64, 128], gl.float32, layout=HALF)
        part = warpgroup_mma(a_mine, w_mine.slice(0, 128).permute((1, 0)), zeros, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        if BN == 128:
            mbarrier.arrive(empty.index(stage), count=1)
        if W_BLOCKS == 2:
            part = part * gl.load(sw + gl.minimum(block_n * 128 + lane, N - 1) * stride_sw + step)[None, :]
        if W_BLOCKS == 3:
            part = part * pair[None, :]
        left = left + part * mine[:, None]
        if BN == 256:
            part = warpgroup_mma(a_mine, w_mine.slice(128, 128).permute((1, 0)), zeros, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            if W_BLOCKS == 2:
                part = part * gl.load(sw + gl.minimum(block_n * 128 + 128 + lane, N - 1) * stride_sw + step)[None, :]
            if W_BLOCKS == 3:
                part = part * pair[None, :]
            right = right + part * second[:, None]
        scale = following
        count += 1
    if not A_BLOCKS:
        left = left * scale[:, None]
        right = right * scale[:, None]
    return left, right, count


@gluon.jit
def _paired(
    a_smem, w_smem, full, empty, sa, stride_sa, rows, live, count, steps,
    WG: gl.constexpr, BN: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Like `promoted`, two steps at a time; the number of steps is even."""
    left = gl.zeros([64, 128], gl.float32, layout=HALF)
    right = gl.zeros([64, 128], gl.float32, layout=HALF)
    scale = gl.load(sa + rows, mask=rows < live, other=1.0)
    for pair in range(steps // 2):
        first = count % STAGES
        second = (count + 1) % STAGES
        at = gl.minimum(2 * pair + 2, steps - 2).to(gl.int64) * stride_sa
        following = gl.load(sa + at + rows, mask=rows < live, other=1.0)
        a_first = a_smem.index(first).slice(WG * 64, 64)
        a_second = a_smem.index(second).slice(WG * 64, 64)
        w_first = w_smem.index(first)
        w_second = w_smem.index(second)
        zeros = gl.zeros([64, 128], gl.float32, layout=HALF)
        mbarrier.wait(full.index(first), (count // STAGES) & 1)
        part = warpgroup_mma(a_first, w_first.slice(0, 128).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(full.index(second), ((count + 1) // STAGES) & 1)
        part = warpgroup_mma(a_second, w_second.slice(0, 128).permute((1, 0)), part, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        if BN == 256:
            left = left + part * scale[:, None]
            part = warpgroup_mma(a_first, w_first.slice(128, 128).permute((1, 0)), zeros, use_acc=False, is_async=True)
            part = warpgroup_mma(a_second, w_second.slice(128, 128).permute((1, 0)), part, is_async=True)
            part = warpgroup_mma_wait(1, deps=[part])
            mbarrier.arrive(empty.index(first), count=1)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(second), count=1)
            right = right + part * scale[:, None]
        else:
            mbarrier.arrive(empty.index(first), count=1)
            mbarrier.arrive(empty.index(second), count=1)
            left = left + part * scale[:, None]
        scale = following
        count += 2
    return left, right, count


@gluon.jit
def dequantized(y, row_scale, sw, bias, col, N, W_BLOCKS: gl.constexpr, NORMED: gl.constexpr, HAS_BIAS: gl.constexpr,
              HALF: gl.constexpr):  # fmt: skip
    """Apply channel scales, the rows' norm factor and bias to columns `col ..` of a GEMM."""
    at = col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, HALF))
    if W_BLOCKS == 0:
        y = y * gl.load(sw + at, mask=at < N, other=0.0)[None, :]
    if NORMED:
        y = y * row_scale[:, None]
    if HAS_BIAS:
        y += gl.load(bias + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    return y


@gluon.jit
def _rounded(y, DTYPE: gl.constexpr):
    """Convert float32 to 16 bits, two numbers per instruction; the compiler misses that if float32 is needed again."""
    if gl.bfloat16 == DTYPE:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [y], dtype=gl.bfloat16, is_pure=True,
                                      pack=2)  # fmt: skip
    else:
        y = y.to(DTYPE)
    return y


@gluon.jit
def gated(gate, up, ACT: gl.constexpr):
    """Like `gemm_activations.gate_with`, with the fast exponential and reciprocal: the result keeps four bits."""
    if ACT == "silu":
        y = gl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 t, t; mul.ftz.f32 $0, $1, $2; mul.ftz.f32 $0, $0, t; }",
            "=&f,f,f", [gate, up], dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = activate(gate, ACT) * up
    return y


@gluon.jit
def _added(y, io, sw, bias, col, N, W_BLOCKS: gl.constexpr, HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr,
           HALF: gl.constexpr):  # fmt: skip
    """Add columns `col ..` of a GEMM to those of the residual in `io`: `[64, 128]`, also written there."""
    y = dequantized(y, 1.0, sw, bias, col, N, W_BLOCKS, False, HAS_BIAS, HALF)
    y = _rounded(io.load(HALF).to(gl.float32) + y, DTYPE)
    io.store(y)
    return y


@gluon.jit
def _weighted(z, norm, at, N, WEIGHTED: gl.constexpr):
    """Multiply `z [64, 128]` by the weight of the next norm unless that is folded into its matrix."""
    if WEIGHTED:
        z = z * gl.load(norm + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    return z


@gluon.jit
def _leave_quantized(z, amax, q_smem, q_desc, q_scale, stride_q, row0, col, rows, live, N):
    """Write a block of 128 columns of the next GEMM's operand: e4m3 and scales of rows with maximum amax."""
    scale, inverse = power_of_two(amax)
    gl.store(q_scale + (col // 128).to(gl.int64) * stride_q + rows, scale, mask=(rows < live) & (col < N))
    q = (z * inverse[:, None]).to(gl.float8e4nv)
    tma.store_wait(1)  # the previous block has left `q_smem`; the tile stored since may be in flight
    q_smem.store(q)
    fence_async_shared()
    store_tile(q_desc, [row0, col], q_smem)


@gluon.jit
def _consume(
    rings, places, sums, heads, live, tiles_m, tiles_n, steps, N, K, WG: gl.constexpr,
    KIND: gl.constexpr, WAY: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr, QUANTIZED: gl.constexpr, WEIGHTED: gl.constexpr,
    KV8: gl.constexpr, SHARED: gl.constexpr, A_BLOCKS: gl.constexpr, W_BLOCKS: gl.constexpr, DTYPE: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    a_smem, w_smem, io_smem, q_smem, full, empty, x_full, x_empty = rings
    out, q_desc, q_scale, stride_q, next_norm = places
    sa, stride_sa, sw, stride_sw, sumsq, stride_sumsq, eps, bias = sums
    rotary, positions, slots, kv, kv_inverse, layer, layers, q_norm, k_norm = heads
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    PIECES: gl.constexpr = BN // 128
    count = 0
    turn = 0
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, HALF))
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        row0 = tile_m * 128 + WG * 64
        rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
        scale = gl.full([64], 1.0, gl.float32, layout=gl.SliceLayout(1, HALF))
        if PARTS > 0:
            scale = load_row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
        if WAY == "promoted":
            left, right, count = promoted(
                a_smem, w_smem, full, empty, sa, stride_sa, sw, stride_sw, rows, lane, live, tile_n * PIECES,
                gl.cdiv(N, 128), N, count, steps, WG, BN, HALF, STAGES, A_BLOCKS, W_BLOCKS,
            )  # fmt: skip
        elif WAY == "paired":
            left, right, count = _paired(
                a_smem, w_smem, full, empty, sa, stride_sa, rows, live, count, steps, WG, BN, HALF, STAGES
            )  # fmt: skip
        else:
            wide_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
            acc, count = multiply(a_smem, w_smem, full, empty, count, steps, WG, BN, ACC, BN, STAGES)
            acc = acc * gl.load(sa + wide_rows, mask=wide_rows < live, other=1.0)[:, None]
            if BN == 256:
                left, right = split_halves(acc)
                left = gl.convert_layout(left, HALF)
                right = gl.convert_layout(right, HALF)
            else:
                left = acc
                right = acc

        col0 = tile_n * BN
        NORMED: gl.constexpr = PARTS > 0
        if KIND == "linear":
            for piece in gl.static_range(PIECES):
                y = dequantized(left if piece == 0 else right, scale, sw, bias, col0 + piece * 128, N, W_BLOCKS, NORMED,
                              HAS_BIAS, HALF)  # fmt: skip
                io = io_smem.index(WG)
                tma.store_wait(0)
                io.store(activate(y, ACT).to(DTYPE))
                fence_async_shared()
                store_tile(out, [row0, col0 + piece * 128], io)
        if KIND == "residual":
            mbarrier.wait(x_full.index(WG), turn & 1)
            squares = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, HALF))
            largest = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, HALF))
            if SHARED:  # all pieces are needed before the store below
                for piece in gl.static_range(PIECES):
                    y = _added(left if piece == 0 else right, io_smem.index(WG * PIECES + piece), sw, bias,
                               col0 + piece * 128, N, W_BLOCKS, HAS_BIAS, DTYPE, HALF)  # fmt: skip
                    z = _weighted(y.to(gl.float32), next_norm, col0 + piece * 128 + lane, N, WEIGHTED)
                    largest = gl.maximum(largest, gl.max(gl.abs(z), axis=1))
            for piece in gl.static_range(PIECES):
                col = col0 + piece * 128
                io = io_smem.index(WG * PIECES + piece)
                if SHARED:
                    y = io.load(HALF)
                else:
                    y = _added(left if piece == 0 else right, io, sw, bias, col, N, W_BLOCKS, HAS_BIAS, DTYPE, HALF)
                fence_async_shared()
                store_tile(out, [row0, col], io)
                z = y.to(gl.float32)
                squares += gl.sum(z * z, axis=1)
                if QUANTIZED:
                    z = _weighted(z, next_norm, col + lane, N, WEIGHTED)
                    amax = largest if SHARED else gl.max(gl.abs(z), axis=1)
                    _leave_quantized(z, amax, q_smem.index(WG), q_desc, q_scale, stride_q, row0, col, rows, live, N)
            gl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)
            tma.store_wait(0)
            mbarrier.arrive(x_empty.index(WG), count=1)
        if KIND == "gate_up":
            gl.static_assert(BN == 256, "a block of 128 columns comes of 256 features")
            PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
            y = dequantized(left, scale, sw, bias, col0, N, W_BLOCKS, NORMED, HAS_BIAS, HALF)
            gate, up = gl.split(gl.reshape(y, (64, 64, 2)))
            h_left = gl.convert_layout(gated(gate, up, ACT), PAIRS)
            y = dequantized(right, scale, sw, bias, col0 + 128, N, W_BLOCKS, NORMED, HAS_BIAS, HALF)
            gate, up = gl.split(gl.reshape(y, (64, 64, 2)))
            h_right = gl.convert_layout(gated(gate, up, ACT), PAIRS)
            amax = gl.maximum(gl.max(gl.abs(h_left), axis=1), gl.max(gl.abs(h_right), axis=1))
            h_scale, inverse = power_of_two(amax)
            h_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, PAIRS))
            gl.store(q_scale + tile_n.to(gl.int64) * stride_q + h_rows, h_scale, mask=h_rows < live)
            tma.store_wait(0)
            q_mine = q_smem.index(WG)
            q_mine.slice(0, 64, dim=1).store((h_left * inverse[:, None]).to(gl.float8e4nv))
            q_mine.slice(64, 64, dim=1).store((h_right * inverse[:, None]).to(gl.float8e4nv))
            fence_async_shared()
            store_tile(q_desc, [row0, tile_n * 128], q_mine)
        if KIND == "qkv":
            slot_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
            page_row = page_rows(slots, slot_rows, live, layer, layers, PAGE)
            # not before the loop, as in `gemm_hopper`: they would take the registers of the partial sums
            position = gl.load(positions + rows, mask=rows < live, other=0).to(gl.int64)
            cos_sin = gl.load(rotary + position[:, None] * D + (lane % D)[None, :])
            for piece in gl.static_range(PIECES):
                col = col0 + piece * 128
                y = dequantized(left if piece == 0 else right, scale, sw, bias, col, N, W_BLOCKS, True, HAS_BIAS, HALF)
                if HAS_NORM:
                    y = normed_head(y, col, lane, eps, q_norm, k_norm, HQ, HKV, D)
                y = rotate_half(y, cos_sin, (col + lane >= (HQ + HKV) * D)[None, :])
                store_heads(y.to(DTYPE), io_smem.index(WG), slot_rows, col, out, kv, kv_inverse, page_row, live, layer,
                          HQ, HKV, D, PAGE, KV8, ROWS)  # fmt: skip
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "layer", "stride_sumsq", "stride_sa", "stride_q"])
def product_kernel(
    a, w, x, out, q_desc, q_scale, stride_q, next_norm, num_tokens, M, N, K, sa, stride_sa, sw, stride_sw, sumsq,
    stride_sumsq, eps, bias, rotary, positions, slots, kv, kv_inverse, layer, layers, q_norm, k_norm,
    KIND: gl.constexpr, WAY: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr, HAS_COUNT: gl.constexpr, QUANTIZED: gl.constexpr,
    WEIGHTED: gl.constexpr, KV8: gl.constexpr, SHARED: gl.constexpr, A_BLOCKS: gl.constexpr, W_BLOCKS: gl.constexpr,
    DTYPE: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    eight: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    sixteen: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PIECES: gl.constexpr = BN // 128
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], eight)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], eight)
    IO: gl.constexpr = 2 * PIECES if KIND == "residual" else 2
    # unused buffers are one small tile
    io_smem = gl.allocate_shared_memory(DTYPE, [IO, 64, 128] if KIND != "gate_up" else [1, 8, 64], sixteen)
    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 128] if QUANTIZED else [1, 8, 128], eight)
    full, empty = ring_barriers(STAGES, 2)
    # only where they are used: see `gemm_hopper`
    x_full, x_empty = full, empty
    if KIND == "residual":
        x_full, x_empty = ring_barriers(2, 1)
    follow_previous(PDL)
    live = live_tokens(num_tokens, M, HAS_COUNT)
    tiles_m = gl.cdiv(live, 128)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 128)
    rings = (a_smem, w_smem, io_smem, q_smem, full, empty, x_full, x_empty)
    places = (out, q_desc, q_scale, stride_q, next_norm)
    sums = (sa, stride_sa, sw, stride_sw, sumsq, stride_sumsq, eps, bias)
    heads = (rotary, positions, slots, kv, kv_inverse, layer, layers, q_norm, k_norm)
    gl.warp_specialize(
        [
            (_consume, (rings, places, sums, heads, live, tiles_m, tiles_n, steps, N, K, 0, KIND, WAY, BN, STAGES,
                        GROUP, PARTS, HQ, HKV, D, PAGE, HAS_BIAS, HAS_NORM, QUANTIZED, WEIGHTED, KV8, SHARED, A_BLOCKS,
                        W_BLOCKS, DTYPE, ACT)),
            (_consume, (rings, places, sums, heads, live, tiles_m, tiles_n, steps, N, K, 1, KIND, WAY, BN, STAGES,
                        GROUP, PARTS, HQ, HKV, D, PAGE, HAS_BIAS, HAS_NORM, QUANTIZED, WEIGHTED, KV8, SHARED, A_BLOCKS,
                        W_BLOCKS, DTYPE, ACT)),
            (_produce, (a, w, x, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, tiles_m, tiles_n, steps, KIND,
                        BN, STAGES, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_LAYOUTS = {bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}
_FIELDS: dict[str, Any] = dict.fromkeys(
    ("sumsq", "bias", "rotary", "positions", "slots", "kv", "kv_inverse", "q_norm", "k_norm", "next_norm"), None
) | {"stride_sumsq": 0, "eps": 0.0, "layer": 0, "layers": 0, "PARTS": 0, "HQ": 1, "HKV": 1, "D": 128, "PAGE": 1,
     "ACT": ""}  # fmt: skip


def stages_of(kind: str, features: int) -> int:
    """Return the steps of both operands that fit in shared memory with the epilogue's buffers."""
    kept = {"residual": 64 * 4 * features + 16384, "gate_up": 17408}.get(kind, 32768)
    return (227 * 1024 - 1024 - kept) // ((BLOCK_TOKENS + features) * BLOCK_DEPTH)


def launch_gemm(
    kind: str, a: Fp8Rows, weight: Fp8Weight, out: Tensor | None, quantized: Fp8Rows | None, num_tokens: Tensor | None,
    x: Tensor | None, *, num_sms: int, dtype: torch.dtype, way: str, features: int = 256, group: int = 8,
    **fields: Any,
) -> None:  # fmt: skip
    """Run `product_kernel` for a `kind`; `fields` are the epilogue's inputs, `quantized` its FP8 output."""

    def tiles(tensor: Tensor, rows: int, cols: int = 128) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols], _LAYOUTS[tensor.element_size() * 8])

    m, k = a.values.shape
    n = weight.values.shape[0]
    units = -(-m // BLOCK_TOKENS) * -(-n // features)
    kv = fields.get("kv")
    product_kernel[(min(num_sms, units),)](
        tiles(a.values, BLOCK_TOKENS), tiles(weight.values, features), None if x is None else tiles(x, 64),
        None if out is None else out if kind == "qkv" else tiles(out, 64),
        None if quantized is None else tiles(quantized.values, 64), None if quantized is None else quantized.scale,
        0 if quantized is None else quantized.scale.stride(0),
        num_tokens=num_tokens, M=m, N=n, K=k, sa=a.scale, stride_sa=a.scale.stride(0), sw=weight.scale,
        stride_sw=weight.scale.stride(0), **(_FIELDS | fields), KIND=kind, WAY=way, BN=features,
        STAGES=stages_of(kind, features), GROUP=group, HAS_BIAS=fields.get("bias") is not None,
        HAS_NORM=fields.get("q_norm") is not None, HAS_COUNT=num_tokens is not None,
        QUANTIZED=quantized is not None, WEIGHTED=fields.get("next_norm") is not None,
        KV8=kv is not None and kv.element_size() == 1, SHARED=quantized is not None and quantized.span > BLOCK_DEPTH,
        A_BLOCKS=a.scale.shape[0] > 1, W_BLOCKS=weight_blocks(weight),
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype], num_warps=4, **pdl_options(),
    )  # fmt: skip
