"""GEMMs of a layer for 33 to 2,048 tokens on Hopper: tile widths that fill waves, and splits of K.

The structure is that of `gemm_hopper`: two warpgroups own 64 rows each of a tile of 128 tokens, and one producer warp
streams the operands. Work is distributed differently, because 128 x 256 tiles leave SMs half idle for so few tokens:

- A tile is 64 to 256 features wide, in steps of 32: two or three neighboring MMAs of 128, 64 and 32 columns. Its sums
  equal those of any other width bit for bit.
- Or `SPLIT` programs share a tile's K. Each writes partial sums to a workspace, then adds its share of the rows, in
  order of the splits, so no bit depends on timing. See `_shares`.

With `BOX` below 128 only live rows of a tile are loaded, rounded up to boxes of that size: a tile's tokens are read
from L2 once per weight tile, about as many bytes as the weights. A warpgroup without live rows multiplies nothing.

A tile of 192 tokens has three warpgroups; the third one's tokens have a separate ring.

`mid_projections` launches these.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import (
    await_previous,
    barrier,
    let_next_start,
    live_tokens,
    load_tile,
    ring_barriers,
    skip_stages,
    start_with_previous,
)
from weft.kernels.matmul.adapter_depth import More
from weft.kernels.matmul.gemm_launch import Workspace
from weft.kernels.matmul.mid_config import BLOCK_DEPTH, BLOCK_TOKENS, MAX_POLLS, MidConfig
from weft.kernels.matmul.mid_epilogues import add_splits, epilogue, row_scale

# The barriers of operands and residual are those of `gemm_hopper` (see the table there). A program's unit is a split of
# a tile; `count` numbers the steps of all its units, on both sides.


@gluon.jit
def _unit(unit, tiles_m, steps, SPLIT: gl.constexpr):
    """Return (token tile, feature tile, split, first step, end step); tiles of a weight tile are neighbors."""
    tile = unit // SPLIT
    part = unit % SPLIT
    return tile % tiles_m, tile // tiles_m, part, part * steps // SPLIT, (part + 1) * steps // SPLIT


@gluon.jit
def _load_tokens(
    a, few, a_smem, third_smem, row, depth, rows, ready, OTHERS: gl.constexpr, BK: gl.constexpr, BOX: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Load the first `rows` of a tile, rounded up to boxes; `ready` expects them and `OTHERS` bytes. Other rows keep
    old content, and sums computed from them are not read."""
    if BOX == 128:
        mbarrier.expect(ready, OTHERS + ROWS * BK * 2)
        load_tile(a, [row, depth], ready, a_smem)
        if ROWS > 128:
            load_tile(few, [row + 128, depth], ready, third_smem)
    else:
        boxes = gl.cdiv(rows, BOX)
        whole = boxes >= 128 // BOX
        mbarrier.expect(ready, OTHERS + 128 * BK * 2, pred=whole)
        for n in gl.static_range(1, 128 // BOX):
            mbarrier.expect(ready, OTHERS + n * BOX * BK * 2, pred=boxes == n)
        if whole:
            load_tile(a, [row, depth], ready, a_smem)
        else:
            for box in gl.static_range(128 // BOX - 1):
                if box < boxes:
                    load_tile(few, [row + box * BOX, depth], ready, a_smem.slice(box * BOX, BOX))


@gluon.jit
def _produce(
    rings, third_smem, source, more, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, FETCH_X: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr,
    MORE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    a_smem, w0_smem, w1_smem, w2_smem, io0, io1, io2, full, empty, x_full, x_empty = rings
    a, few, w0, w1, w2, x0, x1, x2, live, tiles_m, tiles_n, steps = source
    terms, few_terms, b0, b1, b2, more_steps, more_counts = more
    WIDTH: gl.constexpr = W0 + W1 + W2
    count = 0
    turn = 0
    for unit in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tile_m, tile_n, part, first, last = _unit(unit, tiles_m, steps, SPLIT)
        row = tile_m * ROWS
        col = tile_n * WIDTH
        for step in range(first, last):
            stage = count % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            third = third_smem.index(stage if ROWS > 128 else 0)
            _load_tokens(a, few, a_smem.index(stage), third, row, step * BK, live - row, ready, WIDTH * BK * 2, BK, BOX,
                         ROWS)  # fmt: skip
            load_tile(w0, [col, step * BK], ready, w0_smem.index(stage))
            if W1 > 0:
                load_tile(w1, [col + W0, step * BK], ready, w1_smem.index(stage))
            if W2 > 0:
                load_tile(w2, [col + W0 + W1, step * BK], ready, w2_smem.index(stage))
            count += 1
            if FETCH_X:  # noqa: SIM102 (the outer one is settled when compiled)
                if step == gl.minimum(STAGES, steps - 1):
                    for half in gl.static_range(ROWS // 64):
                        mbarrier.wait(x_empty.index(half), (turn & 1) ^ 1)
                        mbarrier.expect(x_full.index(half), 64 * WIDTH * 2)
                        load_tile(x0, [row + half * 64, col], x_full.index(half), io0.index(half))
                        if W1 > 0:
                            load_tile(x1, [row + half * 64, col + W0], x_full.index(half), io1.index(half))
                        if W2 > 0:
                            load_tile(x2, [row + half * 64, col + W0 + W1], x_full.index(half), io2.index(half))
        if MORE > 0:
            if PDL:
                await_previous()
            for i in range(part, gl.load(more_counts + tile_m), SPLIT):
                step = gl.load(more_steps + tile_m * MORE + i)
                stage = count % STAGES
                ready = full.index(stage)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                third = third_smem.index(stage if ROWS > 128 else 0)
                _load_tokens(terms, few_terms, a_smem.index(stage), third, row, step * BK, live - row, ready,
                             WIDTH * BK * 2, BK, BOX, ROWS)  # fmt: skip
                load_tile(b0, [col, step * BK], ready, w0_smem.index(stage))
                if W1 > 0:
                    load_tile(b1, [col + W0, step * BK], ready, w1_smem.index(stage))
                if W2 > 0:
                    load_tile(b2, [col + W0 + W1, step * BK], ready, w2_smem.index(stage))
                count += 1
        turn += 1  # noqa: SIM113
    if MORE > 0 and PDL:
        await_previous()  # a program without a tile may not end before the previous kernel either


@gluon.jit
def _multiply(
    a_smem, w0_smem, w1_smem, w2_smem, full, empty, count, steps, WG: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr,
    W2: gl.constexpr, STAGES: gl.constexpr, L0: gl.constexpr, L1: gl.constexpr, L2: gl.constexpr,
):  # fmt: skip
    """Return `[64, W0]`, `[64, W1]`, `[64, W2]` of one unit (the first again for width 0), and stages used so far."""
    acc0 = gl.zeros([64, W0], gl.float32, layout=L0)
    if W1 > 0:
        acc1 = gl.zeros([64, W1], gl.float32, layout=L1)
    if W2 > 0:
        acc2 = gl.zeros([64, W2], gl.float32, layout=L2)
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        a_mine = a_smem.index(stage).slice(WG % 2 * 64, 64)
        acc0 = warpgroup_mma(a_mine, w0_smem.index(stage).permute((1, 0)), acc0, is_async=True)
        if W1 > 0:
            acc1 = warpgroup_mma(a_mine, w1_smem.index(stage).permute((1, 0)), acc1, is_async=True)
        if W2 > 0:
            acc2 = warpgroup_mma(a_mine, w2_smem.index(stage).permute((1, 0)), acc2, is_async=True)
        # at most this step's MMAs are still in flight: the previous step has released its stage
        if W2 > 0:
            acc0, acc1, acc2 = warpgroup_mma_wait(3, deps=[acc0, acc1, acc2])
        elif W1 > 0:
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(1, deps=[acc0])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    if W2 > 0:
        acc0, acc1, acc2 = warpgroup_mma_wait(0, deps=[acc0, acc1, acc2])
    elif W1 > 0:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        acc2 = acc0
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
        acc1 = acc0
        acc2 = acc0
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    return acc0, acc1, acc2, count


# A tile's splits synchronize in one word for each half of its rows (reference: `tests/kernels/split_meeting.py`):
#
#   bits 0-7    splits that have stored their sums in the workspace
#   bits 8-15   splits that gave up waiting: the last split adds their rows
#   bits 16-23  splits that have ended; the last of them sets the word to 0 for the next launch
#
# A split counts itself, then polls for the others, at most `limit` times. Either it sees them all and adds its own
# share of the rows, or it gives up in the same word that counts them: then either its atomic addition has seen the last
# split arrive after all, or the last split's addition has seen it give up. So exactly one program adds each share, no
# program waits for one that may never start, and a limit of 0 leaves everything to the last split.


@gluon.jit
def _shares(word, part, limit, SPLIT: gl.constexpr):
    """Return the shares that this split adds, one bit each. All their sums are visible."""
    barrier()  # all threads store their sums before the addition below
    before = gl.atomic_add(word, 1, sem="acq_rel")
    arrived = (before & 255) + 1
    is_last = arrived == SPLIT
    tries = 0
    while (arrived < SPLIT) & (tries < limit):
        arrived = gl.atomic_add(word, 0, sem="acquire") & 255
        tries += 1
    if arrived < SPLIT:
        arrived = gl.atomic_add(word, 256 << part, sem="acq_rel") & 255
    own = gl.where(arrived == SPLIT, 1 << part, 0)
    return own | gl.where(is_last, (before >> 8) & 255, 0)


@gluon.jit
def _release_word(word, SPLIT: gl.constexpr):
    barrier()  # all threads have read the sums they add
    if (gl.atomic_add(word, 65536, sem="acq_rel") >> 16) == SPLIT - 1:
        gl.atomic_xchg(word, 0, sem="relaxed")


@gluon.jit
def _tile(
    rings, places, sums, heads, limit, live, tile_m, tile_n, part, first, last, tiles_m, N, K, count, turn,
    WG: gl.constexpr, KIND: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, PARTS: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Compute a warpgroup's rows of one unit and run the epilogue; returns the stages used so far."""
    a_smem, w0_smem, w1_smem, w2_smem, io0, io1, io2, full, empty, x_full, x_empty = rings
    desc0, desc1, desc2, x, out, partial, words = places
    sumsq, stride_sumsq, eps = sums
    rotary, positions, slots, kv, layer, layers = heads
    L0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W0, 16])
    L1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W1 if W1 > 0 else W0, 16])
    L2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W2 if W2 > 0 else W0, 16])
    WIDTH: gl.constexpr = W0 + W1 + W2
    row0 = tile_m * ROWS + WG * 64
    col = tile_n * WIDTH
    scale = 1.0
    if SPLIT == 1 and (KIND == "gate_up" or KIND == "qkv"):
        scale = row_scale(sumsq, row0, live, stride_sumsq, K, eps, 64, PARTS)
    acc0, acc1, acc2, count = _multiply(
        a_smem, w0_smem, w1_smem, w2_smem, full, empty, count, last - first, WG, W0, W1, W2, STAGES, L0, L1, L2
    )  # fmt: skip
    if SPLIT > 1:
        half = tile_m * (ROWS // 64) + WG
        place = (tile_n * tiles_m * (ROWS // 64) + half).to(gl.int64)
        mine = partial + place * (SPLIT * 64 * WIDTH)
        inside = gl.arange(0, 64, layout=gl.SliceLayout(1, L0))
        lane = gl.arange(0, W0, layout=gl.SliceLayout(0, L0))
        gl.store(mine + part * (64 * WIDTH) + inside[:, None] * WIDTH + lane[None, :], acc0)
        shares = _shares(words + place, part, limit, SPLIT)
        add_splits(mine, shares, row0, tile_n, live, N, K, x, out, sumsq, stride_sumsq, eps, positions, rotary, slots,
                kv, layer, layers, KIND, WIDTH, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE)  # fmt: skip
        _release_word(words + place, SPLIT)
    else:
        if KIND == "residual":
            mbarrier.wait(x_full.index(WG), turn & 1)
        squares = epilogue(acc0, scale, io0.index(WG), desc0, out, kv, row0, col, live, positions, rotary, slots,
                         layer, layers, KIND, W0, HQ, HKV, D, PAGE, DTYPE, L0, True)  # fmt: skip
        if W1 > 0:
            more = epilogue(acc1, scale, io1.index(WG), desc1, out, kv, row0, col + W0, live, positions, rotary,
                          slots, layer, layers, KIND, W1, HQ, HKV, D, PAGE, DTYPE, L1, False)  # fmt: skip
            squares += gl.convert_layout(more, gl.SliceLayout(1, L0))
        if W2 > 0:
            more = epilogue(acc2, scale, io2.index(WG), desc2, out, kv, row0, col + W0 + W1, live, positions, rotary,
                          slots, layer, layers, KIND, W2, HQ, HKV, D, PAGE, DTYPE, L2, False)  # fmt: skip
            squares += gl.convert_layout(more, gl.SliceLayout(1, L0))
        if KIND == "residual":
            rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, L0))
            gl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)
            tma.store_wait(0)
            mbarrier.arrive(x_empty.index(WG), count=1)
    return count


