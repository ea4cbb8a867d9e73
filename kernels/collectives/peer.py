"""Collectives between GPUs that read and write each other's memory (reference: `tests/gpu/test_rank_kernels.py`).

Each rank has an arena of the same layout, whose address all ranks have. A flag is a word in it that one other rank
writes, always with a larger number: the iteration, which a kernel counts on the device, so that a captured graph can be
replayed. Flags are never reset, and a waiting rank reads only its own memory.

Sums are added in rank order in float32 and rounded once; the squares of a row are added in as many splits as there are
ranks. So all ranks hold the same bits, in one shot, where every rank adds everything, and in two shots, where each adds
its own columns and writes them to all.

Writers do not wait for readers because two buffers for partial sums alternate. Before a rank writes to a buffer again,
every rank has reported that the other buffer is full, and a rank reports that after its reads of the first.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,union-attr"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import is_hopper, on_gpu

GATHER_WORDS = 1024  # Words per program of `all_gather`.
WAVES = 4  # Maximum programs per SM of a reduction.

SPIN = tl.constexpr("""{
    .reg .pred p;
    .reg .u32 v;
again:
    ld.acquire.sys.global.u32 v, [$1];
    sub.u32 v, v, $2;
    setp.ge.s32 p, v, 0;
    @p bra done;
    ld.relaxed.sys.global.u32 v, [$3];
    setp.eq.u32 p, v, 0;
    @p bra again;
done:
    mov.u32 $0, 0;
}""")
_FENCE = tl.constexpr("{ fence.proxy.async.global; mov.u32 $0, 0; }")


class Peers(NamedTuple):
    """Kernel arguments that describe all ranks' arenas."""

    addresses: Tensor  # [ranks] int64: arena addresses.
    rank: int
    ranks: int
    abort: Tensor  # [1] int32 of this rank: nonzero ends all waits, even if data is missing.
    bases: tuple[int, ...] = ()  # `addresses` on the host.


