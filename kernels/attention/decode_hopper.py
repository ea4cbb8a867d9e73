"""Paged attention of one query token per request on Hopper with one program per SM, so that a GEMM can use other SMs.

The portable kernel is in `decode_attention`, the reference in `reference/layer.py: paged_attention`.

Speed depends on the number of bytes in flight. Four consumers of one warp each process separate tasks (work item, KV
head). Each has a ring of K and V blocks in shared memory, which its own producer warp fills by TMA, so all of an SM's
shared memory is in flight except the blocks being read. A one-warp consumer needs no barrier, and its maxima and sums
no exchange between warps. K, then V transposed, is the left operand of the MMA and the query heads of the group its 8
(or 16) columns, as in the portable kernel.

SMs differ in speed: the two of a TPC share a port, which a GEMM may use too. So only a producer's first task is fixed;
it draws the others from a common counter, longest first. Results do not depend on which producer drew a task.

A box that extends past the last token is fetched *shifted*: it starts that many rows early. So nothing after the last
token, NaN included, is ever loaded.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out, output_args
from weft.kernels.attention.scores import log2_scale, with_sink
from weft.kernels.common.block_sizes import group_block, head_block
from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.kernels.common.hopper import await_previous, barrier, let_next_start, load_tile
from weft.kernels.formats.fp8_gluon import quantized


@gluon.jit
def write_word(word, value):
    """Write one int32 to shared memory from a one-warp partition."""
    word.store(gl.full([1], value, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_word(word):
    return gl.max(word.load(gl.BlockedLayout([1], [32], [1], [0])), axis=0)


@gluon.jit
def load_block(
    kv, smem, bar, table, page, slab, slabs, first, end, column,
    PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, DP: gl.constexpr,
):  # fmt: skip
    """Load K or V of tokens `first .. first + BN`, which begin in `page`, into `smem [BN, DP]`.

    Boxes past `end` arrive shifted or as zeros. Padding of a head to DP holds data of the next head and has no weight.
    """
    for box in gl.static_range(BN // BOX):
        token = first + box * BOX
        if box > 0:
            page = gl.load(table + gl.minimum(token, end - 1) // PAGE)
        shift = gl.minimum(gl.maximum(token + BOX - end, 0), BOX)
        row = gl.where(shift == BOX, PAGE, token % PAGE - shift)
        target = smem.reshape([1, BN, DP]).slice(box * BOX, BOX, dim=1)
        load_tile(kv, [page * slabs + slab, row, column], bar, target)


@gluon.jit
def task_range(items, task, tasks, table, stride_table, HKV: gl.constexpr):
    """Return a task's first token, end, q row and page-table row; zeros after the last task."""
    item = items + (task // HKV) * 8
    live = task < tasks
    pages = table + gl.load(item + 1, mask=live, other=0).to(gl.int64) * stride_table
    start = gl.load(item + 2, mask=live, other=0)
    return start, gl.load(item + 3, mask=live, other=0), gl.load(item, mask=live, other=0), pages


# The barriers. A program has four idle warps (those it starts with), and four consumers and four producers of one warp
# each; producer c feeds consumer c alone, through a ring of SLOTS blocks (3 of 64 x 128 or 32 x 256, or 6 of 64 x 64).
# Blocks enter it in the order K, V, K, V, task after task, so a slot alternates between K and V if SLOTS is odd. Both
# sides step `slot` and flip `phase` when it wraps; the consumer begins with parity 0, the producer with 1.
#
#   barrier            arrivals in a phase                                    waited for by
#   full[c, slot]      1: the producer's `expect`, one block (and q)          consumer c
#   empty[c, slot]     1: the consumer (`release_stage`), it is in registers  producer c
#
# `expect` is an arrival; the phase ends when the announced bytes have landed too. A wait names the parity of the phase
# whose end it waits for; on a fresh barrier parity 1 passes at once. The barrier of a task's first K also covers the
# task's number and tokens (a word per slot, written before the arrival) and q (by TMA). A task uses two slots or more,
# so QUERIES = (SLOTS + 1) // 2 buffers for q suffice: when a slot is free for the first K of task t + QUERIES, the slot
# of the first K of task t has been released, and q was read before. Task -1, an arrival without bytes, ends the
# consumer.
#
# SLOTS = 3, a task of two blocks, then one of one block, then the end:
#
#   slot        0       1    2    0    1         2     0
#   parity      0       0    0    1    1         1     0        the consumer's; the producer waits for the other
#   producer    K0 q    V0   K1   V1   K0' q'    V0'   -1       from the fourth on, when the slot was released
#   consumer            QK   PV   QK   PV        QK'   PV'      1 to SLOTS blocks late


@gluon.jit
def produce_decodes(
    source, CONSUMERS: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, SLOTS: gl.constexpr, DRAWN: gl.constexpr,
    PDL: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    (q, kv, q_smem, ring, full, empty, task_smem, tokens_smem, table, stride_table, items, tasks, tickets, layer,
     layers) = source  # fmt: skip
    QUERIES: gl.constexpr = (SLOTS + 1) // 2  # tasks that a ring can touch at once
    slot = 0
    phase = 1  # a fresh ring is empty
    turn = 0
    producers = gl.num_programs(0) * CONSUMERS
    task = gl.program_id(0) + CONSUMER * gl.num_programs(0)
    if DRAWN:
        task = gl.atomic_add(tickets, 1, sem="relaxed")
    start, end, row, pages = task_range(items, task, tasks, table, stride_table, HKV)
    page = gl.load(pages + start // PAGE)
    if PDL:
        await_previous()
    while task < tasks:
        column = (task % HKV) * D
        task_next = tasks
        start_next, end_next, row_next, pages_next = start, end, row, pages
        for first in range(start, end, BN):
            at = CONSUMER * SLOTS + slot
            mbarrier.wait(empty.index(at), phase)
            if first == start:
                write_word(task_smem.index(at), task)
                write_word(tokens_smem.index(at), end - start)
                if q is not None:
                    mbarrier.expect(full.index(at), (BN + GP) * DP * 2)
                    query = q_smem.index(CONSUMER * QUERIES + turn % QUERIES)
                    load_tile(q, [(row * HKV + task % HKV) * G, 0], full.index(at), query)
            elif q is not None:
                mbarrier.expect(full.index(at), BN * DP * 2)
            if q is None:
                mbarrier.expect(full.index(at), BN * DP * 2)
            load_block(kv, ring.index(at), full.index(at), pages, page, layer * 2, layers * 2, first, end, column,
                        PAGE, BN, BOX, DP)  # fmt: skip
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
            # fetch the next task's data while this one waits for a free slot
            if DRAWN:  # as late as possible, so that idle producers get it first
                if first + BN >= end:
                    task_next = gl.atomic_add(tickets, 1, sem="relaxed")
            elif (first == start) & (tasks > producers):
                task_next = producers + gl.atomic_add(tickets, 1, sem="relaxed")
            if first + BN >= end:
                start_next, end_next, row_next, pages_next = task_range(
                    items, task_next, tasks, table, stride_table, HKV
                )

            at = CONSUMER * SLOTS + slot
            mbarrier.wait(empty.index(at), phase)
            mbarrier.expect(full.index(at), BN * DP * 2)
            load_block(kv, ring.index(at), full.index(at), pages, page, layer * 2 + 1, layers * 2, first, end, column,
                        PAGE, BN, BOX, DP)  # fmt: skip
            after = first + BN
            page = gl.load(gl.where(after < end, pages + after // PAGE, pages_next + start_next // PAGE))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
        task, start, end, row, pages = task_next, start_next, end_next, row_next, pages_next
        if q is not None:
            turn += 1
    at = CONSUMER * SLOTS + slot
    mbarrier.wait(empty.index(at), phase)
    write_word(task_smem.index(at), -1)
    mbarrier.arrive(full.index(at), count=1)
    if DRAWN or tasks > producers:
        reset_counters(tickets, producers)


@gluon.jit
def reset_counters(tickets, drawers):
    """The last drawer resets the counters."""
    if gl.atomic_add(tickets + 1, 1, sem="acq_rel") == drawers - 1:
        gl.store(tickets, 0)
        gl.store(tickets + 1, 0)


@gluon.jit
def release_stage(bar):
    """Release a slot: ordinary loads from it complete before the copy engine writes it again."""
    fence_async_shared()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def transpose_blocks(x, L: gl.constexpr):
    """Convert 16-bit `x [N, GP]` from MMA result layout to a right operand: every 8 x 8 block changes lanes."""
    N: gl.constexpr = x.shape[0]
    GP: gl.constexpr = x.shape[1]
    x = gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype,
                                  is_pure=False, pack=2)  # fmt: skip
    blocks = gl.permute(gl.reshape(x, (N // 8, 8, GP // 8, 8)), (0, 3, 2, 1))
    return gl.convert_layout(gl.reshape(blocks, (N, GP)), L, assert_trivial=True)


@gluon.jit
def _part(base, part, parts, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, DP: gl.constexpr, MMA: gl.constexpr):
    """Load row maxima, sums and `[DP, GP]` accumulators of one split; past the last split they have no weight."""
    column = gl.arange(0, GP, layout=gl.SliceLayout(0, MMA))
    d = gl.arange(0, DP, layout=gl.SliceLayout(1, MMA))
    at = base + gl.minimum(part, parts - 1).to(gl.int64) * (HKV * (DP + 2) * GP)
    m = gl.load(at + DP * GP + column, cache_modifier=".cg")
    norm = gl.load(at + (DP + 1) * GP + column, cache_modifier=".cg")
    acc = gl.load(at + d[:, None] * GP + column[None, :], mask=(column < G)[None, :], other=0.0, cache_modifier=".cg")
    return gl.where(part < parts, m, float("-inf")), norm, acc


@gluon.jit
def _add(m, norm, acc, m_other, norm_other, acc_other):
    m_new = gl.maximum(m, m_other)
    alpha = gl.exp2(m - m_new)
    beta = gl.exp2(m_other - m_new)
    return m_new, norm * alpha + norm_other * beta, acc * alpha[None, :] + acc_other * beta[None, :]


@gluon.jit
def _join(
    base, parts, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, DP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add accumulators and sums of all splits of a request in order, loading four splits at a time."""
    m = gl.full([GP], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA))
    norm = gl.zeros([GP], gl.float32, layout=gl.SliceLayout(0, MMA))
    acc = gl.zeros([DP, GP], gl.float32, layout=MMA)
    for part in range(0, parts, 4):
        m_a, norm_a, acc_a = _part(base, part, parts, HKV, G, GP, DP, MMA)
        m_b, norm_b, acc_b = _part(base, part + 1, parts, HKV, G, GP, DP, MMA)
        m_c, norm_c, acc_c = _part(base, part + 2, parts, HKV, G, GP, DP, MMA)
        m_d, norm_d, acc_d = _part(base, part + 3, parts, HKV, G, GP, DP, MMA)
        m, norm, acc = _add(m, norm, acc, m_a, norm_a, acc_a)
        m, norm, acc = _add(m, norm, acc, m_b, norm_b, acc_b)
        m, norm, acc = _add(m, norm, acc, m_c, norm_c, acc_c)
        m, norm, acc = _add(m, norm, acc, m_d, norm_d, acc_d)
    return acc, norm, m


@gluon.jit
def softmax_block(
    s, m, norm, scale, item, first, tokens, token, BN: gl.constexpr, BOX: gl.constexpr, WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """Return probabilities of one block of scores `[BN, GP]`, new maxima, sums per lane, and the factor for earlier
    sums. Keys outside the window, and padding, have no weight."""
    GP: gl.constexpr = s.shape[1]
    if SOFTCAP > 0:
        CAP: gl.constexpr = SOFTCAP * 1.4426950408889634
        s = (CAP - 2 * CAP / (1.0 + gl.exp2(s * (scale * (2.0 / SOFTCAP))))) / scale
    if WINDOWED:
        unseen = gl.load(item + 7) - gl.load(item + 2)
        if first < unseen:
            # a request that ends in this block has it shifted by whole boxes
            late = gl.minimum(gl.maximum(first + (token // BOX + 1) * BOX - tokens, 0), BOX)
            s = gl.where((first + token - late >= unseen)[:, None], s, float("-inf"))
    if first + BN > tokens:
        shift = gl.minimum(gl.maximum(first + (token // BOX + 1) * BOX - tokens, 0), BOX)
        s = gl.where((token % BOX >= shift)[:, None], s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, axis=0) * scale)
    p = gl.exp2(s * scale - m_new[None, :])
    alpha = gl.exp2(m - m_new)
    sums = gl.convert_layout(gl.sum(gl.reshape(p, (BN // 8, 8, GP)), axis=0), LANES)
    norm = norm * gl.convert_layout(alpha, gl.SliceLayout(0, LANES))[None, :] + sums
    return p, m_new, norm, alpha


@gluon.jit
def consume_decodes(
    sink, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    DP: gl.constexpr, SLOTS: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Process the tasks of one producer; `m`, `norm` and `acc` as in flash attention, in the log2 domain."""
    out, q_smem, ring, full, empty, task_smem, tokens_smem, items, partial, arrived, scale, sinks = sink
    out, out_scale, stride_scale = out
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, 1], [1, 0])
    QUERIES: gl.constexpr = (SLOTS + 1) // 2
    column = gl.arange(0, GP, layout=gl.SliceLayout(0, MMA))
    token = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    slot = 0
    phase = 0
    turn = 0
    mbarrier.wait(full.index(CONSUMER * SLOTS), 0)
    task = read_word(task_smem.index(CONSUMER * SLOTS))
    while task >= 0:
        tokens = read_word(tokens_smem.index(CONSUMER * SLOTS + slot))
        query = q_smem.index(CONSUMER * QUERIES + turn % QUERIES).permute((1, 0)).load(B)
        head = task % HKV
        item = items + (task // HKV) * 8
        row = gl.load(item).to(gl.int64)  # needed at the end
        parts = gl.load(item + 5)

        m = gl.full([GP], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA))
        norm = gl.zeros([8, GP], gl.float32, layout=LANES)  # a sum per lane
        acc = gl.zeros([DP, GP], gl.float32, layout=MMA)
        for first in range(0, tokens, BN):
            at = CONSUMER * SLOTS + slot
            mbarrier.wait(full.index(at), phase)
            k = ring.index(at).load(A)
            s = mma_v2(k, query, gl.zeros([BN, GP], gl.float32, layout=MMA))
            release_stage(empty.index(at))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
            p, m, norm, alpha = softmax_block(
                s, m, norm, scale, item, first, tokens, token, BN, BOX, WINDOWED, SOFTCAP, LANES
            )
            acc = acc * alpha[None, :]
            probs = transpose_blocks(p.to(ring.dtype), B)
            at = CONSUMER * SLOTS + slot
            mbarrier.wait(full.index(at), phase)
            v = ring.index(at).permute((1, 0)).load(A)
            acc = mma_v2(v, probs, acc)
            release_stage(empty.index(at))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1

        total = gl.convert_layout(gl.sum(norm, axis=0), gl.SliceLayout(0, MMA))
        last = True
        if parts > 1:
            SIZE: gl.constexpr = (DP + 2) * GP
            base = partial + (gl.load(item + 4).to(gl.int64) * HKV + head) * SIZE
            mine = base + gl.load(item + 6).to(gl.int64) * (HKV * SIZE)
            d = gl.arange(0, DP, layout=gl.SliceLayout(1, MMA))
            gl.store(mine + d[:, None] * GP + column[None, :], acc, mask=(column < G)[None, :])
            gl.store(mine + DP * GP + column, m)
            gl.store(mine + (DP + 1) * GP + column, total)
            barrier()  # all lanes store before the release below
            last = gl.atomic_add(arrived + row * HKV + head, 1, sem="acq_rel") == parts - 1
            barrier()
            if last:
                acc, total, m = _join(base, parts, HKV, G, GP, DP, MMA)
                gl.store(arrived + row * HKV + head, 0)
        if last:
            total = with_sink(total, m, sinks, head * G + column, column < G)
            result = transpose_blocks((acc / total[None, :]).to(ring.dtype), B)
            d = gl.arange(0, DP, layout=gl.SliceLayout(1, B))
            heads = gl.arange(0, GP, layout=gl.SliceLayout(0, B))
            target = out + (row * HKV + head) * (G * D) + heads[None, :] * D + d[:, None]
            mask = (heads < G)[None, :]
            if DP != D:
                mask = mask & (d < D)[:, None]
            if out_scale is None:
                gl.store(target, result, mask=mask)
            else:
                eight, factors = quantized(result, 0)
                gl.store(target, eight, mask=mask)
                gl.store(out_scale + (head * G + heads) * stride_scale + row, factors, mask=heads < G)
        turn += 1
        mbarrier.wait(full.index(CONSUMER * SLOTS + slot), phase)
        task = read_word(task_smem.index(CONSUMER * SLOTS + slot))


@gluon.jit
def idle_warps(PDL: gl.constexpr):
    """The partition that a program starts with: it has four warps, and a consumer has one.

    A program without a task waits here too: if it ended before the previous kernel, the next kernel could start early.
    """
    if PDL:
        await_previous()


@gluon.jit(do_not_specialize=["layer"])
def decode_kernel(
    q, kv, out, out_scale, stride_scale, table, stride_table, items, num_items, partial, arrived, tickets, layer,
    layers, scale, sinks,
    HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr, WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 4
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(DTYPE, [C * SLOTS, BN, DP], shared)
    q_smem = gl.allocate_shared_memory(DTYPE, [C * ((SLOTS + 1) // 2), GP, DP], shared)
    task_smem = gl.allocate_shared_memory(gl.int32, [C * SLOTS, 1], word)
    tokens_smem = gl.allocate_shared_memory(gl.int32, [C * SLOTS, 1], word)
    full = gl.allocate_shared_memory(gl.int64, [C * SLOTS, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [C * SLOTS, 1], bar)
    for slot in gl.static_range(C * SLOTS):
        mbarrier.init(full.index(slot), count=1)
    for slot in gl.static_range(C * SLOTS):
        mbarrier.init(empty.index(slot), count=1)
    if PDL:
        let_next_start()
    tasks = gl.load(num_items) * HKV
    source = (q, kv, q_smem, ring, full, empty, task_smem, tokens_smem, table, stride_table, items, tasks, tickets,
              layer, layers)  # fmt: skip
    target = (out, out_scale, stride_scale)
    sink = (target, q_smem, ring, full, empty, task_smem, tokens_smem, items, partial, arrived, scale, sinks)
    gl.warp_specialize(
        [
            (idle_warps, (PDL,)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 0)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 1)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 2)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 3)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, False, PDL, 0)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, False, PDL, 1)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, False, PDL, 2)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, False, PDL, 3)),
        ],
        [1] * 8,
        [248, 248, 248, 248, 48, 48, 48, 48],
    )  # fmt: skip


CONSUMERS = 4  # Tasks that a program processes at once.
RING = 196608
"""Bytes of shared memory for K and V: no other program of any size fits on the SM next to them."""


def supports(q: Tensor, kv: Tensor) -> bool:
    """Return whether `launch_decode` supports these shapes on this device."""
    page_size, num_kv_heads, head_dim = kv.shape[3:]
    width = head_block(head_dim)
    largest_group = 16 if width <= 128 else 8  # their queries are in shared memory, next to the ring
    return (
        on_gpu(q.device) and is_hopper()
        and q.dtype in (torch.bfloat16, torch.float16) and page_size in (16, 32, 64, 128)
        and width in (64, 128, 256) and q.shape[1] // num_kv_heads <= largest_group
    )  # fmt: skip


def launch_decode(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *, out: Out,
    num_sms: int, space: DecodeWorkspace, scale: float | None = None, windowed: bool = False, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Out:  # fmt: skip
    """Run as `decode_attention`, which checks the arguments, on `num_sms` SMs, using all of their shared memory."""
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_kv_heads
    width = head_block(head_dim)
    block = 64 if width <= 128 else 32  # one warp holds a block in registers
    box = min(page_size, block)
    shared = [gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3)]
    slabs = kv.view(-1, page_size, num_kv_heads * head_dim)  # K or V of one page and layer
    queries = q.view(-1, head_dim)
    decode_kernel[(num_sms,)](
        TensorDescriptor.from_tensor(queries, [group_block(group), width], shared[0]),
        TensorDescriptor.from_tensor(slabs, [1, box, width], shared[1]),
        *output_args(out, len(q), head_dim), page_table, page_table.stride(0), items, num_items, space.partial,
        space.arrived, space.tickets, layer, layers, log2_scale(scale, head_dim), sinks,
        HKV=num_kv_heads, G=group, GP=group_block(group), D=head_dim, DP=width, PAGE=page_size, BN=block, BOX=box,
        SLOTS=RING // (CONSUMERS * block * width * 2),
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype],
        WINDOWED=windowed, SOFTCAP=softcap, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out
