"""Paged attention of one query token per request over K and V in e4m3, on Hopper with one program per SM.

The structure is that of `decode_hopper`: four one-warp consumers with a ring and a producer each, and all of an SM's
shared memory in flight. The reference is `reference/layer.py: paged_attention`. Pages are held in shared memory as byte
pairs, which `ldmatrix` can move, and are converted to float16 in registers:

- K is a left operand `[tokens, pairs]`: a register holds bytes d = 4i .. 4i + 3, whose halves are one left operand
  each; q is split into two right operands in the same way when it is read.
- V, transposed, is `[pairs, tokens]`: a register holds bytes d, d + 1 of two tokens. Sorted by d they are two left
  operands too, for even and odd d, with one accumulator each.

So no data moves between lanes. Arithmetic is float16, which represents every e4m3 number; sums are float32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.attention.decode_hopper import (
    CONSUMERS,
    RING,
    idle_warps,
    produce_decodes,
    read_word,
    release_stage,
    softmax_block,
    transpose_blocks,
)
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out, output_args
from weft.kernels.attention.scores import log2_scale, with_sink
from weft.kernels.common.block_sizes import group_block, head_block
from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.kernels.common.hopper import barrier, let_next_start
from weft.kernels.formats.fp8 import KvScales
from weft.kernels.formats.fp8_gluon import quantized_pairs

# The barriers are those of `decode_hopper` (see the table there), except that consumers load q themselves.


@gluon.jit
def halves_of_words(x):
    """Convert int16 pairs `[M, K]` to float16 of the lower and of the upper two of four neighboring bytes."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def even_and_odd(x):
    """Convert int16 pairs `[M, K]` to float16 of the first and of the second byte of each."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
        " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
        "=r,=r,r", [x], dtype=(gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _part(
    base, part, parts, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, WIDTH: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Load maxima, sums and accumulators (even and odd d) of one split; past the last split they have no weight."""
    column = gl.arange(0, GP, layout=gl.SliceLayout(0, MMA))
    pair = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, MMA))
    block = pair[:, None] * GP + column[None, :]
    mask = (column < G)[None, :]
    at = base + gl.minimum(part, parts - 1).to(gl.int64) * (HKV * (2 * WIDTH + 2) * GP)
    m = gl.load(at + 2 * WIDTH * GP + column, cache_modifier=".cg")
    norm = gl.load(at + (2 * WIDTH + 1) * GP + column, cache_modifier=".cg")
    even = gl.load(at + block, mask=mask, other=0.0, cache_modifier=".cg")
    odd = gl.load(at + WIDTH * GP + block, mask=mask, other=0.0, cache_modifier=".cg")
    return gl.where(part < parts, m, float("-inf")), norm, even, odd


@gluon.jit
def _add(m, norm, even, odd, m_other, norm_other, even_other, odd_other):
    m_new = gl.maximum(m, m_other)
    alpha = gl.exp2(m - m_new)
    beta = gl.exp2(m_other - m_new)
    even = even * alpha[None, :] + even_other * beta[None, :]
    odd = odd * alpha[None, :] + odd_other * beta[None, :]
    return m_new, norm * alpha + norm_other * beta, even, odd