@triton.jit
def _signal(addresses, rank, flags, at, number, R: tl.constexpr):
    """Signal every rank, including this one, that earlier writes of this rank are complete."""
    for peer in tl.static_range(R):
        flag = (tl.load(addresses + peer) + flags + (at * R + rank) * 4).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def _await_all(addresses, rank, flags, at, number, abort, R: tl.constexpr, KIND: tl.constexpr):
    """Block all threads of the program until all ranks have signaled `number` or more, or waits are aborted."""
    for peer in tl.static_range(R):
        flag = (tl.load(addresses + rank) + flags + (at * R + peer) * 4).to(tl.pointer_type(tl.int32))
        if KIND == "interpreted":
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            while seen < number:
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        else:
            tl.inline_asm_elementwise(SPIN, "=r,l,r,l", [flag, number, abort], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _advance_kernel(number):
    tl.store(number, tl.load(number) + 1)


@triton.jit(do_not_specialize=["rank", "stride_sumsq", "T"])
def _reduce_kernel(
    addresses, rank, abort, number, flags, partial, x, sumsq, stride_sumsq, live, T, H, W, R: tl.constexpr,
    ADD: tl.constexpr, SHOTS: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    now = tl.load(number)
    if tl.program_id(0) == 0:
        _signal(addresses, rank, flags, 0, now, R)
    _await_all(addresses, rank, flags, 0, now, abort, R, KIND)
    parts = R if SHOTS == 1 else 1
    own = tl.load(addresses + rank)
    for item in range(tl.program_id(0), tl.minimum(tl.load(live), T) * parts, tl.num_programs(0)):
        row = (item // parts).to(tl.int64)
        part = item % parts if SHOTS == 1 else rank
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, W, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = part * W + column
            mask = (column < W) & (at < H)
            total = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(R):
                # a table gives no alignment
                there = tl.multiple_of((tl.load(addresses + peer) + partial).to(tl.pointer_type(TYPE)), 16)
                total += tl.load(there + row * H + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            mine = tl.multiple_of((own + x).to(tl.pointer_type(TYPE)), 16)
            if ADD:
                total += tl.load(mine + row * H + at, mask=mask, other=0.0).to(tl.float32)
            value = total.to(TYPE)
            squares += tl.where(mask, value.to(tl.float32) * value.to(tl.float32), 0.0)
            if SHOTS == 1:
                tl.store(mine + row * H + at, value, mask=mask)
            else:
                for peer in tl.static_range(R):
                    there = tl.multiple_of((tl.load(addresses + peer) + x).to(tl.pointer_type(TYPE)), 16)
                    tl.store(there + row * H + at, value, mask=mask)
        total_squares = tl.sum(squares, axis=0)
        place = part.to(tl.int64) * stride_sumsq + row
        if SHOTS == 1:
            tl.store((own + sumsq).to(tl.pointer_type(tl.float32)) + place, total_squares)
        else:
            for peer in tl.static_range(R):
                tl.store((tl.load(addresses + peer) + sumsq).to(tl.pointer_type(tl.float32)) + place, total_squares)


@triton.jit(do_not_specialize=["rank"])
def meet_kernel(
    addresses, rank, abort, number, flags, ticket, R: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    if ticket is not None:  # the ticket of the previous sum, reset for the next one
        tl.store(ticket, 0)
    now = tl.load(number)
    _signal(addresses, rank, flags, 0, now, R)
    _await_all(addresses, rank, flags, 0, now, abort, R, KIND)
    if KIND == "hopper":  # data from other ranks may now also be read by bulk copies
        tl.inline_asm_elementwise(_FENCE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    release(PDL)


@triton.jit(do_not_specialize=["rank"])
def _gather_kernel(
    addresses, rank, abort, number, flags, inbox, room, mine, out, N, R: tl.constexpr, BLOCK: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    now = tl.load(number)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    value = tl.load(mine + at, mask=mask, other=0)
    for peer in tl.static_range(R):
        there = tl.multiple_of((tl.load(addresses + peer) + inbox).to(tl.pointer_type(tl.int32)), 16)
        tl.store(there + rank * room + at, value, mask=mask)
    tl.debug_barrier()  # all threads store before the signal below
    _signal(addresses, rank, flags, program, now, R)
    _await_all(addresses, rank, flags, program, now, abort, R, KIND)
    came = tl.multiple_of((tl.load(addresses + rank) + inbox).to(tl.pointer_type(tl.int32)), 16)
    for peer in tl.static_range(R):
        value = tl.load(came + peer * room + at, mask=mask, other=0, cache_modifier=".cg")
        tl.store(out + peer * N + at, value, mask=mask)


@triton.jit(do_not_specialize=["FIRST", "V"])
def _embed_part_kernel(ids, table, out, FIRST, V, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids + row).to(tl.int64) - FIRST
    mine = (token >= 0) & (token < V)
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(table + token * H + at, mask=(at < H) & mine, other=0.0)
        tl.store(out + row * H + at, value, mask=at < H)


TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _kind(peers: Peers) -> str:
    if not on_gpu(peers.addresses.device):
        return "interpreted"
    return "hopper" if is_hopper() else "cuda"


def common_arguments(peers: Peers) -> dict[str, Any]:
    return {"R": peers.ranks, "KIND": _kind(peers), **pdl_options()}


def advance(number: Tensor) -> None:
    """Increment `number [1]` int32. Launch it first in a graph, or in other work with separate flags."""
    _advance_kernel[(1,)](number, num_warps=1)


def shard_width(hidden: int, ranks: int) -> int:
    """Return the columns per rank of a row; their squares are added separately."""
    return -(-hidden // (8 * ranks)) * 8


def reduce(
    peers: Peers, number: Tensor, flags: int, *, partial: int, x: int, sumsq: int, stride_sumsq: int, live: Tensor,
    tokens: int, hidden: int, dtype: torch.dtype, add: bool, shots: int, num_sms: int,
) -> None:  # fmt: skip
    """Write the sum of all ranks' partial sums, in rank order, plus x if `add`, rounded once, to x; squares to `sumsq`.

    Squares of each rank's columns (`shard_width`) go to `sumsq[: ranks]`. Rows from `live [1]` on do not change; it may
    exceed `tokens`. partial, x: `[tokens, hidden]` of `dtype`; sumsq: `[sums, stride_sumsq]` float32; flags: of this
    sum, `[2, ranks]` int32. All four are byte offsets into the arenas, the same on all ranks; `flags` a multiple of 4,
    the others of 16. number `[1]` int32: see `advance`. shots: 1 or 2. Every rank calls this with the same shapes and
    shots."""
    width = shard_width(hidden, peers.ranks)
    items = tokens * (peers.ranks if shots == 1 else 1)
    block = min(2048, triton.next_power_of_2(width))
    _reduce_kernel[(max(1, min(items, WAVES * num_sms)),)](
        peers.addresses, peers.rank, peers.abort, number, flags, partial, x, sumsq, stride_sumsq, live, tokens, hidden,
        width, ADD=add, SHOTS=shots, BLOCK=block, TYPE=TYPES[dtype], num_warps=max(1, min(8, block // 256)),
        **common_arguments(peers),
    )  # fmt: skip
    if shots == 2:
        meet_kernel[(1,)](
            peers.addresses, peers.rank, peers.abort, number, flags + 4 * peers.ranks, None, num_warps=1,
            **common_arguments(peers),
        )  # fmt: skip


def gather_programs(words: int) -> int:
    """Return the flags per rank that `all_gather` of this many words needs."""
    return -(-words // GATHER_WORDS)


def all_gather(peers: Peers, number: Tensor, flags: int, *, inbox: int, room: int, mine: Tensor, out: Tensor) -> Tensor:
    """Gather every rank's `mine [n]` int32 into `out [ranks, n]`, in rank order.

    inbox: `[ranks, room]` int32; flags: `[gather_programs(n), ranks]` int32: byte offsets into the arenas, the first a
    multiple of 16. A rank may fill an inbox again only after a signal from every rank."""
    words = mine.shape[0]
    _gather_kernel[(gather_programs(words),)](
        peers.addresses, peers.rank, peers.abort, number, flags, inbox, room, mine, out, words, BLOCK=GATHER_WORDS,
        num_warps=4, **common_arguments(peers),
    )  # fmt: skip
    return out


def embed_shard(token_ids: Tensor, table: Tensor, first: int, *, out: Tensor) -> Tensor:
    """Look up `token_ids [T]` in `table [V / ranks, H]`, whose first row is `first`; zeros for other ranks' tokens."""
    hidden = table.shape[1]
    block = min(2048, triton.next_power_of_2(hidden))
    _embed_part_kernel[(token_ids.shape[0],)](
        token_ids, table, out, first, table.shape[0], hidden, BLOCK=block, num_warps=4, **pdl_options()
    )
    return out
