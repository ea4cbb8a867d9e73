"""Paged causal attention of prefill chunks on Hopper, warp-specialized after FlashAttention-3.

The reference is `reference/layer.py: paged_attention`. One producer warp streams K and V pages by TMA; two warpgroups
own 64 rows each of a 128-row tile. A row is a (token, query head of the group) pair, so the heads of a group share
every K and V load. While a warpgroup computes the softmax of block j + 1, its tensor cores work on O += P(j) V(j).

A box that extends past a chunk's last token is fetched *shifted*: it starts that many rows early, and TMA fills rows
before the page with zeros. So nothing after the last token, NaN included, is ever loaded.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from weft.kernels.common.hopper import barrier, follow_previous, load_tile
from weft.kernels.formats.fp8_gluon import quantized


@gluon.jit
def _load_block(
    kv, smem, bar, table, slab, slabs, first, end, column,
    PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Load K or V of tokens `first .. first + BN` into `smem [BN, DP]`; boxes past `end` arrive shifted or as zeros."""
    mbarrier.expect(bar, BN * DP * 2)
    for box in gl.static_range(BN // BOX):
        token = first + box * BOX
        page = gl.load(table + gl.minimum(token, end - 1) // PAGE)
        shift = gl.minimum(gl.maximum(token + BOX - end, 0), BOX)
        row = gl.where(shift == BOX, PAGE, token % PAGE - shift)
        target = smem.reshape([1, BN, DP]).slice(box * BOX, BOX, dim=1)
        load_tile(kv, [page * slabs + slab, row, column], bar, target)


# The barriers. A program is two warpgroups (`_consume`, WG 0 and 1) and one warp (`_produce`). `count` numbers the
# blocks of keys of all tasks of a program, on both sides: stage = count % STAGES, parity = (count // STAGES) & 1. K and
# V of a block have a ring each, with the same stage and parity; V is needed one block later than K.
#
#   barrier            arrivals in a phase                               waited for by
#   k_full[stage]      1: the producer's `expect`, all boxes of K        each WG, with parity
#   k_empty[stage]     2: each WG, when S = Q K is done                  the producer, with parity ^ 1
#   v_full[stage]      1: the producer's `expect`, all boxes of V        each WG, with parity
#   v_empty[stage]     2: each WG, when O += P V is done                 the producer, with parity ^ 1
#
# `expect` is an arrival; the phase ends when the announced bytes have landed too. A wait names the parity of the phase
# whose end it waits for; on a fresh barrier parity 1 passes at once. Q needs no barrier: each WG loads its own rows,
# and its last MMA that reads them is done before its next task begins.
#
# STAGES = 2, a task of 4 blocks, one of the two WGs:
#
#   producer        K0 V0 K1 V1   .   K2   .   V2 K3   .   V3 K4 ...   (K2 waits for S0, V2 for O0, K3 for S1 ...)
#   tensor cores    S0       S1 O0....   S2 O1....   S3 O2....   O3    (both are issued before P is computed)
#   other units        P0         P1           P2           P3    out  (while O of the previous block is computed)
#   k_empty            0        1           0           1              stage released: S is done
#   v_empty                          0            1           0    1   O is done


@gluon.jit
def _produce(
    kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, stride_table, items, tasks, layer, layers, until,
    HKV: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr, DP: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        count = load_task(kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, stride_table, items, task, layer,
                     layers, count, until, HKV, PAGE, BN, BOX, D, DP, STAGES, WINDOW, FIELDS)  # fmt: skip


@gluon.jit
def load_task(
    kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, stride_table, items, task, layer, layers, count,
    until, HKV: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    DP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Load a task's blocks of K and V into the rings (producer), starting with block number `count`."""
    head = task % HKV
    item = items + (task // HKV) * FIELDS
    end = gl.load(item + 2) + gl.load(item + 1)
    if until is not None:  # its entries ascend within a chunk
        end = gl.load(until + gl.load(item) + gl.load(item + 1) - 1) + 1
    pages = table + gl.load(item + 3).to(gl.int64) * stride_table
    begin, last = _keys(item, gl.load(item + 2), end, BOX, WINDOW, FIELDS)
    for first in range(begin, last, BN):
        stage = count % STAGES
        phase = (count // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        _load_block(kv, k_smem.index(stage), k_full.index(stage), pages, layer * 2, layers * 2, first, end,
                    head * D, PAGE, BN, BOX, DP)  # fmt: skip
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        _load_block(kv, v_smem.index(stage), v_full.index(stage), pages, layer * 2 + 1, layers * 2, first, end,
                    head * D, PAGE, BN, BOX, DP)  # fmt: skip
        count += 1
    return count


@gluon.jit
def _begin(start, BOX: gl.constexpr, WINDOW: gl.constexpr):
    """Return the first token of the first block for queries from `start` on: in the page of the first visible token."""
    first = 0
    if WINDOW > 0:
        first = gl.maximum(start + 1 - WINDOW, 0) // BOX * BOX
    return first


@gluon.jit
def _keys(item, start, end, BOX: gl.constexpr, WINDOW: gl.constexpr, FIELDS: gl.constexpr):
    """Return the first token of an item's first block and the end of its keys: all of a tile or one split."""
    first = _begin(start, BOX, WINDOW)
    if FIELDS == 8:
        first = gl.load(item + 4)
        end = gl.load(item + 5)
    return first, end


@gluon.jit
def _store_split(at, acc, m, norm, DP: gl.constexpr, S: gl.constexpr, ACC: gl.constexpr):
    """Store a split's sums `[64, DP]`, row maxima and row sums for `_add_splits`."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, ACC))
    gl.store(at + row[:, None] * DP + d[None, :], acc)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    gl.store(at + 64 * DP + row, m)
    gl.store(at + 64 * (DP + 1) + row, norm)


@gluon.jit
def _add_splits(base, parts, STRIDE: gl.constexpr, DP: gl.constexpr, ACC: gl.constexpr):
    """Add sums, row sums and row maxima of all splits of a tile's 64 rows, in the order of the keys."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, ACC))
    m = gl.full([64], -1e30, gl.float32, layout=gl.SliceLayout(1, ACC))
    norm = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, ACC))
    acc = gl.zeros([64, DP], gl.float32, layout=ACC)
    for part in range(parts):
        at = base + gl.cast(part, gl.int64) * STRIDE
        m_part = gl.load(at + 64 * DP + row, cache_modifier=".cg")
        norm_part = gl.load(at + 64 * (DP + 1) + row, cache_modifier=".cg")
        acc_part = gl.load(at + row[:, None] * DP + d[None, :], cache_modifier=".cg")
        m_new = gl.maximum(m, m_part)
        alpha = gl.exp2(m - m_new)
        beta = gl.exp2(m_part - m_new)
        norm = norm * alpha + norm_part * beta
        acc = acc * alpha[:, None] + acc_part * beta[:, None]
        m = m_new
    return acc, norm, m


@gluon.jit
def _write(
    out, acc, norm, q_row, queries, head, WG: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    DP: gl.constexpr, DTYPE: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    acc = acc / gl.convert_layout(norm, gl.SliceLayout(1, ACC))[:, None]
    row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    at = ((q_row + row // G).to(gl.int64) * (HKV * G) + head * G + row % G) * D
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, ACC))
    mask = (row // G < queries)[:, None]
    if DP != D:
        mask = mask & (d < D)[None, :]
    out, out_scale, stride_scale = out
    if out_scale is None:
        gl.store(out + at[:, None] + d[None, :], acc.to(DTYPE), mask=mask)
    else:
        eight, factors = quantized(acc.to(DTYPE), 1)
        gl.store(out + at[:, None] + d[None, :], eight, mask=mask)
        place = (head * G + row % G) * stride_scale + q_row + row // G
        gl.store(out_scale + place, factors, mask=row // G < queries)


@gluon.jit
def _mask(s, first, end, position, limit, BN: gl.constexpr, BOX: gl.constexpr, S: gl.constexpr, WINDOW: gl.constexpr):
    """Set keys outside a row's limits, and padding, to -inf; undoes the shift of a partial box."""
    slot = gl.arange(0, BN, layout=gl.SliceLayout(0, S))
    shift = gl.minimum(gl.maximum(first + (slot // BOX + 1) * BOX - end, 0), BOX)
    key = gl.where(slot % BOX >= shift, first + slot - shift, 2147483647)
    s = gl.where(key[None, :] <= limit[:, None], s, float("-inf"))
    if WINDOW > 0:
        s = gl.where(key[None, :] > position[:, None] - WINDOW, s, float("-inf"))
    return s


@gluon.jit
def _soft_cap(s, scale, SOFTCAP: gl.constexpr):
    """Like `scores.soft_cap`, for scores not yet multiplied by `scale`, before and after."""
    if SOFTCAP > 0:
        CAP: gl.constexpr = SOFTCAP * 1.4426950408889634
        s = (CAP - 2 * CAP / (1.0 + gl.exp2(s * (scale * (2.0 / SOFTCAP))))) / scale
    return s


@gluon.jit
def _softmax(s, m, norm, scale):
    """Return probabilities of one block of scores, new row maxima and sums, and the factor for earlier sums."""
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, m_new, norm * alpha + gl.sum(p, axis=1), alpha


@gluon.jit
def _consume(
    q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items, tasks, scale, sinks, partial, arrived,
    until, WG: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    DP: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        count = attend(q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items, task, scale, sinks,
                       partial, arrived, count, until, WG, HKV, G, BN, BOX, D, DP, STAGES, DTYPE, WINDOW, SOFTCAP,
                       FIELDS)  # fmt: skip


@gluon.jit
def attend(
    q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items, task, scale, sinks, partial, arrived,
    count, until, WG: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of a task's tile (one warpgroup)."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DP, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    Q: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    q_mine = q_smem.index(WG)
    head = task % HKV
    item = items + (task // HKV) * FIELDS
    q_row = gl.load(item)
    queries = gl.load(item + 1)
    start = gl.load(item + 2)
    end = start + queries
    if until is not None:
        end = gl.load(until + q_row + queries - 1) + 1

    row = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, Q))
    at = ((q_row + row // G).to(gl.int64) * (HKV * G) + head * G + row % G) * D
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, Q))
    mask = (row // G < queries)[:, None]
    if DP != D:
        mask = mask & (d < D)[None, :]
    tile = gl.load(q + at[:, None] + d[None, :], mask=mask, other=0.0)
    q_mine.store(tile)
    fence_async_shared()

    rows = WG * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    position = start + rows // G
    limit = position
    if until is not None:
        limit = gl.load(until + q_row + gl.minimum(rows // G, queries - 1))
    m = gl.full([64], -1e30, gl.float32, layout=gl.SliceLayout(1, S))
    norm = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, S))
    acc = gl.zeros([64, DP], gl.float32, layout=ACC)

    stage = count % STAGES
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
    s = warpgroup_mma(q_mine, k_smem.index(stage).permute((1, 0)), gl.zeros([64, BN], gl.float32, layout=S),
                      use_acc=False, is_async=True)  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    begin, last = _keys(item, start, end, BOX, WINDOW, FIELDS)
    s = _soft_cap(s, scale, SOFTCAP)
    if FIELDS == 8:
        if begin + BN > start + 1:
            s = _mask(s, begin, end, position, limit, BN, BOX, S, WINDOW)
    elif (WINDOW > 0) | (start + 1 < BN):
        s = _mask(s, begin, end, position, limit, BN, BOX, S, WINDOW)
    p, m, norm, alpha = _softmax(s, m, norm, scale)
    probs = gl.convert_layout(p.to(DTYPE), P)
    for first in range(begin + BN, last, BN):
        before = count % STAGES
        before_phase = (count // STAGES) & 1
        count += 1
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        s_token = warpgroup_mma(q_mine, k_smem.index(stage).permute((1, 0)),
                                gl.zeros([64, BN], gl.float32, layout=S), use_acc=False, is_async=True)  # fmt: skip
        mbarrier.wait(v_full.index(before), before_phase)
        o_token = warpgroup_mma(probs, v_smem.index(before), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_token])
        mbarrier.arrive(k_empty.index(stage), count=1)
        s = _soft_cap(s, scale, SOFTCAP)
        if (first + BN > start + 1) | (WINDOW > 0):
            s = _mask(s, first, end, position, limit, BN, BOX, S, WINDOW)
        p, m, norm, alpha = _softmax(s, m, norm, scale)
        acc = warpgroup_mma_wait(0, deps=[o_token])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        probs = gl.convert_layout(p.to(DTYPE), P)
    stage = count % STAGES
    mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
    acc = warpgroup_mma(probs, v_smem.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    count += 1

    whole = True  # whether these rows are complete here
    if FIELDS == 8:
        parts = gl.load(item + 7) & 65535
        if parts > 1:
            SIZE: gl.constexpr = 64 * (DP + 2)
            place = (gl.load(item + 6) * HKV + head) * 2 + WG
            base = partial + place.to(gl.int64) * SIZE
            mine = base + (gl.load(item + 7) >> 16).to(gl.int64) * (HKV * 2 * SIZE)
            _store_split(mine, acc, m, norm, DP, S, ACC)
            barrier()  # all threads store before the release below
            whole = gl.atomic_add(arrived + place, 1, sem="acq_rel") == parts - 1
            barrier()
            if whole:
                acc, norm_all, m_all = _add_splits(base, parts, HKV * 2 * SIZE, DP, ACC)
                norm = gl.convert_layout(norm_all, gl.SliceLayout(1, S))
                m = gl.convert_layout(m_all, gl.SliceLayout(1, S))
                gl.store(arrived + place, 0)
    if whole:
        if sinks is not None:
            logit = gl.load(sinks + head * G + rows % G).to(gl.float32)
            norm += gl.exp2(logit * 1.4426950408889634 - m)
        _write(out, acc, norm, q_row, queries, head, WG, HKV, G, D, DP, DTYPE, ACC)
    return count


@gluon.jit(do_not_specialize=["layer"])
def prefill_kernel(
    q, kv, out, out_scale, stride_scale, table, stride_table, items, num_items, layer, layers, scale, sinks, partial,
    arrived, until,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    FIELDS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, DP], shared)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, DP], shared)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, DP], shared)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    follow_previous(PDL)
    tasks = gl.load(num_items) * HKV
    target = (out, out_scale, stride_scale)
    gl.warp_specialize(
        [
            (_consume, (q, target, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items, tasks, scale,
                        sinks, partial, arrived, until, 0, HKV, G, BN, BOX, D, DP, STAGES, DTYPE, WINDOW, SOFTCAP,
                        FIELDS)),
            (_consume, (q, target, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items, tasks, scale,
                        sinks, partial, arrived, until, 1, HKV, G, BN, BOX, D, DP, STAGES, DTYPE, WINDOW, SOFTCAP,
                        FIELDS)),
            (_produce, (kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, stride_table, items, tasks, layer,
                        layers, until, HKV, PAGE, BN, BOX, D, DP, STAGES, WINDOW, FIELDS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
