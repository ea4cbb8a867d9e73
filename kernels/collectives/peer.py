"""Collectives between GPUs that read and write each other's memory (twins: in `tests/gpu/test_rank_kernels.py`).

Each rank has an arena: memory that all ranks know the address of, laid out alike. A flag is a word in it that one other
rank writes, always a larger number than before: that of the iteration, which a kernel counts on the device, so that a
captured graph may be replayed. Nothing is ever reset, and who waits reads its own memory.

Sums are made in rank order in float32 and rounded once, by whoever makes them, and the squares of a row are added up
in as many parts as there are ranks. So all ranks hold the same bits, whichever of the two ways a sum is made: in one
shot every rank adds up everything; in two, each its own columns, which it writes to all.

Why nobody waits for readers: there are two places for partial sums, which take turns. Who writes into a place again has
since been told by every rank that the other place is full, and a rank says so behind its reads of the first.
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,union-attr"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import is_hopper, on_gpu

GATHER_WORDS = 1024
"""of a program of `all_gather`"""
WAVES = 4
"""programs on each SM, at most, of those that add up"""

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
    """What a launch is told of all ranks' arenas."""

    addresses: Tensor
    """[ranks] int64, where each begins"""
    rank: int
    ranks: int
    abort: Tensor
    """[1] int32: not 0 ends all waiting, whatever has not come; this rank's own"""
    bases: tuple[int, ...] = ()
    """`addresses`, as the host knows them"""


@triton.jit
def _tell(addresses, rank, flags, at, number, R: tl.constexpr):
    """Every rank, this one too: what this one wrote before is there."""
    for peer in tl.static_range(R):
        flag = (tl.load(addresses + peer) + flags + (at * R + rank) * 4).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit
def _hear(addresses, rank, flags, at, number, abort, R: tl.constexpr, KIND: tl.constexpr):
    """Every thread of the program: until all ranks have told `number` or more, or waiting was ended."""
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
        _tell(addresses, rank, flags, 0, now, R)
    _hear(addresses, rank, flags, 0, now, abort, R, KIND)
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
                # from a table comes no alignment
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
    addresses, rank, abort, number, flags, ticket, R: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    if ticket is not None:  # of the sum before it, for the next one
        tl.store(ticket, 0)
    now = tl.load(number)
    _tell(addresses, rank, flags, 0, now, R)
    _hear(addresses, rank, flags, 0, now, abort, R, KIND)
    if KIND == "hopper":  # what other ranks wrote may now be read by bulk copies, too
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
    tl.debug_barrier()  # every thread's stores precede what is told below
    _tell(addresses, rank, flags, program, now, R)
    _hear(addresses, rank, flags, program, now, abort, R, KIND)
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
    """`number [1]` int32 is one more: the first launch of a graph, or of what else has flags of its own."""
    _advance_kernel[(1,)](number, num_warps=1)


def part_width(hidden: int, ranks: int) -> int:
    """Columns of a row that are one rank's part: their squares are added up apart."""
    return -(-hidden // (8 * ranks)) * 8


def reduce(
    peers: Peers,
    number: Tensor,
    flags: int,
    *,
    partial: int,
    x: int,
    sumsq: int,
    stride_sumsq: int,
    live: Tensor,
    tokens: int,
    hidden: int,
    dtype: torch.dtype,
    add: bool,
    shots: int,
    num_sms: int,
) -> None:
    """The sum of every rank's partial sums, in rank order, plus what x holds if `add`, rounded once, into x; squares of
    the parts of its rows (`part_width`) into `sumsq[: ranks]`. Rows from `live [1]` on are left alone; it may be
    more than there are.

    partial, x: `[tokens, hidden]` of `dtype`; sumsq: `[parts, stride_sumsq]` float32; flags: of this sum, `[2, ranks]`
    int32. All four are offsets into the arenas, in bytes, the same on all ranks; `flags` a multiple of 4, the others of
    16. number `[1]` int32: see `advance`. shots: 1 or 2. Every rank calls this with the same shapes and shots.
    """
    width = part_width(hidden, peers.ranks)
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
    """Flags of each rank that `all_gather` of so many words needs."""
    return -(-words // GATHER_WORDS)


def all_gather(peers: Peers, number: Tensor, flags: int, *, inbox: int, room: int, mine: Tensor, out: Tensor) -> Tensor:
    """Every rank's `mine [n]` int32 into `out [ranks, n]`, in rank order.

    inbox: `[ranks, room]` int32; flags: `[gather_programs(n), ranks]` int32: offsets into the arenas, in bytes, the
    first a multiple of 16. Who fills an inbox again must have heard of every rank since.
    """
    words = mine.shape[0]
    _gather_kernel[(gather_programs(words),)](
        peers.addresses, peers.rank, peers.abort, number, flags, inbox, room, mine, out, words, BLOCK=GATHER_WORDS,
        num_warps=4, **common_arguments(peers),
    )  # fmt: skip
    return out


def embed_part(token_ids: Tensor, table: Tensor, first: int, *, out: Tensor) -> Tensor:
    """Rows of `table [V / ranks, H]`, whose first row is token `first`, for `token_ids [T]` into `out [T, H]`; zeros
    for tokens of other ranks.
    """
    hidden = table.shape[1]
    block = min(2048, triton.next_power_of_2(hidden))
    _embed_part_kernel[(token_ids.shape[0],)](
        token_ids, table, out, first, table.shape[0], hidden, BLOCK=block, num_warps=4, **pdl_options()
    )
    return out
