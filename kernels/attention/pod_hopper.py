"""Attention of a hybrid batch in one launch: a program does prefill tiles or decode items, chosen at run time.

See POD-Attention, arXiv 2410.18038; the reference is `reference/layer.py: paged_attention`. Decode attention is bound
by memory and prefill by the tensor cores, so running both at once on different SMs is faster than running one after the
other on all SMs. A decoding SM uses all of its shared memory as a ring of K and V, a prefilling one for its tiles; so a
program does one kind at a time and switches when its list is empty. `first_decoders` programs begin with decodes, the
others with chunks, and every task is drawn. The halves come from `decode_hopper` and `prefill_hopper`, so the sums are
identical.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.attention.decode_hopper import (
    CONSUMERS,
    RING,
    consume_decodes,
    idle_warps,
    produce_decodes,
    reset_counters,
    write_word,
)
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out, output_args
from weft.kernels.attention.prefill_attention import PrefillWorkspace
from weft.kernels.attention.prefill_hopper import attend, load_task
from weft.kernels.attention.scores import log2_scale
from weft.kernels.attention.work_lists import SPLIT_FIELDS
from weft.kernels.common.block_sizes import group_block, head_block
from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import follow_previous

# The producer draws a prefill task when the previous one is fully fetched, and passes it to the warpgroups through two
# words:
#
#   barrier                 arrivals in a phase                              waited for by
#   drawn[turn & 1]     1: the producer, the task's number is written    each warpgroup
#   taken[turn & 1]    2: each warpgroup, it has read the number        the producer
#
# Task -1 ends a warpgroup.


@gluon.jit
def produce_tiles(
    kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, task_smem, drawn, taken, table, stride_table, items, tasks,
    tickets, layer, layers, HKV: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    DP: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    turn = 0
    task = gl.atomic_add(tickets, 1, sem="relaxed")
    while task < tasks:
        mbarrier.wait(taken.index(turn & 1), ((turn >> 1) & 1) ^ 1)
        write_word(task_smem.index(turn & 1), task)
        mbarrier.arrive(drawn.index(turn & 1), count=1)
        turn += 1
        count = load_task(kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, table, stride_table, items, task, layer,
                     layers, count, None, HKV, PAGE, BN, BOX, D, DP, STAGES, WINDOW, FIELDS)  # fmt: skip
        task = gl.atomic_add(tickets, 1, sem="relaxed")  # as late as possible, so that idle producers get it first
    mbarrier.wait(taken.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    write_word(task_smem.index(turn & 1), -1)
    mbarrier.arrive(drawn.index(turn & 1), count=1)
    reset_counters(tickets, gl.num_programs(0))


@gluon.jit
def _next(task_smem, drawn, taken, turn):
    mbarrier.wait(drawn.index(turn & 1), (turn >> 1) & 1)
    task = gl.max(task_smem.index(turn & 1).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
    mbarrier.arrive(taken.index(turn & 1), count=1)
    return task


@gluon.jit
def consume_tiles(
    q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, task_smem, drawn, taken, items, scale, sinks,
    partial, arrived, WG: gl.constexpr, HKV: gl.constexpr, G: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    turn = 0
    task = _next(task_smem, drawn, taken, turn)
    while task >= 0:
        count = attend(q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, items, task, scale, sinks,
                       partial, arrived, count, None, WG, HKV, G, BN, BOX, D, DP, STAGES, DTYPE, WINDOW, SOFTCAP,
                       FIELDS)  # fmt: skip
        turn += 1
        task = _next(task_smem, drawn, taken, turn)


@gluon.jit
def tile_memory(DTYPE: gl.constexpr, DP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Allocate shared memory of a program that does tiles, and its barriers in their initial state."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(DTYPE, [2, 64, DP], shared)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, DP], shared)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, DP], shared)
    task_smem = gl.allocate_shared_memory(gl.int32, [2, 1], word)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    drawn = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    for place in gl.static_range(2):
        mbarrier.init(drawn.index(place), count=1)
        mbarrier.init(taken.index(place), count=2)
    return q_smem, k_smem, v_smem, task_smem, k_full, k_empty, v_full, v_empty, drawn, taken


@gluon.jit
def decode_memory(
    DTYPE: gl.constexpr, DP: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory and barriers of a program that does C decodes at once."""
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
        mbarrier.init(empty.index(slot), count=1)
    return ring, q_smem, task_smem, tokens_smem, full, empty


