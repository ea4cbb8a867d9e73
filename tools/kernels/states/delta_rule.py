"""The gated delta rule (Qwen3-Next, Qwen3.5) on states in pages (reference: `states.delta_rule_step`, `_scan`).

`delta_rule_step` is a whole mixer between its projections for one token of each request: convolution, normalized q and
k, step, gated norm. A task is a key head of a request with some columns of the states of its value heads. The last task
of a key head to arrive writes the convolution's state of q and k, which all of them read, and applies the norm. The
kernel is bound by memory: each state is read and written once.

`delta_rule_chunks` follows `conv_chunks`, in two launches: `delta_blocks` prepares blocks of 64 tokens, all at the same
time. Then in `_scan_kernel` a program carries some columns of a head's state, transposed, from block to block, writes
outputs, and stores checkpoints on its way. GEMMs have operands in the model's dtype, float32 sums, and at most `ROWS`
rows. A state stays in float32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.tools.kernels.states.conv import conv_token, shift_state
from weft.tools.kernels.states.delta_blocks import blocks_kernel, gates
from weft.tools.kernels.states.state_pages import (
    BLOCK,
    ChunkWork,
    StateTables,
    StateTensor,
    before_checkpoint,
    inside,
    live_rows,
    silu,
    unit_at,
)

STEP_PROGRAMS, STEP_COLUMNS, STEP_WARPS = 5, 32, 4  # Programs per SM, columns of a state at a time.
BLOCKS_PROGRAMS, BLOCKS_WARPS = 2, 4
SCAN_PROGRAMS, SCAN_COLUMNS, SCAN_WARPS, SCAN_STAGES = 2, 32, 4, 1  # Programs per SM, columns of a state per program.
NORM_EPS = 1e-6  # Added to the squared lengths of q and k.


@triton.jit(do_not_specialize=["rows"])
def _step_kernel(
    x, stride_x, z, b, a, stride_gate, weight, bias, a_log, dt_bias, norm, out, stride_out, conv_pool, conv_stride,
    conv_places, pool, stride_page, places, read, write, arrived, positions, count, rows, N, eps, q_scale, norm_eps,
    HK: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BV: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    PARTS: tl.constexpr = (DV + BV - 1) // BV
    i = tl.arange(0, KP)
    some_i = i < DK
    for task in range(tl.program_id(0), live_rows(count, rows) * (HK * PARTS), tl.num_programs(0)):
        row = task // (HK * PARTS)
        key_head = task // PARTS % HK
        j = task % PARTS * BV + tl.arange(0, BV)
        some_j = j < DV
        tile = i[:, None] * DV + j[None, :]
        mask = inside(i, DK, KP)[:, None] & inside(j, DV, BV)[None, :]
        some = tl.load(positions + row) > 0
        conv = unit_at(conv_pool, conv_stride, conv_places, 0, read, row, N)
        conv_out = unit_at(conv_pool, conv_stride, conv_places, 0, write, row, N)
        token = x + row * stride_x
        q_channel = key_head * DK + i
        k_channel = HK * DK + q_channel
        q_now = tl.load(token + q_channel, mask=some_i, other=0.0)
        k_now = tl.load(token + k_channel, mask=some_i, other=0.0)
        q = conv_token(q_now, conv, weight, bias, q_channel, some_i, some, K, True)
        k = conv_token(k_now, conv, weight, bias, k_channel, some_i, some, K, True)
        q *= q_scale * tl.rsqrt(tl.sum(q * q, axis=0) + norm_eps)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + norm_eps)
        for member in range(GROUP):
            head = key_head * GROUP + member
            state = unit_at(pool, stride_page, places, head, read, row, N)
            target = unit_at(pool, stride_page, places, head, write, row, N)
            s = tl.load(state + tile, mask=mask & some, other=0.0).to(tl.float32)
            v_channel = 2 * HK * DK + head * DV + j
            v_now = tl.load(token + v_channel, mask=some_j, other=0.0)
            v = conv_token(v_now, conv, weight, bias, v_channel, some_j, some, K, True)
            decay, beta = gates(
                tl.load(a + row * stride_gate + head), tl.load(b + row * stride_gate + head), tl.load(a_log + head),
                tl.load(dt_bias + head),
            )  # fmt: skip
            s *= tl.exp(decay)
            delta = (v - tl.sum(s * k[:, None], axis=0)) * beta
            s += k[:, None] * delta[None, :]
            y = tl.sum(s * q[:, None], axis=0)
            tl.debug_barrier()  # small tiles lie in several threads at once, which have all read now
            tl.store(target + tile, s.to(pool.dtype.element_ty), mask=mask)
            tl.store(out + row * stride_out + head * DV + j, y.to(out.dtype.element_ty), mask=some_j)
            shift_state(v_now, conv, conv_out, v_channel, some_j, some, K)
        tl.debug_barrier()  # all threads have read and stored before the release below
        before = tl.atomic_add(arrived + row * HK + key_head, 1, sem="acq_rel")
        if before == PARTS - 1:
            shift_state(q_now, conv, conv_out, q_channel, some_i, some, K)
            shift_state(k_now, conv, conv_out, k_channel, some_i, some, K)
            column = tl.arange(0, VP)
            whole = column < DV
            for member in range(GROUP):
                head = key_head * GROUP + member
                made = out + row * stride_out + head * DV + column
                y = tl.load(made, mask=whole, other=0.0, cache_modifier=".cg").to(tl.float32)
                gate = tl.load(z + row * stride_gate + head * DV + column, mask=whole, other=0.0).to(tl.float32)
                y *= tl.rsqrt(tl.sum(y * y, axis=0) / DV + eps)
                y *= tl.load(norm + column, mask=whole, other=0.0).to(tl.float32) * silu(gate)
                tl.debug_barrier()
                tl.store(made, y.to(out.dtype.element_ty), mask=whole)
            tl.store(arrived + row * HK + key_head, 0)


def delta_rule_step(
    x: Tensor, z: Tensor, b: Tensor, a: Tensor, weight: Tensor, bias: Tensor | None, a_log: Tensor, dt_bias: Tensor,
    norm: Tensor, eps: float, *, conv: StateTensor, state: StateTensor, tables: StateTables, positions: Tensor,
    key_heads: int, arrived: Tensor, out: Tensor, num_sms: int, count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute one token of each request: `out [R, Hv * Dv]`, the operand of the output projection.

    x `[R, C]`: the channels q, k and v of the input projection before their convolution `weight [C, K]`. z `[R, Hv *
    Dv]`, b and a `[R, Hv]`: its other columns, with one row stride. a_log, dt_bias `[Hv]`; norm `[Dv]` with eps.
    positions `[R]` int32: 0 starts from zeros. arrived `[R * Hk]` int32: zeros, and zeros again after each launch.
    count `[1]` int32 in device memory: rows from there on are padding."""
    heads, width = len(state.places), norm.shape[0]
    key_width = (x.shape[1] - heads * width) // (2 * key_heads)
    if z.stride(0) != a.stride(0) or a.stride(0) != b.stride(0):
        raise ValueError("the gates must be columns of the same rows")
    if arrived.numel() < x.shape[0] * key_heads:
        raise ValueError(f"{arrived.numel()} counters do not fit {x.shape[0]} rows")
    value_block = triton.next_power_of_2(width)
    columns = min(value_block, STEP_COLUMNS)
    tasks = x.shape[0] * key_heads * triton.cdiv(width, columns)
    _step_kernel[(max(1, min(tasks, STEP_PROGRAMS * num_sms)),)](
        x, x.stride(0), z, b, a, z.stride(0), weight, bias, a_log, dt_bias, norm, out, out.stride(0), conv.pool,
        conv.pool.stride(0), conv.places, state.pool, state.pool.stride(0), state.places, tables.read, tables.write,
        arrived, positions, count, x.shape[0], tables.read.shape[1], eps, key_width**-0.5, NORM_EPS, HK=key_heads,
        GROUP=heads // key_heads, DK=key_width, DV=width, KP=triton.next_power_of_2(key_width), VP=value_block,
        BV=columns, K=weight.shape[1], num_warps=STEP_WARPS, **pdl_options(),
    )  # fmt: skip
    return out