@gluon.jit
def join_pairs(
    base, parts, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, WIDTH: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add accumulators (even, odd d), sums and maxima of all splits of a request in order, loading four at a time."""
    m = gl.full([GP], -1e30, gl.float32, layout=gl.SliceLayout(0, MMA))
    norm = gl.zeros([GP], gl.float32, layout=gl.SliceLayout(0, MMA))
    even = gl.zeros([WIDTH, GP], gl.float32, layout=MMA)
    odd = gl.zeros([WIDTH, GP], gl.float32, layout=MMA)
    for part in range(0, parts, 4):
        m_a, norm_a, even_a, odd_a = _part(base, part, parts, HKV, G, GP, WIDTH, MMA)
        m_b, norm_b, even_b, odd_b = _part(base, part + 1, parts, HKV, G, GP, WIDTH, MMA)
        m_c, norm_c, even_c, odd_c = _part(base, part + 2, parts, HKV, G, GP, WIDTH, MMA)
        m_d, norm_d, even_d, odd_d = _part(base, part + 3, parts, HKV, G, GP, WIDTH, MMA)
        m, norm, even, odd = _add(m, norm, even, odd, m_a, norm_a, even_a, odd_a)
        m, norm, even, odd = _add(m, norm, even, odd, m_b, norm_b, even_b, odd_b)
        m, norm, even, odd = _add(m, norm, even, odd, m_c, norm_c, even_c, odd_c)
        m, norm, even, odd = _add(m, norm, even, odd, m_d, norm_d, even_d, odd_d)
    return even, odd, norm, m


@gluon.jit
def load_query(
    q, item, head, scale, kv_scale, layer, lane_head, lane_d, HKV: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Return a task's row, splits, score factor and V scale, and its queries as the lower and upper right operand."""
    row = gl.load(item).to(gl.int64)
    parts = gl.load(item + 5)
    factor = scale * gl.load(kv_scale + layer * (2 * HKV) + head)
    v_scale = gl.load(kv_scale + layer * (2 * HKV) + HKV + head)
    q_at = q + (row * HKV + head) * (G * D) + lane_head[None, :] * D + lane_d[:, None]
    mine = (lane_head < G)[None, :] & (lane_d < D)[:, None]
    lower = gl.load(q_at, mask=mine, other=0.0).to(gl.float16)
    upper = gl.load(q_at + 2, mask=mine, other=0.0).to(gl.float16)
    return row, parts, factor, v_scale, lower, upper


@gluon.jit
def finish_pairs(
    even, odd, norm, m, v_scale, parts, item, row, head, out, out_scale, stride_scale, partial, arrived, sinks,
    column, pair, lane_head, lane, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
    WIDTH: gl.constexpr, DTYPE: gl.constexpr, MMA: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Write a task's result; of a split task, store the sums, and the last split adds all of them and writes."""
    total = gl.convert_layout(gl.sum(norm, axis=0), gl.SliceLayout(0, MMA))
    last = True
    if parts > 1:
        SIZE: gl.constexpr = (2 * WIDTH + 2) * GP
        base = partial + (gl.load(item + 4).to(gl.int64) * HKV + head) * SIZE
        own = base + gl.load(item + 6).to(gl.int64) * (HKV * SIZE)
        block = pair[:, None] * GP + column[None, :]
        gl.store(own + block, even, mask=(column < G)[None, :])
        gl.store(own + WIDTH * GP + block, odd, mask=(column < G)[None, :])
        gl.store(own + 2 * WIDTH * GP + column, m)
        gl.store(own + (2 * WIDTH + 1) * GP + column, total)
        barrier()  # all lanes store before the release below
        last = gl.atomic_add(arrived + row * HKV + head, 1, sem="acq_rel") == parts - 1
        barrier()
        if last:
            even, odd, total, m = join_pairs(base, parts, HKV, G, GP, WIDTH, MMA)
            gl.store(arrived + row * HKV + head, 0)
    if last:
        total = with_sink(total, m, sinks, head * G + column, column < G)
        first_of = transpose_blocks((even / total[None, :] * v_scale).to(DTYPE), B)
        second_of = transpose_blocks((odd / total[None, :] * v_scale).to(DTYPE), B)
        target = out + (row * HKV + head) * (G * D) + lane_head[None, :] * D + 2 * lane[:, None]
        mine = (lane_head < G)[None, :] & (2 * lane < D)[:, None]
        if out_scale is None:
            gl.store(target, first_of, mask=mine)
            gl.store(target + 1, second_of, mask=mine)
        else:
            pairs, factors = quantized_pairs(first_of, second_of, 0)
            words = out.to(gl.pointer_type(gl.int16), bitcast=True) + (row * HKV + head) * (G * D // 2)
            gl.store(words + lane_head[None, :] * (D // 2) + lane[:, None], pairs, mask=(lane_head < G)[None, :])
            gl.store(out_scale + (head * G + lane_head) * stride_scale + row, factors, mask=lane_head < G)


@gluon.jit
def _consume(
    sink, HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr, D: gl.constexpr,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr, WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Process the tasks of one producer; `m`, `norm`, `even` and `odd` as in flash attention, in the log2 domain."""
    q, out, ring, full, empty, task_smem, tokens_smem, items, partial, arrived, scale, kv_scale, layer, sinks = sink
    out, out_scale, stride_scale = out
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
    slot = 0
    phase = 0
    mbarrier.wait(full.index(CONSUMER * SLOTS), 0)
    task = read_word(task_smem.index(CONSUMER * SLOTS))
    while task >= 0:
        tokens = read_word(tokens_smem.index(CONSUMER * SLOTS + slot))
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
            at = CONSUMER * SLOTS + slot
            mbarrier.wait(full.index(at), phase)
            k_lower, k_upper = halves_of_words(ring.index(at).load(A))
            s = mma_v2(k_lower, lower, gl.zeros([BN, GP], gl.float32, layout=MMA))
            s = mma_v2(k_upper, upper, s)
            release_stage(empty.index(at))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1
            p, m, norm, alpha = softmax_block(
                s, m, norm, factor, item, first, tokens, token, BN, BOX, WINDOWED, SOFTCAP, LANES
            )
            even = even * alpha[None, :]
            odd = odd * alpha[None, :]
            probs = transpose_blocks(p.to(gl.float16), B)
            at = CONSUMER * SLOTS + slot
            mbarrier.wait(full.index(at), phase)
            v_even, v_odd = even_and_odd(ring.index(at).permute((1, 0)).load(A))
            even = mma_v2(v_even, probs, even)
            odd = mma_v2(v_odd, probs, odd)
            release_stage(empty.index(at))
            slot += 1
            if slot == SLOTS:
                slot = 0
                phase ^= 1

        finish_pairs(
            even, odd, norm, m, v_scale, parts, item, row, head, out, out_scale, stride_scale, partial, arrived, sinks,
            column, pair, lane_head, lane, HKV, G, GP, D, WIDTH, DTYPE, MMA, B,
        )  # fmt: skip
        mbarrier.wait(full.index(CONSUMER * SLOTS + slot), phase)
        task = read_word(task_smem.index(CONSUMER * SLOTS + slot))


@gluon.jit(do_not_specialize=["layer"])
def decode_kernel(
    q, kv, kv_scale, out, out_scale, stride_scale, table, stride_table, items, num_items, partial, arrived, tickets,
    layer, layers, scale, sinks,
    HKV: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr,
    BN: gl.constexpr, BOX: gl.constexpr, SLOTS: gl.constexpr, SWIZZLE: gl.constexpr, DTYPE: gl.constexpr,
    WINDOWED: gl.constexpr, SOFTCAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = 4
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=16, rank=2)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    ring = gl.allocate_shared_memory(gl.int16, [C * SLOTS, BN, WIDTH], shared)
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
    source = (None, kv, None, ring, full, empty, task_smem, tokens_smem, table, stride_table, items, tasks, tickets,
              layer, layers)  # fmt: skip
    target = (out, out_scale, stride_scale)
    sink = (q, target, ring, full, empty, task_smem, tokens_smem, items, partial, arrived, scale, kv_scale, layer,
            sinks)  # fmt: skip
    gl.warp_specialize(
        [
            (idle_warps, (PDL,)),
            (_consume, (sink, HKV, G, GP, BN, BOX, D, WIDTH, SLOTS, DTYPE, WINDOWED, SOFTCAP, 0)),
            (_consume, (sink, HKV, G, GP, BN, BOX, D, WIDTH, SLOTS, DTYPE, WINDOWED, SOFTCAP, 1)),
            (_consume, (sink, HKV, G, GP, BN, BOX, D, WIDTH, SLOTS, DTYPE, WINDOWED, SOFTCAP, 2)),
            (_consume, (sink, HKV, G, GP, BN, BOX, D, WIDTH, SLOTS, DTYPE, WINDOWED, SOFTCAP, 3)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D // 2, WIDTH, SLOTS, False, PDL, 0)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D // 2, WIDTH, SLOTS, False, PDL, 1)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D // 2, WIDTH, SLOTS, False, PDL, 2)),
            (produce_decodes, (source, C, HKV, G, GP, PAGE, BN, BOX, D // 2, WIDTH, SLOTS, False, PDL, 3)),
        ],
        [1] * 8,
        [248, 248, 248, 248, 48, 48, 48, 48],
    )  # fmt: skip


def block_tokens(head_dim: int) -> int:
    """Return the tokens per block, which one warp holds in registers. Sums depend on it."""
    return 64 if head_dim <= 128 else 32


def supports(q: Tensor, kv: Tensor) -> bool:
    """Return whether `launch_decode` supports these shapes on this device."""
    page_size, num_kv_heads, head_dim = kv.shape[3:]
    return (
        on_gpu(q.device) and is_hopper()
        and q.dtype in (torch.bfloat16, torch.float16) and page_size in (16, 32, 64, 128)
        and head_dim in (64, 128, 256) and q.shape[1] // num_kv_heads <= (16 if head_dim <= 128 else 8)
    )  # fmt: skip


def arguments(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, out: Out,
    space: DecodeWorkspace, scale: float | None, windowed: bool, softcap: float, sinks: Tensor | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Return the launch arguments that this kernel and that of `fp8_decode_warps` share."""
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_kv_heads
    width = head_block(head_dim) // 2  # byte pairs
    block = block_tokens(head_dim)
    box = min(page_size, block)
    swizzle = min(128, width * 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=3)
    slabs = kv.view(torch.int16).view(-1, page_size, num_kv_heads * head_dim // 2)  # K or V of one page and layer
    given = (
        q, TensorDescriptor.from_tensor(slabs, [1, box, width], layout), scales.scale,
        *output_args(out, len(q), head_dim), page_table, page_table.stride(0), items, num_items, space.partial,
        space.arrived, space.tickets, layer, layers, log2_scale(scale, head_dim), sinks,
    )  # fmt: skip
    return given, {
        "HKV": num_kv_heads, "G": group, "GP": group_block(group), "D": head_dim, "WIDTH": width, "PAGE": page_size,
        "BN": block, "BOX": box, "SWIZZLE": swizzle,
        "DTYPE": {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[q.dtype],
        "WINDOWED": windowed, "SOFTCAP": softcap, **pdl_options(),
    }  # fmt: skip


def launch_decode(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, space: DecodeWorkspace, scale: float | None = None, windowed: bool = False,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Out:  # fmt: skip
    """Run as `fp8_attention.decode_attention`, which checks the arguments, using `num_sms` whole SMs."""
    given, options = arguments(
        q, kv, scales, layer, page_table, items, num_items, out, space, scale, windowed, softcap, sinks
    )
    slots = RING // (CONSUMERS * options["BN"] * options["WIDTH"] * 2)
    decode_kernel[(num_sms,)](*given, SLOTS=slots, num_warps=4, **options)
    return out