@gluon.jit
def _do_tiles(
    q, kv, out, table, stride_table, items, tasks, partial, arrived, tickets, layer, layers, scale, sinks,
    HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, PAGE: gl.constexpr, BN: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    FIELDS: gl.constexpr,
):  # fmt: skip
    (q_smem, k_smem, v_smem, task_smem, k_full, k_empty, v_full, v_empty, drawn, taken) = tile_memory(
        DTYPE, DP, BN, STAGES
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume_tiles, (q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, task_smem, drawn, taken,
                              items, scale, sinks, partial, arrived, 0, HKV, G, BN, BOX, D, DP, STAGES, DTYPE,
                              WINDOW, SOFTCAP, FIELDS)),
            (consume_tiles, (q, out, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, task_smem, drawn, taken,
                              items, scale, sinks, partial, arrived, 1, HKV, G, BN, BOX, D, DP, STAGES, DTYPE,
                              WINDOW, SOFTCAP, FIELDS)),
            (produce_tiles, (kv, k_smem, v_smem, k_full, k_empty, v_full, v_empty, task_smem, drawn, taken, table,
                              stride_table, items, tasks, tickets, layer, layers, HKV, PAGE, BN, BOX, D, DP, STAGES,
                              WINDOW, FIELDS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(k_full.index(stage))
        mbarrier.invalidate(k_empty.index(stage))
        mbarrier.invalidate(v_full.index(stage))
        mbarrier.invalidate(v_empty.index(stage))
    for place in gl.static_range(2):
        mbarrier.invalidate(drawn.index(place))
        mbarrier.invalidate(taken.index(place))


@gluon.jit
def _do_decodes(
    q, kv, out, table, stride_table, items, tasks, partial, arrived, tickets, layer, layers, scale, sinks,
    HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr, WINDOWED: gl.constexpr,
    SOFTCAP: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 4
    ring, q_smem, task_smem, tokens_smem, full, empty = decode_memory(DTYPE, DP, GP, BN, SLOTS, C)
    fence_async_shared()
    source = (q, kv, q_smem, ring, full, empty, task_smem, tokens_smem, table, stride_table, items, tasks, tickets,
              layer, layers)  # fmt: skip
    sink = (out, q_smem, ring, full, empty, task_smem, tokens_smem, items, partial, arrived, scale, sinks)
    gl.warp_specialize(
        [
            (idle_warps, (False,)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 0)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 1)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 2)),
            (consume_decodes, (sink, HKV, G, GP, BN, BOX, D, DP, SLOTS, WINDOWED, SOFTCAP, 3)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, True, False, 0)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, True, False, 1)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, True, False, 2)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D, DP, SLOTS, True, False, 3)),
        ],
        [1] * 8,
        [248, 248, 248, 248, 48, 48, 48, 48],
    )  # fmt: skip
    for slot in gl.static_range(C * SLOTS):
        mbarrier.invalidate(full.index(slot))
        mbarrier.invalidate(empty.index(slot))


