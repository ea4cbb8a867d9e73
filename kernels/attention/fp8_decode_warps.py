"""Paged attention of one query token per request over e4m3 pages, on all SMs of a Hopper GPU, in one-warp programs.

Results equal those of `fp8_decode` bit for bit. Its consumers are separate programs here, several per SM, which share
one copy of the loop. Consumers in one program have a copy each, and four loops that convert e4m3 exceed the instruction
caches, which cost half of the time. A program feeds itself: when a block of K or V is in registers, the copy engine
refills its place with the block `PLACES` blocks ahead, so tasks are drawn that far ahead of the work.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from weft.kernels.attention.decode_hopper import (
    load_block,
    read_word,
    reset_counters,
    softmax_block,
    task_range,
    transpose_blocks,
    write_word,
)
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.fp8_decode import arguments, even_and_odd, finish_pairs, halves_of_words, load_query
from weft.kernels.attention.output import Out
from weft.kernels.common.hopper import await_previous, let_next_start
from weft.kernels.formats.fp8 import KvScales

# A place is K and V of BN tokens, `ring[2 * place]` and `ring[2 * place + 1]`, each with a barrier that the copy engine
# completes. No other waits are needed: the warp that reads a place also requests its refill. Words next to a place hold
# the task that begins there (-1: none is left) and its number of tokens.


@gluon.jit
def _fill(
    ground, cursor, place, PART: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    BYTE_PAIRS: gl.constexpr, WIDTH: gl.constexpr, HKV: gl.constexpr,
):  # fmt: skip
    """Request K (PART 0) or V (1) of the block that the cursor points at."""
    kv, ring, full, task_smem, tokens_smem, tasks, layer, layers = ground
    task, start, end, first, pages, page = cursor
    at = 2 * place + PART
    if task < tasks:
        if PART == 0:  # noqa: SIM102 (the outer one is settled when compiled)
            if first == start:
                write_word(task_smem.index(place), task)
                write_word(tokens_smem.index(place), end - start)
        mbarrier.expect(full.index(at), BN * WIDTH * 2)
        load_block(kv, ring.index(at), full.index(at), pages, page, layer * 2 + PART, layers * 2, first, end,
                    (task % HKV) * BYTE_PAIRS, PAGE, BN, BOX, WIDTH)  # fmt: skip
    elif PART == 0:
        write_word(task_smem.index(place), -1)


@gluon.jit
def _next(queue, cursor, HKV: gl.constexpr, BN: gl.constexpr, PAGE: gl.constexpr):
    """Advance the cursor by one block, which may belong to the next task."""
    items, tasks, table, stride_table, tickets = queue
    task, start, end, first, pages, _ = cursor
    first += BN
    if first >= end:
        programs = gl.num_programs(0)
        if (tasks > programs) & (task < tasks):
            task = programs + gl.atomic_add(tickets, 1, sem="relaxed")
        else:
            task = tasks
        start, end, _, pages = task_range(items, task, tasks, table, stride_table, HKV)
        first = start
    page = gl.load(pages + first // PAGE)
    return task, start, end, first, pages, page


@gluon.jit(do_not_specialize=["layer"])
def decode_kernel(
    q, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, partial, arrived, tickets,
    layer, layers, scale, sinks,
    HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, PLACES: gl.constexpr, SWIZZLE: gl.constexpr, DTYPE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=2)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.int16, [2 * PLACES, BN, WIDTH], shared)
    task_smem = gl.allocate_shared_memory(gl.int32, [PLACES, 1], word)
    tokens_smem = gl.allocate_shared_memory(gl.int32, [PLACES, 1], word)
    full = gl.allocate_shared_memory(gl.int64, [2 * PLACES, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(2 * PLACES):
        mbarrier.init(full.index(at), count=1)
    tasks = gl.load(num_items) * HKV
    ground = (kv, ring, full, task_smem, tokens_smem, tasks, layer, layers)
    queue = (items, tasks, table, stride_table, tickets)

    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    LANES: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, 1], [1, 0])

    column = gl.arange(0, GP, layout=gl.SliceLayout(0, MMA))
    token = gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
    pair = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MMA))
    lane_head = gl.arange(0, GP, layout=gl.SliceLayout(0, B))
    lane = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, B))
    lane_d = lane // 2 * 4 + lane % 2  # of the lower two of four bytes

    task = gl.program_id(0)
    start, end, _, pages = task_range(items, task, tasks, table, stride_table, HKV)
    page = gl.load(pages + start // PAGE)
    cursor = (task, start, end, start, pages, page)
    if PDL:  # noqa: SIM102 (the outer one is settled when compiled)
        # Programs without a task end, to free resources for the next kernel. Some stay, or it would start before the
        # previous kernel has ended.
        if (task < tasks) | (tasks == 0):
            await_previous()
    for empty in gl.static_range(PLACES):
        _fill(ground, cursor, empty, 0, PAGE, BN, BOX, D // 2, WIDTH, HKV)
        _fill(ground, cursor, empty, 1, PAGE, BN, BOX, D // 2, WIDTH, HKV)
        cursor = _next(queue, cursor, HKV, BN, PAGE)
    place = 0
    phase = 0
    task = read_word(task_smem.index(0))
    if PDL:
        # not earlier: the next kernel's memory requests would precede the first K and V
        if task >= 0:
            mbarrier.wait(full.index(1), 0)
        let_next_start()
    while task >= 0:
        tokens = read_word(tokens_smem.index(place))
        head = task % HKV
        item = items + (task // HKV) * 8
        row, parts, factor, v_scale, lower, upper = load_query(
            q, item, head, scale, kv_scale, layer, lane_head, lane_d, HKV, G, D
        )

        m = gl.full([GP], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA))
        norm = gl.zeros([8, GP], gl.float32, layout=LANES)  # a sum per lane
        even = gl.zeros([WIDTH, GP], gl.float32, layout=MMA)
        odd = gl.zeros([WIDTH, GP], gl.float32, layout=MMA)
        for first in range(0, tokens, BN):
            mbarrier.wait(full.index(2 * place), phase)
            k_lower, k_upper = halves_of_words(ring.index(2 * place).load(A))
            s = mma_v2(k_lower, lower, gl.zeros([BN, GP], gl.float32, layout=MMA))
            s = mma_v2(k_upper, upper, s)
            fence_async_shared()  # reads complete before the copy engine writes
            _fill(ground, cursor, place, 0, PAGE, BN, BOX, D // 2, WIDTH, HKV)
            p, m, norm, alpha = softmax_block(
                s, m, norm, factor, item, first, tokens, token, BN, BOX, WINDOWED, SOFTCAP, LANES
            )
            even = even * alpha[None, :]
            odd = odd * alpha[None, :]
            probs = transpose_blocks(p.to(gl.float16), B)
            mbarrier.wait(full.index(2 * place + 1), phase)
            v_even, v_odd = even_and_odd(ring.index(2 * place + 1).permute((1, 0)).load(A))
            even = mma_v2(v_even, probs, even)
            odd = mma_v2(v_odd, probs, odd)
            fence_async_shared()
            _fill(ground, cursor, place, 1, PAGE, BN, BOX, D // 2, WIDTH, HKV)
            cursor = _next(queue, cursor, HKV, BN, PAGE)
            place += 1
            if place == PLACES:
                place = 0
                phase ^= 1

        finish_pairs(
            even, odd, norm, m, v_scale, parts, item, row, head, out, out_scale, stride_scale, partial, arrived, sinks,
            column, pair, lane_head, lane, HKV, G, GP, D, WIDTH, DTYPE, MMA, B,
        )  # fmt: skip
        task = read_word(task_smem.index(place))
    programs = gl.num_programs(0)
    if tasks > programs:
        reset_counters(tickets, programs)


PER_SM = 4  # Programs per SM, as work lists are cut for.
_RING = 49152  # Bytes of shared memory for a program's K and V.


def launch_decode(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, space: DecodeWorkspace, scale: float | None = None, windowed: bool = False,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Out:  # fmt: skip
    """Run as `fp8_decode.launch_decode`, in `PER_SM` programs for each of `num_sms` SMs, on any SMs of the GPU."""
    given, options = arguments(
        q, kv, scales, layer, page_table, items, num_items, out, space, scale, windowed, softcap, sinks
    )
    places = _RING // (2 * options["BN"] * options["WIDTH"] * 2)
    decode_kernel[(PER_SM * num_sms,)](*given, PLACES=places, num_warps=1, **options)
    return out
