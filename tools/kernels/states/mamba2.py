"""Mamba-2 on states in pages (reference: `states.ssd_step`, `states.ssd_scan`), after the convolution.

The channels of a token are x of all heads, then B and C of all groups. In `ssd_step` a task is a head of a request. In
`ssd_chunks` a program carries some rows of a head's state from block to block of 64 tokens, writes outputs, and stores
checkpoints on its way; GEMMs have operands in the model's dtype, float32 sums, and at most `ROWS` rows. A state stays
in float32. The gated norm follows both (`gated_norm`): its groups span heads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.tools.kernels.states.state_pages import (
    BLOCK,
    ROWS,
    ChunkWork,
    StateTables,
    StateTensor,
    before_checkpoint,
    inside,
    live_rows,
    rows_of,
    softplus,
    unit_at,
)

STEP_PROGRAMS, STEP_WARPS = 3, 4  # Programs per SM.
SCAN_PROGRAMS, SCAN_ROWS, SCAN_WARPS, SCAN_STAGES = 2, 32, 4, 1  # Programs per SM, rows of a state per program.
FLOAT32_GEMMS = "tf32x3"
NO_LIMITS = (0.0, float("inf"))


@triton.jit
def _time_step(dt, dt_bias, least, most):
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + dt_bias.to(tl.float32)), least), most)


@triton.jit(do_not_specialize=["rows"])
def _step_kernel(
    x, stride_x, dt, stride_dt, dt_bias, a_log, d, out, stride_out, pool, stride_page, places, read, write, positions,
    count, rows, N, least, most, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, PP: tl.constexpr,
    SP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    i = tl.arange(0, PP)
    j = tl.arange(0, SP)
    tile = i[:, None] * S + j[None, :]
    mask = inside(i, P, PP)[:, None] & inside(j, S, SP)[None, :]
    for task in range(tl.program_id(0), live_rows(count, rows) * H, tl.num_programs(0)):
        row = task // H
        head = task % H
        state = unit_at(pool, stride_page, places, head, read, row, N)
        s = tl.load(state + tile, mask=mask & (tl.load(positions + row) > 0), other=0.0).to(tl.float32)
        token = x + row * stride_x
        value = tl.load(token + head * P + i, mask=i < P, other=0.0).to(tl.float32)
        group = H * P + head // (H // G) * S + j
        b = tl.load(token + group, mask=j < S, other=0.0).to(tl.float32)
        c = tl.load(token + G * S + group, mask=j < S, other=0.0).to(tl.float32)
        step = _time_step(tl.load(dt + row * stride_dt + head), tl.load(dt_bias + head), least, most)
        decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
        s = s * decay + (value * step)[:, None] * b[None, :]
        y = tl.sum(s * c[None, :], axis=1)
        if d is not None:
            y += value * tl.load(d + head).to(tl.float32)
        target = unit_at(pool, stride_page, places, head, write, row, N)
        tl.debug_barrier()  # small tiles lie in several threads at once, which have all read now
        tl.store(target + tile, s.to(pool.dtype.element_ty), mask=mask)
        tl.store(out + row * stride_out + head * P + i, y.to(out.dtype.element_ty), mask=i < P)


@triton.jit
def _through_block(
    s, x, stride_x, dt, stride_dt, step_bias, a, d, first, tokens, some, head, column, least, most, H: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BP: tl.constexpr, SP: tl.constexpr, BT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Return the outputs of a block of `tokens` and the state after `some` of them, from the state `s [P, S]`."""
    token = tl.arange(0, BT)
    i = column + tl.arange(0, BP)
    j = tl.arange(0, SP)
    dtype = x.dtype.element_ty
    real = token < tokens
    step = tl.load(dt + first * stride_dt + head + token * stride_dt, mask=real, other=0.0)
    step = tl.where(real, _time_step(step, step_bias, least, most), 0.0)
    total = tl.cumsum(a * step, axis=0)
    last = tl.sum(tl.where(token == some - 1, total, 0.0), axis=0)
    own = x + first * stride_x
    values = own + head * P + i[:, None]
    keys = own + (H * P + head // (H // G) * S) + j[None, :]
    c = tl.load(
        keys + G * S + token[:, None] * stride_x, mask=real[:, None] & inside(j, S, SP)[None, :], other=0.0
    )  # fmt: skip
    y = tl.dot(s.to(dtype), tl.trans(c), input_precision=EXACT) * tl.exp(total)[None, :]
    if d is not None:
        value = tl.load(values + token[None, :] * stride_x, mask=real[None, :] & inside(i, P, BP)[:, None], other=0.0)
        y += value.to(tl.float32) * tl.load(d + head).to(tl.float32)
    s *= tl.exp(last)
    for part in tl.static_range(BT // ROWS):
        source = part * ROWS + tl.arange(0, ROWS)
        there = source < tokens
        value = tl.load(values + source[None, :] * stride_x, mask=there[None, :] & inside(i, P, BP)[:, None], other=0.0)
        b = tl.load(
            keys + source[:, None] * stride_x, mask=there[:, None] & inside(j, S, SP)[None, :], other=0.0
        )  # fmt: skip
        step_there, total_there = rows_of(step, part, ROWS), rows_of(total, part, ROWS)
        since = tl.where(token[None, :] >= source[:, None], total[None, :] - total_there[:, None], float("-inf"))
        weights = tl.dot(b, tl.trans(c), input_precision=EXACT) * tl.exp(since) * step_there[:, None]
        y = tl.dot(value, weights.to(dtype), y, input_precision=EXACT)
        each = tl.where(source < some, tl.exp(tl.minimum(last - total_there, 0.0)) * step_there, 0.0)
        s = tl.dot((value.to(tl.float32) * each[None, :]).to(dtype), b, s, input_precision=EXACT)
    return y, s


@triton.jit
def _scan_kernel(
    x, stride_x, dt, stride_dt, dt_bias, a_log, d, out, stride_out, pool, stride_page, places, read, write, kept,
    chunks, blocks, checkpoints, counts, N, least, most, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, BP: tl.constexpr, SP: tl.constexpr, BT: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    PARTS: tl.constexpr = (P + BP - 1) // BP
    token = tl.arange(0, BT)
    j = tl.arange(0, SP)
    for task in range(tl.program_id(0), tl.load(counts) * (H * PARTS), tl.num_programs(0)):
        head = task // PARTS % H
        column = (task % PARTS) * BP
        i = column + tl.arange(0, BP)
        chunk = chunks + task // (H * PARTS) * 8
        row = tl.load(chunk + 3)
        tile = i[:, None] * S + j[None, :]
        mask = inside(i, P, BP)[:, None] & inside(j, S, SP)[None, :]
        state = unit_at(pool, stride_page, places, head, read, row, N)
        s = tl.load(state + tile, mask=mask & (tl.load(chunk + 2) > 0), other=0.0).to(tl.float32)
        a = -tl.exp(tl.load(a_log + head).to(tl.float32))
        step_bias = tl.load(dt_bias + head)
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
                    s, x, stride_x, dt, stride_dt, step_bias, a, d, first, tokens, tokens, head, column, least, most, H,
                    G, P, S, BP, SP, BT, EXACT,
                )  # fmt: skip
                own = out + first * stride_out + head * P + (token[None, :] * stride_out + i[:, None])
                written = (token < tokens)[None, :] & inside(i, P, BP)[:, None]
                tl.store(own, y.to(out.dtype.element_ty), mask=written)
            held = s
            if some > 0:  # inside a block
                _, held = _through_block(
                    s, x, stride_x, dt, stride_dt, step_bias, a, d, tl.load(blocks + 4 * stop).to(tl.int64),
                    tl.load(blocks + 4 * stop + 1), some, head, column, least, most, H, G, P, S, BP, SP, BT, EXACT,
                )  # fmt: skip
            if e < last_checkpoint:
                target = unit_at(pool, stride_page, places, head, kept, tl.load(checkpoints + 4 * e + 2), N)
                tl.store(target + tile, held.to(pool.dtype.element_ty), mask=mask)
        target = unit_at(pool, stride_page, places, head, write, row, N)
        tl.store(target + tile, s.to(pool.dtype.element_ty), mask=mask)


def _shape(x: Tensor, groups: int, state: StateTensor, width: int) -> dict[str, int]:
    heads = len(state.places)
    return {"H": heads, "G": groups, "P": width, "S": (x.shape[1] - heads * width) // (2 * groups)}


def ssd_step(
    x: Tensor, dt: Tensor, dt_bias: Tensor, a_log: Tensor, d: Tensor | None, *, state: StateTensor,
    tables: StateTables, positions: Tensor, groups: int, width: int, out: Tensor, num_sms: int,
    limit: tuple[float, float] = NO_LIMITS, count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute one token of each request: `out [R, H * P]`, P = width.

    x `[R, H * P + 2 * G * N]` after the convolution; dt `[R, H]` as projected; dt_bias, a_log, d `[H]`; positions
    `[R]` int32: 0 starts from zeros. limit: of the time steps. count `[1]` int32 in device memory: rows from there on
    are padding."""
    shape = _shape(x, groups, state, width)
    _step_kernel[(max(1, min(x.shape[0] * shape["H"], STEP_PROGRAMS * num_sms)),)](
        x, x.stride(0), dt, dt.stride(0), dt_bias, a_log, d, out, out.stride(0), state.pool, state.pool.stride(0),
        state.places, tables.read, tables.write, positions, count, x.shape[0], tables.read.shape[1], *limit, **shape,
        PP=triton.next_power_of_2(width), SP=triton.next_power_of_2(shape["S"]), num_warps=STEP_WARPS, **pdl_options(),
    )  # fmt: skip
    return out


def ssd_chunks(
    x: Tensor, dt: Tensor, dt_bias: Tensor, a_log: Tensor, d: Tensor | None, *, state: StateTensor,
    tables: StateTables, work: ChunkWork, groups: int, width: int, out: Tensor, num_sms: int,
    limit: tuple[float, float] = NO_LIMITS,
) -> Tensor:  # fmt: skip
    """Compute the chunks of `work` in the rows of `x [T, C]`, as `ssd_step` does; other rows of `out` are kept."""
    shape = _shape(x, groups, state, width)
    rows = min(SCAN_ROWS, max(16, triton.next_power_of_2(width)))
    tasks = work.chunks.shape[0] * shape["H"] * triton.cdiv(width, rows)
    _scan_kernel[(max(1, min(tasks, SCAN_PROGRAMS * num_sms)),)](
        x, x.stride(0), dt, dt.stride(0), dt_bias, a_log, d, out, out.stride(0), state.pool, state.pool.stride(0),
        state.places, tables.read, tables.write, work.pages, work.chunks, work.blocks, work.checkpoints, work.counts,
        tables.read.shape[1], *limit, **shape, BP=rows, SP=max(16, triton.next_power_of_2(shape["S"])), BT=BLOCK,
        EXACT=FLOAT32_GEMMS if x.dtype == torch.float32 else "tf32", STAGES=SCAN_STAGES if x.element_size() == 2 else 1,
        num_warps=SCAN_WARPS, **pdl_options(),
    )  # fmt: skip
    return out