class DeltaSpace(NamedTuple):
    """Scratch of `delta_rule_chunks` for T tokens; every layer may use the same."""

    values: Tensor  # [T, Hv, Dv]: what blocks write if their first state were zero.
    reads: Tensor  # [T, Hv, Dk]: what they read of their first state.
    within: Tensor  # [T, Hv, block]: weights of a token's values within its block.
    scales: Tensor
    """[T, Hv, 3] float32: sum of the decays' logarithms in the block, factor of q for the block's first state, factor
    that normalizes k."""


def delta_space(
    tokens: int, heads: int, key_width: int, value_width: int, dtype: torch.dtype, device: torch.device | str
) -> DeltaSpace:
    def space(width: int, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(tokens, heads, width, dtype=of, device=device)

    return DeltaSpace(space(value_width), space(key_width), space(BLOCK), space(3, torch.float32))


@triton.jit
def _through_block(
    s, x, stride_x, values, reads, within, scales, first, tokens, some, head, column, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return the outputs of a block of `tokens` and the state after `some` of them, from the state `s [V, K]`."""
    token = tl.arange(0, BT)
    i = tl.arange(0, KP)
    j = column + tl.arange(0, BV)
    dtype = x.dtype.element_ty
    real = token < tokens
    keyed = real[:, None] & inside(i, DK, KP)[None, :]
    place = first * HV + head
    scale = scales + place * 3 + token * (3 * HV)
    total = tl.load(scale, mask=real, other=0.0)
    q_scale = tl.load(scale + 1, mask=real, other=0.0)
    k_scale = tl.load(scale + 2, mask=real, other=0.0)
    rounded = s.to(dtype)
    looked = tl.load(reads + place * DK + (token[:, None] * (HV * DK) + i[None, :]), mask=keyed, other=0.0)
    own = values + place * DV + (token[None, :] * (HV * DV) + j[:, None])
    new = tl.load(own, mask=real[None, :] & inside(j, DV, BV)[:, None], other=0.0).to(tl.float32)
    new -= tl.dot(rounded, tl.trans(looked), input_precision=EXACT)
    at = x + first * stride_x + head // (HV // HK) * DK + (token[:, None] * stride_x + i[None, :])
    q = tl.load(at, mask=keyed, other=0.0)
    y = tl.dot(rounded, tl.trans(q), input_precision=EXACT) * q_scale[None, :]
    own = within + place * BT + (token[:, None] * (HV * BT) + token[None, :])
    weights = tl.load(own, mask=real[:, None], other=0.0)
    y = tl.dot(new.to(dtype), tl.trans(weights), y, input_precision=EXACT)
    last = tl.load(scales + place * 3 + (some - 1) * (3 * HV))
    each = tl.where(token < some, tl.exp(tl.minimum(last - total, 0.0)) * k_scale, 0.0)
    k = tl.load(at + HK * DK, mask=keyed, other=0.0)
    s = tl.dot((new * each[None, :]).to(dtype), k, s * tl.exp(last), input_precision=EXACT)
    return y, s


@triton.jit
def _scan_kernel(
    x, stride_x, values, reads, within, scales, out, stride_out, pool, stride_page, places, read, write, kept, chunks,
    blocks, checkpoints, counts, N, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    PARTS: tl.constexpr = (DV + BV - 1) // BV
    token = tl.arange(0, BT)
    i = tl.arange(0, KP)
    for task in range(tl.program_id(0), tl.load(counts) * (HV * PARTS), tl.num_programs(0)):
        head = task // PARTS % HV
        column = (task % PARTS) * BV
        j = column + tl.arange(0, BV)
        chunk = chunks + task // (HV * PARTS) * 8
        row = tl.load(chunk + 3)
        tile = i[None, :] * DV + j[:, None]
        mask = inside(i, DK, KP)[None, :] & inside(j, DV, BV)[:, None]
        state = unit_at(pool, stride_page, places, head, read, row, N)
        s = tl.load(state + tile, mask=mask & (tl.load(chunk + 2) > 0), other=0.0).to(tl.float32)
        index = tl.load(chunk + 4)
        end = index + tl.load(chunk + 5)
        first_checkpoint = tl.load(chunk + 6)
        last_checkpoint = tl.load(chunk + 7)
        for e in range(first_checkpoint, last_checkpoint + 1):
            start = index
            if e > first_checkpoint:
                start, _ = before_checkpoint(checkpoints, blocks, e - 1)
            stop = end
            some = 0
            if e < last_checkpoint:
                stop, some = before_checkpoint(checkpoints, blocks, e)
            for at in tl.range(start, stop, num_stages=STAGES):
                first = tl.load(blocks + 4 * at).to(tl.int64)
                tokens = tl.load(blocks + 4 * at + 1)
                y, s = _through_block(
                    s, x, stride_x, values, reads, within, scales, first, tokens, tokens, head, column, HK, HV, DK, DV,
                    KP, BV, BT, EXACT,
                )  # fmt: skip
                own = out + first * stride_out + head * DV + (token[None, :] * stride_out + j[:, None])
                written = (token < tokens)[None, :] & inside(j, DV, BV)[:, None]
                tl.store(own, y.to(out.dtype.element_ty), mask=written)
            held = s
            if some > 0:  # inside a block
                _, held = _through_block(
                    s, x, stride_x, values, reads, within, scales, tl.load(blocks + 4 * stop).to(tl.int64),
                    tl.load(blocks + 4 * stop + 1), some, head, column, HK, HV, DK, DV, KP, BV, BT, EXACT,
                )  # fmt: skip
            if e < last_checkpoint:
                target = unit_at(pool, stride_page, places, head, kept, tl.load(checkpoints + 4 * e + 2), N)
                tl.store(target + tile, held.to(pool.dtype.element_ty), mask=mask)
        target = unit_at(pool, stride_page, places, head, write, row, N)
        tl.store(target + tile, s.to(pool.dtype.element_ty), mask=mask)


def delta_rule_chunks(
    x: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, *, state: StateTensor, tables: StateTables,
    work: ChunkWork, key_heads: int, value_width: int, space: DeltaSpace, out: Tensor, num_sms: int,
) -> Tensor:  # fmt: skip
    """Compute the chunks of `work` in the rows of `x [T, C]`, after their convolution: `out [T, Hv * Dv]` in x's dtype.

    Other rows of `out` are kept. b and a `[T, Hv]` are columns of the projection, with one row stride; see
    `delta_rule_step`. The gated norm follows (`gated_norm`)."""
    heads = len(state.places)
    key_width = (x.shape[1] - heads * value_width) // (2 * key_heads)
    if a.stride(0) != b.stride(0):
        raise ValueError("the gates must be columns of the same rows")
    if len(space.values) < x.shape[0]:
        raise ValueError(f"scratch for {len(space.values)} tokens does not fit {x.shape[0]}")
    exact = "tf32x3" if x.dtype == torch.float32 else "tf32"
    key_block = max(16, triton.next_power_of_2(key_width))
    shape = {"HK": key_heads, "HV": heads, "DK": key_width, "DV": value_width, "KP": key_block, "BT": BLOCK}
    blocks, chunks = work.blocks.shape[0], work.chunks.shape[0]
    blocks_kernel[(max(1, min(blocks * heads, BLOCKS_PROGRAMS * num_sms)),)](
        x, x.stride(0), b, a, b.stride(0), a_log, dt_bias, space.values, space.reads, space.within, space.scales,
        work.blocks, work.counts, key_width**-0.5, NORM_EPS, VP=max(16, triton.next_power_of_2(value_width)),
        EXACT=exact, num_warps=BLOCKS_WARPS, **shape, **pdl_options(),
    )  # fmt: skip
    columns = min(SCAN_COLUMNS, max(16, triton.next_power_of_2(value_width)))
    tasks = chunks * heads * triton.cdiv(value_width, columns)
    _scan_kernel[(max(1, min(tasks, SCAN_PROGRAMS * num_sms)),)](
        x, x.stride(0), space.values, space.reads, space.within, space.scales, out, out.stride(0), state.pool,
        state.pool.stride(0), state.places, tables.read, tables.write, work.pages, work.chunks, work.blocks,
        work.checkpoints, work.counts, tables.read.shape[1], BV=columns, EXACT=exact,
        STAGES=SCAN_STAGES if x.element_size() == 2 else 1,
        num_warps=SCAN_WARPS, **shape, **pdl_options(),
    )  # fmt: skip
    return out
