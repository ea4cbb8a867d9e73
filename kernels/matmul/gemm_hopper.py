"""GEMMs of a layer for many tokens on Hopper, warp-specialized, with epilogues on the accumulators.

Two warpgroups own 64 rows each of a 128 x 256 tile; one producer warp streams both operands by TMA and runs ahead into
the next tile during the epilogue of this one. Epilogue inputs are fetched during the main loop: the residual tile
arrives by TMA with the operands, rotary factors and row scales wait in registers.

A QKV GEMM runs its last, partial wave in halves of tiles (128 features) if there are enough programs: 168 tiles on 112
SMs take one and a half waves instead of two.

`projections` and `gemm.matmul` launch these; the plain Triton kernels serve few tokens and other shapes.
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

from weft.kernels.common.hopper import (
    await_previous,
    follow_previous,
    let_next_start,
    live_tokens,
    load_operands,
    load_tile,
    ring_barriers,
    start_with_previous,
    store_tile,
)
from weft.kernels.matmul.adapter_depth import More
from weft.kernels.matmul.gemm_activations import activate, gate_with
from weft.kernels.matmul.gemm_launch import Launch
from weft.kernels.matmul.gemm_tiles import rotated, uneven_tile_of

BLOCK_TOKENS, BLOCK_FEATURES, BLOCK_DEPTH = 128, 256, 64


@gluon.jit
def _divide_wave(tiles, KIND: gl.constexpr):
    """Return (whole tiles, half tiles): the last wave of "qkv" in halves if there are enough programs."""
    if KIND == "qkv":
        last = tiles % gl.num_programs(0)
        last *= (2 * last <= gl.num_programs(0)).to(gl.int32)
        return tiles - last, 2 * last
    else:
        return tiles, 0


# The barriers. A program is two warpgroups (`_consume`, WG 0 and 1) and one warp (`_produce`). `count` numbers the
# steps of all tiles of a program, on both sides: stage = count % STAGES, parity = (count // STAGES) & 1.
#
#   barrier         arrivals in a phase                              waited for by
#   full[stage]     1: the producer's `expect`, both operands        each WG, with parity
#   empty[stage]    2: each WG, when its MMA of the step is done     the producer, with parity ^ 1
#   x_full[WG]      1: the producer's `expect`, 64 rows of x         that WG before its epilogue, with turn & 1
#   x_empty[WG]     1: that WG, when its result has left `io`        the producer, with (turn & 1) ^ 1
#
# `expect` is an arrival; the phase ends when the announced bytes have landed too. A wait names the parity of the phase
# whose end it waits for; on a fresh barrier parity 1 passes at once. The x barriers serve only "residual": `turn`
# numbers the tiles, and `io[WG]` holds x first, then the result.
#
# "residual", STAGES = 3, a tile of 6 steps and the next one (L requests a stage, M multiplies it, E is the epilogue):
#
#   count       0   1   2   3   4   5   6   7   8   ...
#   stage       0   1   2   0   1   2   0   1   2
#   parity      0   0   0   1   1   1   0   0   0
#
#   time -->
#   producer    L0  L1  L2  .   L3x L4  L5  L6  L7  L8  .   L9     as soon as a stage is free, the next tile's during E
#   each WG     .   .   M0  M1  M2  M3  M4  M5  E.....  M6  M7     M waits for full, E for x_full
#   empty                   0   1   2   3   4   5   x       6      step s is released when M(s + 1) has been issued
#
# x is requested after step min(STAGES, steps - 1): the ring is full by then, so x delays no operand. With more than
# STAGES steps this never waits for x_empty: L3 had a free stage because both WGs were at M1 of this tile, so they had
# left the previous epilogue. With fewer it may, but the tile's operands are all in flight. The other kinds pass their
# result through `io[WG]` without a barrier: one WG owns it, and waits for its own store before it writes there again.


@gluon.jit
def _produce(
    a, w, w_half, x, more, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, tiles_m, tiles_n, steps,
    KIND: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    MORE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    count = 0
    turn = 0
    terms, b, b_half, more_steps, more_counts = more
    whole, halves = _divide_wave(tiles_m * tiles_n, KIND)
    for tile in range(gl.program_id(0), whole, gl.num_programs(0)):
        tile_m, tile_n = uneven_tile_of(tile, tiles_m, tiles_n, GROUP, MORE)
        for step in range(steps):
            count = load_operands(a, w, tile_m * 128, tile_n * BN, step, a_smem, w_smem, full, empty, count, BK,
                                  (128 + BN) * BK * 2, STAGES)  # fmt: skip
            if KIND == "residual":  # noqa: SIM102 (the outer one is settled when compiled)
                if step == gl.minimum(STAGES, steps - 1):
                    for half in gl.static_range(2):
                        mbarrier.wait(x_empty.index(half), (turn & 1) ^ 1)
                        mbarrier.expect(x_full.index(half), 64 * BN * 2)
                        load_tile(x, [tile_m * 128 + half * 64, tile_n * BN], x_full.index(half), io_smem.index(half))
        if MORE > 0:
            if PDL:
                await_previous()
            for i in range(gl.load(more_counts + tile_m)):
                step = gl.load(more_steps + tile_m * MORE + i)
                count = load_operands(terms, b, tile_m * 128, tile_n * BN, step, a_smem, w_smem, full, empty, count, BK,
                                      (128 + BN) * BK * 2, STAGES)  # fmt: skip
        turn += 1  # noqa: SIM113
    if KIND == "qkv":  # noqa: SIM102 (the outer one is settled when compiled)
        if gl.program_id(0) < halves:
            tile_m, tile_n = uneven_tile_of(whole + gl.program_id(0) // 2, tiles_m, tiles_n, GROUP, MORE)
            col = tile_n * BN + gl.program_id(0) % 2 * (BN // 2)
            for step in range(steps):
                stage = count % STAGES
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), (128 + BN // 2) * BK * 2)
                load_tile(a, [tile_m * 128, step * BK], full.index(stage), a_smem.index(stage))
                load_tile(w_half, [col, step * BK], full.index(stage), w_smem.index(stage).slice(0, BN // 2))
                count += 1
            if MORE > 0:
                if PDL:
                    await_previous()
                for i in range(gl.load(more_counts + tile_m)):
                    step = gl.load(more_steps + tile_m * MORE + i)
                    stage = count % STAGES
                    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(stage), (128 + BN // 2) * BK * 2)
                    load_tile(terms, [tile_m * 128, step * BK], full.index(stage), a_smem.index(stage))
                    load_tile(b_half, [col, step * BK], full.index(stage), w_smem.index(stage).slice(0, BN // 2))
                    count += 1
    if MORE > 0 and PDL:
        await_previous()  # a program without a tile may not end before the previous kernel either


@gluon.jit
def load_row_scale(sumsq, rows, live, stride, width, eps, PARTS: gl.constexpr):
    total = gl.load(sumsq + rows, mask=rows < live, other=0.0)
    for part in range(1, PARTS):
        total += gl.load(sumsq + part * stride + rows, mask=rows < live, other=0.0)
    return gl.rsqrt(total / width + eps)


@gluon.jit
def split_halves(acc):
    """Split `[64, 2 W]` into its left and right `[64, W]`."""
    WIDTH: gl.constexpr = acc.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(acc, (64, 2, WIDTH)), (0, 2, 1)))


@gluon.jit
def rotate_half(y, cos_sin, skip):
    """Rotate neighbor pairs of `y [R, W]`; columns with `skip` do not change."""
    ROWS: gl.constexpr = y.shape[0]
    WIDTH: gl.constexpr = y.shape[1]
    y_pairs = gl.reshape(y, (ROWS, WIDTH // 2, 2))
    a, b = gl.split(y_pairs)
    cos, sin = gl.split(gl.reshape(cos_sin, (ROWS, WIDTH // 2, 2)))
    a, b = rotated(a, b, cos, sin)
    turned = gl.reshape(gl.join(a, b), (ROWS, WIDTH))
    return gl.where(skip, y, gl.convert_layout(turned, y.type.layout))


@gluon.jit
def store_heads(
    y, io, rows, col0, q_out, kv, kv_inverse, page_row, live, layer,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, KV8: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Write 16-bit `y [64, 128]` to q or the pages, in rows of 16-byte (in FP8 pages 8-byte) pieces."""
    io.store(y)
    tile = io.load(ROWS)
    col = col0 + gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS))
    is_v = (col >= (HQ + HKV) * D).to(gl.int32)
    real = (rows < live)[:, None]
    q_at = q_out + rows.to(gl.int64)[:, None] * (HQ * D) + col[None, :]
    gl.store(q_at, tile, mask=real & (col < HQ * D)[None, :])
    within = col - HQ * D + is_v * ((PAGE - 1) * HKV * D)
    kv_at = kv + page_row[:, None] * (HKV * D) + within[None, :]
    is_kv = (col >= HQ * D) & (col < (HQ + 2 * HKV) * D)
    if KV8:
        inverse = gl.load(kv_inverse + layer * (2 * HKV) + (col - HQ * D) // D, mask=is_kv, other=1.0)
        stored = (tile.to(gl.float32) * inverse[None, :]).to(gl.float8e4nv)
        gl.store(kv_at, stored, mask=real & is_kv[None, :])
    else:
        gl.store(kv_at, tile, mask=real & is_kv[None, :])


@gluon.jit
def normed_head(y, col0, lane, eps, q_norm, k_norm, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr):
    """Apply the norm of the head `y [64, D]`."""
    gl.static_assert(y.shape[1] == D)
    col = col0 + lane
    weight = gl.load(q_norm + lane, mask=col < HQ * D, other=0.0).to(gl.float32)
    weight += gl.load(k_norm + lane, mask=(col >= HQ * D) & (col < (HQ + HKV) * D), other=0.0).to(gl.float32)
    weight = gl.where(col >= (HQ + HKV) * D, 1.0, weight)
    inverse = gl.rsqrt(gl.sum(y * y, axis=1) / D + eps)
    inverse = gl.where(col0 >= (HQ + HKV) * D, 1.0, inverse)
    return y * inverse[:, None] * weight[None, :]


@gluon.jit
def multiply(
    a_smem, w_smem, full, empty, count, steps,
    WG: gl.constexpr, WIDTH: gl.constexpr, ACC: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `[64, WIDTH]` of one tile in `ACC` from the producer's stages, and the stages used so far."""
    acc = gl.zeros([64, WIDTH], gl.float32, layout=ACC)
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        a_mine = a_smem.index(stage).slice(WG * 64, 64)
        w_mine = w_smem.index(stage) if WIDTH == BN else w_smem.index(stage).slice(0, WIDTH)
        acc = warpgroup_mma(a_mine, w_mine.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # at most this step is still in flight: the previous one has released its stage
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    return acc, count


@gluon.jit
def _qkv_rows(sumsq, rows, live, stride_sumsq, K, eps, positions, rotary, lane, PARTS: gl.constexpr, D: gl.constexpr):
    """Return (scale `[64]`, cos and sin `[64, W]`) of a tile's rows; `lane`: columns that begin a head."""
    scale = load_row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
    position = gl.load(positions + rows, mask=rows < live, other=0).to(gl.int64)
    return scale, gl.load(rotary + position[:, None] * D + (lane % D)[None, :])


@gluon.jit
def page_rows(slots, slot_rows, live, layer, layers, PAGE: gl.constexpr):
    slot = gl.load(slots + slot_rows, mask=slot_rows < live, other=0).to(gl.int64)
    return (slot // PAGE * layers + layer) * (2 * PAGE) + slot % PAGE


@gluon.jit
def _qkv_piece(
    y, col0, lane, scale, cos_sin, io, slot_rows, out, kv, page_row, live, eps, bias, q_norm, k_norm,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Run the epilogue of columns `col0 + lane`: `y [64, W]` goes to q or the pages."""
    col = col0 + lane
    y = y * scale[:, None]
    if HAS_BIAS:
        y += gl.load(bias + col, mask=col < (HQ + 2 * HKV) * D, other=0.0).to(gl.float32)[None, :]
    if HAS_NORM:
        y = normed_head(y, col0, lane, eps, q_norm, k_norm, HQ, HKV, D)
    y = rotate_half(y, cos_sin, (col >= (HQ + HKV) * D)[None, :])
    store_heads(y.to(DTYPE), io, slot_rows, col0, out, kv, None, page_row, live, 0, HQ, HKV, D, PAGE, False, ROWS)


@gluon.jit
def with_bias(y, bias, col, N, HAS_BIAS: gl.constexpr, L: gl.constexpr):
    """Add the bias, if any, to columns `col ..` of a GEMM in layout `L`."""
    if HAS_BIAS:
        at = col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, L))
        y += gl.load(bias + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
    return y


@gluon.jit
def all_steps(steps, counts, tile_m, MORE: gl.constexpr):
    """Return the steps of a tile, those of further depth included."""
    if MORE > 0:
        steps += gl.load(counts + tile_m)
    return steps


@gluon.jit
def _consume(
    out, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, live, tiles_m, tiles_n, steps, N, K,
    sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, layer, layers, q_norm, k_norm, more, WG: gl.constexpr,
    KIND: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PARTS: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr, DTYPE: gl.constexpr, ACT: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    io = io_smem.index(WG)
    count = 0
    turn = 0
    whole, halves = _divide_wave(tiles_m * tiles_n, KIND)
    # both halves of a tile begin a head: they rotate by the same angles
    lane = gl.arange(0, BN // 2, layout=gl.SliceLayout(0, HALF))
    for tile in range(gl.program_id(0), whole, gl.num_programs(0)):
        tile_m, tile_n = uneven_tile_of(tile, tiles_m, tiles_n, GROUP, MORE)
        row0 = tile_m * 128 + WG * 64
        if (KIND == "gate_up" or KIND == "linear") and PARTS > 0:
            rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
            scale = load_row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
        if KIND == "qkv":
            rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
            scale, cos_sin = _qkv_rows(
                sumsq, rows, live, stride_sumsq, K, eps, positions, rotary, lane, PARTS, D
            )  # fmt: skip
        own = all_steps(steps, more[4], tile_m, MORE)
        acc, count = multiply(a_smem, w_smem, full, empty, count, own, WG, BN, ACC, BN, STAGES)

        if KIND == "plain":
            tma.store_wait(0)
            io.store(acc.to(DTYPE))
            fence_async_shared()
            store_tile(out, [row0, tile_n * BN], io)
        if KIND == "linear":
            if PARTS > 0:
                acc = acc * scale[:, None]
            y = activate(with_bias(acc, bias, tile_n * BN, N, HAS_BIAS, ACC), ACT)
            tma.store_wait(0)
            io.store(y.to(DTYPE))
            fence_async_shared()
            store_tile(out, [row0, tile_n * BN], io)
        if KIND == "residual":
            rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
            acc = with_bias(acc, bias, tile_n * BN, N, HAS_BIAS, ACC)
            mbarrier.wait(x_full.index(WG), turn & 1)
            y = (io.load(ACC).to(gl.float32) + acc).to(DTYPE)
            io.store(y)
            fence_async_shared()
            store_tile(out, [row0, tile_n * BN], io)
            squares = gl.sum(y.to(gl.float32) * y.to(gl.float32), axis=1)
            gl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)
            tma.store_wait(0)
            mbarrier.arrive(x_empty.index(WG), count=1)
        if KIND == "gate_up":
            if PARTS > 0:
                acc = acc * scale[:, None]
            acc = with_bias(acc, bias, tile_n * BN, N, HAS_BIAS, ACC)
            gate, up = gl.split(gl.reshape(acc, (64, BN // 2, 2)))
            h = gate_with(gate, up, ACT)
            tma.store_wait(0)
            io.store(gl.convert_layout(h.to(DTYPE), HALF))
            fence_async_shared()
            store_tile(out, [row0, tile_n * (BN // 2)], io)
        if KIND == "qkv":
            slot_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
            page_row = page_rows(slots, slot_rows, live, layer, layers, PAGE)
            left, right = split_halves(acc)
            for half in gl.static_range(2):
                y = gl.convert_layout(left if half == 0 else right, HALF)
                col0 = tile_n * BN + half * (BN // 2)
                _qkv_piece(y, col0, lane, scale, cos_sin, io, slot_rows, out, kv, page_row, live, eps, bias, q_norm,
                           k_norm, HQ, HKV, D, PAGE, HAS_BIAS, HAS_NORM, DTYPE, ROWS)  # fmt: skip
        turn += 1  # noqa: SIM113
    if KIND == "qkv":  # noqa: SIM102
        if gl.program_id(0) < halves:
            tile_m, tile_n = uneven_tile_of(whole + gl.program_id(0) // 2, tiles_m, tiles_n, GROUP, MORE)
            col0 = tile_n * BN + gl.program_id(0) % 2 * (BN // 2)
            row0 = tile_m * 128 + WG * 64
            rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
            scale, cos_sin = _qkv_rows(
                sumsq, rows, live, stride_sumsq, K, eps, positions, rotary, lane, PARTS, D
            )  # fmt: skip
            own = all_steps(steps, more[4], tile_m, MORE)
            acc, count = multiply(a_smem, w_smem, full, empty, count, own, WG, BN // 2, HALF, BN, STAGES)
            slot_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
            page_row = page_rows(slots, slot_rows, live, layer, layers, PAGE)
            _qkv_piece(acc, col0, lane, scale, cos_sin, io, slot_rows, out, kv, page_row, live, eps, bias, q_norm,
                       k_norm, HQ, HKV, D, PAGE, HAS_BIAS, HAS_NORM, DTYPE, ROWS)  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "layer", "stride_sumsq"])
def product_kernel(
    a, w, w_half, x, out, num_tokens, M, N, K, sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, layer,
    layers, q_norm, k_norm, terms, b, b_half, more_steps, more_counts,
    KIND: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PARTS: gl.constexpr,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_NORM: gl.constexpr, HAS_COUNT: gl.constexpr, DTYPE: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr,
    MORE: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = 256
    BK: gl.constexpr = 64
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    IO: gl.constexpr = BN // 2 if KIND == "gate_up" or KIND == "qkv" else BN
    a_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 128, BK], shared)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BK], shared)
    io_smem = gl.allocate_shared_memory(DTYPE, [2, 64, IO], shared)
    full, empty = ring_barriers(STAGES, 2)
    # Only where they are used. The compiler puts the workers' arguments into dead memory, and former mbarrier memory
    # must not be reused: such arguments turned into barriers again after another process had used the GPU.
    x_full, x_empty = full, empty
    if KIND == "residual":
        x_full, x_empty = ring_barriers(2, 1)
    if MORE == 0:
        follow_previous(PDL)
    elif PDL:
        start_with_previous()  # `shrink_terms`
        let_next_start()
    live = live_tokens(num_tokens, M, HAS_COUNT)
    tiles_m = gl.cdiv(live, 128)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    more = (terms, b, b_half, more_steps, more_counts)
    gl.warp_specialize(
        [
            (_consume, (out, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, live, tiles_m, tiles_n, steps, N, K,
                        sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, layer, layers, q_norm, k_norm,
                        more, 0, KIND, BN, STAGES, GROUP, PARTS, HQ, HKV, D, PAGE, HAS_BIAS, HAS_NORM, DTYPE, ACT,
                        MORE)),
            (_consume, (out, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, live, tiles_m, tiles_n, steps, N, K,
                        sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, layer, layers, q_norm, k_norm,
                        more, 1, KIND, BN, STAGES, GROUP, PARTS, HQ, HKV, D, PAGE, HAS_BIAS, HAS_NORM, DTYPE, ACT,
                        MORE)),
            (_produce, (a, w, w_half, x, more, a_smem, w_smem, io_smem, full, empty, x_full, x_empty, tiles_m, tiles_n,
                        steps, KIND, BN, BK, STAGES, GROUP, MORE, PDL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_FIELDS: dict[str, Any] = dict.fromkeys(
    ("sumsq", "bias", "rotary", "positions", "slots", "kv", "q_norm", "k_norm"), None
) | {"stride_sumsq": 0, "eps": 0.0, "layer": 0, "layers": 0, "PARTS": 1, "HQ": 1, "HKV": 1, "D": 128, "PAGE": 1,
     "ACT": ""}  # fmt: skip


def launch_gemm(
    kind: str, launch: Launch, a: Tensor, weight: Tensor, out: Tensor, num_tokens: Tensor | None,
    x: Tensor | None = None, more: More | None = None, **fields: Any,
) -> None:  # fmt: skip
    """Run `product_kernel` for a `kind`; `fields` are the epilogue's inputs."""

    def tiles(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols], SHARED)

    width = BLOCK_FEATURES // 2 if kind == "gate_up" else BLOCK_FEATURES
    terms: tuple[Any, ...] = (None,) * 5
    if more is not None:
        halved = tiles(more.b, BLOCK_FEATURES // 2, BLOCK_DEPTH) if kind == "qkv" else None
        terms = (
            tiles(more.terms, BLOCK_TOKENS, BLOCK_DEPTH), tiles(more.b, BLOCK_FEATURES, BLOCK_DEPTH), halved,
            *more.steps[BLOCK_TOKENS],
        )  # fmt: skip
    stages = 3 if kind in ("plain", "linear", "residual") else 4  # next to a tile of the epilogue
    product_kernel[launch.grid](
        tiles(a, BLOCK_TOKENS, BLOCK_DEPTH), tiles(weight, BLOCK_FEATURES, BLOCK_DEPTH),
        tiles(weight, BLOCK_FEATURES // 2, BLOCK_DEPTH) if kind == "qkv" else None,
        None if x is None else tiles(x, 64, BLOCK_FEATURES), out if kind == "qkv" else tiles(out, 64, width),
        num_tokens, a.shape[0], weight.shape[0], a.shape[1], **(_FIELDS | fields),
        **dict(zip(("terms", "b", "b_half", "more_steps", "more_counts"), terms, strict=True)),
        MORE=0 if more is None else more.steps[BLOCK_TOKENS].blocks.shape[1],
        KIND=kind, STAGES=stages, GROUP=launch.config.group, HAS_BIAS=fields.get("bias") is not None,
        HAS_NORM=fields.get("q_norm") is not None, HAS_COUNT=num_tokens is not None,
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[a.dtype], num_warps=4,
        PDL=launch.options["PDL"], **({"launch_pdl": True} if launch.options["PDL"] else {}),
    )  # fmt: skip
