"""Short causal convolution of each channel, with the tokens before in pages (reference: `states.causal_conv`).

`conv_step` computes one token of each request, `conv_chunks` chunks of a prompt. Channels are the first columns of a
projection's rows. With `before` and `after`, factors of the input and of the output, it is LFM2's whole mixer.

The program that reads a state also writes the new one, which may lie in the same page; of a chunk, that is the program
of its first block, and of a second one that begins before the convolution has left the state.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.tools.kernels.states.state_pages import BLOCK, ChunkWork, StateTables, StateTensor, live_rows, silu, unit_at

STEP_CHANNELS = 256  # Channels per task.
CHUNK_CHANNELS = 64
PROGRAMS = 4  # Programs per SM.
MAX_REGISTERS = 128  # A thread of `_chunks_kernel` has no more, so that two programs fit an SM.


@triton.jit
def conv_token(now, state, weight, bias, channel, mask, some, K: tl.constexpr, SILU: tl.constexpr):
    """Return the convolution of a token for channels whose inputs are `now`, in float32 rounded to their dtype.

    some: whether there is a state; if not, zeros came before."""
    y = tl.zeros(channel.shape, tl.float32)
    if bias is not None:
        y += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(K - 1):
        old = tl.load(state + channel * (K - 1) + i, mask=mask & some, other=0.0).to(tl.float32)
        y += old * tl.load(weight + channel * K + i, mask=mask, other=0.0).to(tl.float32)
    y += now.to(tl.float32) * tl.load(weight + channel * K + (K - 1), mask=mask, other=0.0).to(tl.float32)
    if SILU:
        y = silu(y)
    return y.to(now.dtype).to(tl.float32)


@triton.jit
def shift_state(now, state, target, channel, mask, some, K: tl.constexpr):
    """Write the state after a token. `target` may be `state`: no thread writes before all have read."""
    for i in tl.static_range(K - 2):
        old = tl.load(state + channel * (K - 1) + (i + 1), mask=mask & some, other=0.0)
        tl.debug_barrier()
        tl.store(target + channel * (K - 1) + i, old, mask=mask)
    tl.debug_barrier()
    tl.store(target + channel * (K - 1) + (K - 2), now.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _input(x, stride_x, before, stride_gate, row, channel, mask):
    """Return the convolution's inputs, rounded as the state keeps them."""
    value = tl.load(x + row * stride_x + channel, mask=mask, other=0.0)
    if before is not None:
        factor = tl.load(before + row * stride_gate + channel, mask=mask, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * factor).to(x.dtype.element_ty)
    return value