@gluon.jit
def _consume(
    rings, work, WG: gl.constexpr, KIND: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr,
    D: gl.constexpr, PAGE: gl.constexpr, DTYPE: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr,
    MORE: gl.constexpr,
):  # fmt: skip
    places, sums, heads, limit, live, tiles_m, tiles_n, steps, N, K, more_counts = work
    full, empty, x_full, x_empty = rings[7], rings[8], rings[9], rings[10]
    count = 0
    turn = 0
    for unit in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tile_m, tile_n, part, first, last = _unit(unit, tiles_m, steps, SPLIT)
        if MORE > 0:
            last += gl.maximum(gl.load(more_counts + tile_m) - part + SPLIT - 1, 0) // SPLIT
        if BOX == 128:  # noqa: SIM114 (this one is settled when compiled)
            count = _tile(
                rings, places, sums, heads, limit, live, tile_m, tile_n, part, first, last, tiles_m, N, K, count, turn,
                WG, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, ROWS,
            )  # fmt: skip
        elif tile_m * ROWS + WG * 64 < live:
            count = _tile(
                rings, places, sums, heads, limit, live, tile_m, tile_n, part, first, last, tiles_m, N, K, count, turn,
                WG, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, ROWS,
            )  # fmt: skip
        else:
            count = skip_stages(full, empty, count, last - first, STAGES)
            if KIND == "residual" and SPLIT == 1:
                mbarrier.wait(x_full.index(WG), turn & 1)
                mbarrier.arrive(x_empty.index(WG), count=1)
        turn += 1  # noqa: SIM113
    tma.store_wait(0)