@gluon.jit(do_not_specialize=["layer"])
def pod_kernel(
    q, queries, decode_kv, prefill_kv, out, out_scale, stride_scale, table, stride_table, decode_items, num_decode,
    decode_partial, decode_arrived, decode_tickets, prefill_items, num_prefill, prefill_partial, prefill_arrived,
    prefill_tickets, layer, layers, scale, sinks, first_decoders,
    HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, PAGE: gl.constexpr,
    DECODE_BN: gl.constexpr, DECODE_BOX: gl.constexpr, SLOTS: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, DTYPE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, FIELDS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    follow_previous(PDL)
    target = (out, out_scale, stride_scale)
    decodes = gl.load(num_decode) * HKV
    tiles = gl.load(num_prefill) * HKV
    decoding = gl.program_id(0) < gl.load(first_decoders)
    for _ in range(2):
        if decoding:
            if decodes > 0:
                _do_decodes(queries, decode_kv, target, table, stride_table, decode_items, decodes, decode_partial,
                            decode_arrived, decode_tickets, layer, layers, scale, sinks, HKV, G, GP, D, DP, PAGE,
                            DECODE_BN, DECODE_BOX, SLOTS, DTYPE, WINDOW > 0, SOFTCAP)  # fmt: skip
        else:
            if tiles > 0:
                _do_tiles(q, prefill_kv, target, table, stride_table, prefill_items, tiles, prefill_partial,
                          prefill_arrived, prefill_tickets, layer, layers, scale, sinks, HKV, G, D, DP, PAGE, BN, BOX,
                          STAGES, DTYPE, WINDOW, SOFTCAP, FIELDS)  # fmt: skip
        decoding = not decoding


class PodWork(NamedTuple):
    """The two lists of a hybrid batch, in device memory; either may be empty."""

    decode_items: Tensor  # [max_items, 8] int32 from `decode_items`.
    num_decodes: Tensor  # [1] int32
    prefill_items: Tensor
    """[max_items, 8] int32 from `prefill_splits`, or [max_items, 4] from `prefill_items` for whole tiles."""
    num_prefills: Tensor  # [1] int32
    first_decoders: Tensor  # [1] int32: programs that begin with decodes.


class Blocks(NamedTuple):
    """Tokens per fetched block, and blocks in a program's rings."""

    decode: int
    slots: int
    prefill: int
    stages: int


def arguments(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, work: PodWork, out: Out, decodes: DecodeWorkspace,
    prefills: PrefillWorkspace, scale: float | None, window: int | None, softcap: float, sinks: Tensor | None,
    blocks: Blocks,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the launch arguments of a kernel with both halves. Raises `ValueError` for unsupported shapes."""
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group, width = q.shape[1] // num_kv_heads, head_block(head_dim)
    fields = work.prefill_items.shape[1]
    if width not in (64, 128):  # at 256 it spills registers
        raise ValueError(f"fused attention does not support heads of {head_dim}")
    if window is not None and fields == SPLIT_FIELDS:
        raise ValueError("tiles cannot be cut with a window")
    shared = [gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank) for rank in (2, 3)]
    slabs = kv.view(-1, page_size, num_kv_heads * head_dim)  # K or V of one page and layer
    tiles = [
        TensorDescriptor.from_tensor(slabs, [1, min(page_size, rows), width], shared[1])
        for rows in (blocks.decode, blocks.prefill)
    ]
    given = (
        q, TensorDescriptor.from_tensor(q.view(-1, head_dim), [group_block(group), width], shared[0]), *tiles,
        *output_args(out, len(q), head_dim), page_table, page_table.stride(0), work.decode_items, work.num_decodes,
        decodes.partial, decodes.arrived, decodes.tickets, work.prefill_items, work.num_prefills, prefills.partial,
        prefills.arrived, prefills.tickets, layer, layers, log2_scale(scale, head_dim), sinks,
    )  # fmt: skip
    return given, {
        "HKV": num_kv_heads, "G": group, "GP": group_block(group), "D": head_dim, "DP": width, "PAGE": page_size,
        "DECODE_BN": blocks.decode, "DECODE_BOX": min(page_size, blocks.decode), "SLOTS": blocks.slots,
        "BN": blocks.prefill, "BOX": min(page_size, blocks.prefill), "STAGES": blocks.stages,
        "DTYPE": {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype], "WINDOW": window or 0,
        "SOFTCAP": softcap, "FIELDS": fields, "num_warps": 4, **pdl_options(),
    }  # fmt: skip


def launch_pod(
    q: Tensor, kv: Tensor, layer: int, page_table: Tensor, work: PodWork, *, out: Out, num_sms: int,
    decodes: DecodeWorkspace, prefills: PrefillWorkspace, scale: float | None = None, window: int | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Out:  # fmt: skip
    """Attention of the rows of `q [T, Hq, D]` in both lists, on `num_sms` SMs, into `out [T, Hq * D]`.

    Equivalent to `decode_attention` then `prefill_attention`. Supports 16-bit numbers and heads of 33 to 128. window:
    positions that a query sees, also used to make the decode items; tiles are then whole. Raises `ValueError`."""
    width = head_block(kv.shape[5])
    blocks = Blocks(64, RING // (CONSUMERS * 64 * width * 2), 128, 2)
    given, options = arguments(
        q, kv, layer, page_table, work, out, decodes, prefills, scale, window, softcap, sinks, blocks
    )
    pod_kernel[(num_sms,)](*given, work.first_decoders, **options)
    return out