@triton.jit(do_not_specialize=["rows"])
def _step_kernel(
    x, stride_x, weight, bias, before, after, stride_gate, out, stride_out, pool, stride_page, places, read, write,
    positions, count, rows, C, N, K: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    parts = tl.cdiv(C, BC)
    for task in range(tl.program_id(0), live_rows(count, rows) * parts, tl.num_programs(0)):
        row = task // parts
        channel = (task % parts) * BC + tl.arange(0, BC)
        mask = channel < C
        some = tl.load(positions + row) > 0
        state = unit_at(pool, stride_page, places, 0, read, row, N)
        target = unit_at(pool, stride_page, places, 0, write, row, N)
        now = _input(x, stride_x, before, stride_gate, row, channel, mask)
        y = conv_token(now, state, weight, bias, channel, mask, some, K, SILU)
        shift_state(now, state, target, channel, mask, some, K)
        if after is not None:
            y *= tl.load(after + row * stride_gate + channel, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * stride_out + channel, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write_state(
    x, stride_x, before, stride_gate, first, tokens, state, target, channel, mask, some, K: tl.constexpr
):  # fmt: skip
    """Write the state after `tokens` of a chunk that begins at token row `first`; `target` may be `state`."""
    for i in tl.static_range(K - 1):
        back = tokens + i - (K - 1)  # the i-th column's token; those before the chunk are in the state
        old = tl.load(state + channel * (K - 1) + (tokens + i), mask=mask & some & (back < 0), other=0.0)
        new = _input(x, stride_x, before, stride_gate, first + back, channel, mask & (back >= 0))
        tl.debug_barrier()
        value = tl.where(back < 0, old.to(tl.float32), new.to(tl.float32))
        tl.store(target + channel * (K - 1) + i, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _convolve(
    x, stride_x, weight, bias, before, after, stride_gate, out, stride_out, state, some, block, channel, some_channel,
    K: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a block. `state` is that of its chunk, if there is `some`."""
    first = tl.load(block).to(tl.int64)
    offset = tl.load(block + 3)
    token = tl.arange(0, BT)
    mask = (token < tl.load(block + 1))[:, None] & some_channel[None, :]
    y = tl.zeros([BT, channel.shape[0]], tl.float32)
    if bias is not None:
        y += tl.load(bias + channel, mask=some_channel, other=0.0).to(tl.float32)[None, :]
    if offset < K - 1:  # the first tokens' sums begin with tokens before the chunk
        for i in tl.static_range(K - 1):
            column = offset + token + i
            at = channel[None, :] * (K - 1) + column[:, None]
            old = tl.load(state + at, mask=mask & some & (column < K - 1)[:, None], other=0.0).to(tl.float32)
            y += old * tl.load(weight + channel * K + i, mask=some_channel, other=0.0).to(tl.float32)[None, :]
    own = x + first * stride_x
    factors = before
    if before is not None:
        factors = before + first * stride_gate
    for i in tl.static_range(K):
        back = token + (i - (K - 1))
        value = _input(
            own, stride_x, factors, stride_gate, back[:, None], channel[None, :],
            mask & (offset + back >= 0)[:, None],
        ).to(tl.float32)  # fmt: skip
        y += value * tl.load(weight + channel * K + i, mask=some_channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = silu(y)
    if after is not None:
        y = y.to(x.dtype.element_ty).to(tl.float32)
        at = after + first * stride_gate + token[:, None] * stride_gate + channel[None, :]
        y *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = out + first * stride_out + token[:, None] * stride_out + channel[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _chunks_kernel(
    x, stride_x, weight, bias, before, after, stride_gate, out, stride_out, pool, stride_page, places, read, write,
    kept, chunks, blocks, checkpoints, counts, C, N, K: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    parts = tl.cdiv(C, BC)
    for task in range(tl.program_id(0), tl.load(counts + 1) * parts, tl.num_programs(0)):
        channel = (task % parts) * BC + tl.arange(0, BC)
        some_channel = channel < C
        block = blocks + (task // parts) * 4
        chunk = chunks + tl.load(block + 2) * 8
        offset = tl.load(block + 3)
        first = tl.load(block).to(tl.int64)
        some = tl.load(chunk + 2) > 0
        row = tl.load(chunk + 3)
        state = unit_at(pool, stride_page, places, 0, read, row, N)
        # The first block's program also computes a second block that reads the old state.
        number = 1
        if offset == 0:
            number += ((tl.load(block + 1) < K - 1) & (tl.load(chunk + 5) > 1)).to(tl.int32)
        elif offset < K - 1:
            number = 0
        for i in range(number):
            _convolve(
                x, stride_x, weight, bias, before, after, stride_gate, out, stride_out, state, some, block + 4 * i,
                channel, some_channel, K, SILU, BT,
            )  # fmt: skip
        if offset == 0:
            for e in range(tl.load(chunk + 6), tl.load(chunk + 7)):
                tokens = tl.load(checkpoints + 4 * e)
                target = unit_at(pool, stride_page, places, 0, kept, tl.load(checkpoints + 4 * e + 2), N)
                _write_state(
                    x, stride_x, before, stride_gate, first, tokens, state, target, channel, some_channel, some, K
                )  # fmt: skip
            target = unit_at(pool, stride_page, places, 0, write, row, N)
            tokens = tl.load(chunk + 1)
            _write_state(
                x, stride_x, before, stride_gate, first, tokens, state, target, channel, some_channel, some, K
            )  # fmt: skip


def _check(x: Tensor, weight: Tensor, state: StateTensor, gates: tuple[Tensor | None, Tensor | None]) -> int:
    """Return the row stride of the gates."""
    if weight.shape != (x.shape[1], weight.shape[1]) or not weight.is_contiguous() or x.stride(1) != 1:
        raise ValueError(f"a convolution {tuple(weight.shape)} does not fit rows {tuple(x.shape)}")
    if weight.shape[1] < 2 or len(state.places) != 1:
        raise ValueError("a convolution has a kernel of at least 2 tokens, and its state is one unit")
    strides = {gate.stride(0) for gate in gates if gate is not None}
    if len(strides) > 1:
        raise ValueError("both gates need the same row stride")
    return strides.pop() if strides else 0


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateTensor, tables: StateTables, positions: Tensor, *,
    silu: bool = True, before: Tensor | None = None, after: Tensor | None = None, out: Tensor, num_sms: int,
    count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Convolve one token of each request: `out [R, C]` in the dtype of `x [R, C]` (a view of wider rows is fine).

    weight `[C, K]`; positions `[R]` int32; before and after `[R, C]`: factors of the input and the output. count `[1]`
    int32 in device memory: rows from there on are padding."""
    stride_gate = _check(x, weight, state, (before, after))
    tasks = x.shape[0] * triton.cdiv(x.shape[1], STEP_CHANNELS)
    _step_kernel[(max(1, min(tasks, PROGRAMS * num_sms)),)](
        x, x.stride(0), weight, bias, before, after, stride_gate, out, out.stride(0), state.pool, state.pool.stride(0),
        state.places, tables.read, tables.write, positions, count, x.shape[0], x.shape[1], tables.read.shape[1],
        K=weight.shape[1], SILU=silu, BC=STEP_CHANNELS, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out


def conv_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: StateTensor, tables: StateTables, work: ChunkWork, *,
    silu: bool = True, before: Tensor | None = None, after: Tensor | None = None, out: Tensor, num_sms: int,
) -> Tensor:  # fmt: skip
    """Convolve the chunks of `work` in the rows of `x [T, C]`, as `conv_step` does; other rows of `out` are kept."""
    stride_gate = _check(x, weight, state, (before, after))
    tasks = work.blocks.shape[0] * triton.cdiv(x.shape[1], CHUNK_CHANNELS)
    _chunks_kernel[(max(1, min(tasks, PROGRAMS * num_sms)),)](
        x, x.stride(0), weight, bias, before, after, stride_gate, out, out.stride(0), state.pool, state.pool.stride(0),
        state.places, tables.read, tables.write, work.pages, work.chunks, work.blocks, work.checkpoints, work.counts,
        x.shape[1], tables.read.shape[1], K=weight.shape[1], SILU=silu, BT=BLOCK, BC=CHUNK_CHANNELS, num_warps=8,
        maxnreg=MAX_REGISTERS,
        **pdl_options(),
    )  # fmt: skip
    return out