@gluon.jit
def _fetch_ahead(weights, tile_n, first, N, K, WIDTH: gl.constexpr, BK: gl.constexpr, AHEAD: gl.constexpr):
    """Prefetch the first steps of this program's weight into L2: they do not depend on the previous kernel."""
    ROWS: gl.constexpr = 256 if WIDTH > 128 else 128
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, ROWS, layout=L)
    row = gl.minimum(tile_n * WIDTH + gl.minimum(row, WIDTH - 1), N - 1).to(gl.int64)
    for step in gl.static_range(AHEAD):
        at = weights + row * K + gl.minimum((first + step) * BK, K - 8)
        gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip


@gluon.jit(do_not_specialize=["M", "layer", "stride_sumsq", "limit"])
def mid_kernel(
    a, few, w0, w1, w2, x0, x1, x2, desc0, desc1, desc2, weights, x, out, partial, words, limit, num_tokens, M, N, K,
    sumsq, stride_sumsq, eps, rotary, positions, slots, kv, layer, layers,
    terms, few_terms, b0, b1, b2, more_steps, more_counts,
    KIND: gl.constexpr, W0: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, AHEAD: gl.constexpr, PARTS: gl.constexpr, HQ: gl.constexpr,
    HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_COUNT: gl.constexpr, DTYPE: gl.constexpr,
    PDL: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    WGS: gl.constexpr = ROWS // 64
    BK: gl.constexpr = 64
    WIDTH: gl.constexpr = W0 + W1 + W2
    PER: gl.constexpr = 2 if KIND == "gate_up" else 1
    # unused buffers are one small tile
    I0: gl.constexpr = W0 // PER if SPLIT == 1 else 16
    I1: gl.constexpr = W1 // PER if W1 > 0 and SPLIT == 1 else 16
    I2: gl.constexpr = W2 // PER if W2 > 0 and SPLIT == 1 else 16
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 128, BK], shared)
    third_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 64, BK] if ROWS > 128 else [1, 8, BK], shared)
    w0_smem = gl.allocate_shared_memory(DTYPE, [STAGES, W0, BK], shared)
    w1_smem = gl.allocate_shared_memory(DTYPE, [STAGES, W1, BK] if W1 > 0 else [1, 8, BK], shared)
    w2_smem = gl.allocate_shared_memory(DTYPE, [STAGES, W2, BK] if W2 > 0 else [1, 8, BK], shared)
    S0: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * I0), element_bitwidth=16, rank=2)
    S1: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * I1), element_bitwidth=16, rank=2)
    S2: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * I2), element_bitwidth=16, rank=2)
    io0 = gl.allocate_shared_memory(DTYPE, [WGS, 64, I0] if SPLIT == 1 else [2, 8, I0], S0)
    io1 = gl.allocate_shared_memory(DTYPE, [WGS, 64, I1] if W1 > 0 and SPLIT == 1 else [2, 8, I1], S1)
    io2 = gl.allocate_shared_memory(DTYPE, [WGS, 64, I2] if W2 > 0 and SPLIT == 1 else [2, 8, I2], S2)
    full, empty = ring_barriers(STAGES, WGS)
    # only where they are used: see `gemm_hopper`
    x_full, x_empty = full, empty
    if KIND == "residual" and SPLIT == 1:
        x_full, x_empty = ring_barriers(WGS, 1)
    tiles_n = gl.cdiv(N, WIDTH)
    steps = gl.cdiv(K, BK)
    if PDL:
        if AHEAD > 0:
            _, ahead_n, _, ahead_first, _ = _unit(gl.program_id(0), gl.cdiv(M, ROWS), steps, SPLIT)
            _fetch_ahead(weights, ahead_n, ahead_first, N, K, WIDTH, BK, AHEAD)
        if MORE == 0:
            await_previous()
        else:
            start_with_previous()  # `shrink_terms`
        let_next_start()
    live = live_tokens(num_tokens, M, HAS_COUNT)
    tiles_m = gl.cdiv(live, ROWS)
    rings = (a_smem, w0_smem, w1_smem, w2_smem, io0, io1, io2, full, empty, x_full, x_empty)
    places = (desc0, desc1, desc2, x, out, partial, words)
    sums = (sumsq, stride_sumsq, eps)
    heads = (rotary, positions, slots, kv, layer, layers)
    work = (places, sums, heads, limit, live, tiles_m, tiles_n, steps, N, K, more_counts)
    more = (terms, few_terms, b0, b1, b2, more_steps, more_counts)
    source = (a, few, w0, w1, w2, x0, x1, x2, live, tiles_m, tiles_n, steps)
    FETCH_X: gl.constexpr = KIND == "residual" and SPLIT == 1
    if ROWS == 128:
        gl.warp_specialize(
            [
                (_consume, (rings, work, 0, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, BOX,
                            ROWS, MORE)),
                (_consume, (rings, work, 1, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, BOX,
                            ROWS, MORE)),
                (_produce, (rings, third_smem, source, more, W0, W1, W2, BK, STAGES, SPLIT, FETCH_X, BOX, ROWS,
                            MORE, PDL)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        thirds = (third_smem, w0_smem, w1_smem, w2_smem, io0, io1, io2, full, empty, x_full, x_empty)
        gl.warp_specialize(
            [
                (_consume, (rings, work, 0, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, BOX,
                            ROWS, MORE)),
                (_consume, (rings, work, 1, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, BOX,
                            ROWS, MORE)),
                (_consume, (thirds, work, 2, KIND, W0, W1, W2, STAGES, SPLIT, PARTS, HQ, HKV, D, PAGE, DTYPE, BOX,
                            ROWS, MORE)),
                (_produce, (rings, third_smem, source, more, W0, W1, W2, BK, STAGES, SPLIT, FETCH_X, BOX, ROWS,
                            MORE, PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


def _layout(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)


_MORE = ("terms", "few_terms", "b0", "b1", "b2", "more_steps", "more_counts")
_FIELDS: dict[str, Any] = dict.fromkeys(("sumsq", "rotary", "positions", "slots", "kv"), None) | {
    "stride_sumsq": 0, "eps": 0.0, "layer": 0, "layers": 0, "PARTS": 1, "HQ": 1, "HKV": 1, "D": 128, "PAGE": 1
}  # fmt: skip


def launch_gemm(
    kind: str, config: MidConfig, a: Tensor, weight: Tensor, out: Tensor, num_tokens: Tensor | None,
    space: Workspace | None, x: Tensor | None = None, more: More | None = None, *, num_sms: int,
    max_polls: int | None = None, **fields: Any,
) -> None:  # fmt: skip
    """Run `mid_kernel` for a `kind`: "plain", "residual", "gate_up" or "qkv"; `fields` are the epilogue's inputs.

    max_polls: how often a split polls for the others before it leaves its rows to the last one. Raises `ValueError` for
    splits without a workspace."""
    m, (n, k) = a.shape[0], weight.shape
    split = config.splits_of(k)
    widths, whole, narrow = config.pieces, split == 1, 2 if kind == "gate_up" else 1
    if not whole and space is None:
        raise ValueError("a split GEMM needs a workspace")

    def tiles(tensor: Tensor | None, rows: int, cols: int) -> TensorDescriptor | None:
        return None if tensor is None or not cols else TensorDescriptor.from_tensor(tensor, [rows, cols], _layout(cols))

    box = config.box if config.rows == BLOCK_TOKENS else 64
    terms: tuple[Any, ...] = (None,) * 7
    if more is not None:
        terms = (
            tiles(more.terms, BLOCK_TOKENS, BLOCK_DEPTH), tiles(more.terms, box, BLOCK_DEPTH),
            *(tiles(more.b if w else None, w, BLOCK_DEPTH) for w in widths), *more.steps[config.rows],
        )  # fmt: skip
    stored = None if kind == "qkv" or not whole else out
    mid_kernel[(min(num_sms, config.units(m, n, k)),)](
        tiles(a, BLOCK_TOKENS, BLOCK_DEPTH), tiles(a, box, BLOCK_DEPTH),
        *(tiles(weight if w else None, w, BLOCK_DEPTH) for w in widths),
        *(tiles(x if whole else None, 64, w) for w in widths), *(tiles(stored, 64, w // narrow) for w in widths),
        weight, None if whole else x, None if stored is not None else out,
        *((None, None) if whole or space is None else space), MAX_POLLS if max_polls is None else max_polls,
        num_tokens, m, n, k, **(_FIELDS | fields),
        **dict(zip(_MORE, terms, strict=True)), MORE=0 if more is None else more.steps[config.rows].blocks.shape[1],
        KIND=kind,
        W0=widths[0], W1=widths[1], W2=widths[2], STAGES=config.stages_for(kind, whole=whole), SPLIT=split,
        AHEAD=config.ahead, BOX=config.box, ROWS=config.rows, HAS_COUNT=num_tokens is not None,
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[a.dtype], num_warps=4, **pdl_options(),
    )  # fmt: skip
