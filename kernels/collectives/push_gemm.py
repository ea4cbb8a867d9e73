"""GEMMs that push partial sums to other ranks, tile by tile.

A finished tile, rounded to the model's dtype, goes to a separate buffer in the memory of the rank that adds it: every
rank in one step, the rank that owns the columns in two steps. Its flag follows, set to the number of the iteration. So
the network is busy during the GEMM, and the following sum reads only local memory; in two steps it starts during the
GEMM, with the rows that have arrived. Results equal those of `peer.reduce` after the same GEMM bit for bit.

The GEMM never waits for another rank. A buffer can be reused because two of them alternate: a rank ends the sum between
only after it has seen the flags of every rank, which are set after the reads of this buffer.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,attr-defined,union-attr"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.collectives.peer import SPIN, TYPES, WAVES, Peers, common_arguments, meet_kernel, shard_width
from weft.kernels.common.dependent_launch import begin, release
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import Launch, Workspace, check_operands, check_workspace, launch_of
from weft.kernels.matmul.gemm_tiles import accumulate, columns, join_splits, live_tokens, prefetch, tile_of

SPECIAL_ROWS = 64  # Rows per flag of the warp-specialized kernel: each of its two warpgroups sets one.
ROWS = 2
"""Rows that a program of a two-step sum adds at once. Two rows double the loads in flight and halve the flag polls."""
PROGRAMS_PER_SM = 2
"""Programs per SM of those sums when other lanes use the other SMs. Not more fit with 8 warps of 103 registers (four
ranks), and others would go to SMs of other lanes. Each draws its rows: fewer programs draw more."""


class Inbox(NamedTuple):
    """Where the tiles of one sum arrive: byte offsets into the arenas, the same on all ranks."""

    partial: int  # `[ranks, rows, width]` of the model's dtype, by sender; a multiple of 16.
    rows: int
    flags: int  # `[ranks, room]` int32, by sender.
    room: int


class Pushed(NamedTuple):
    """A launched GEMM, as its sum needs it."""

    inbox: Inbox
    steps: int
    rows: int  # Rows per flag.
    features: int  # Columns per flag.


def width_of(hidden: int, ranks: int, steps: int) -> int:
    """Return the columns of each row that a rank receives."""
    return hidden if steps == 1 else shard_width(hidden, ranks)


def flags_of(launch: Launch, tokens: int, hidden: int) -> tuple[int, int, int]:
    """Return (flags, rows of each, columns of each) of this GEMM."""
    config = launch.config
    rows = SPECIAL_ROWS if config.special else config.tokens
    return -(-tokens // rows) * -(-hidden // config.features), rows, config.features


def first_tile(peers: Peers, tiles: int, steps: int) -> int:
    """Return the feature tile (of `tiles`) that this rank begins with: the next rank's tiles first, its own last.

    So all ranks always write to different ranks, a link carries one stream rather than those of all ranks, and nothing
    is left to send after the last tile. In one step every tile goes to all ranks: 0."""
    return (peers.rank + 1) % peers.ranks * tiles // peers.ranks if steps == 2 else 0


@triton.jit
def _tile_from(unit, tiles_m, tiles_n, turn, GROUP: tl.constexpr):
    tile_m, tile_n = tile_of(unit, tiles_m, tiles_n, GROUP)
    return tile_m, (tile_n + turn) % tiles_n


@triton.jit
def _send(y, addresses, peer, inbox, rows, col, first, W, mask, OUT: tl.constexpr):
    # a table gives no alignment
    there = tl.multiple_of((tl.load(addresses + peer) + inbox).to(tl.pointer_type(OUT)), 16)
    tl.store(there + rows.to(tl.int64)[:, None] * W + (col - first)[None, :], y, mask=mask)


@triton.jit
def _flag(addresses, peer, flags, at, number):
    flag = (tl.load(addresses + peer) + flags + at * 4).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flag, number, sem="release", scope="sys")


@triton.jit(do_not_specialize=["M", "turn"])
def push_kernel(
    a, w, weights, partial, arrived, count, M, N, K, W, bias, addresses, number, flags, inbox, turn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    SLICES: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
    R: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Like `gemm_triton.product_kernel` with another epilogue. inbox, flags: for this rank's tiles."""
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLIT)
    if AHEAD > 0:
        unit = tl.program_id(0)
        _, tile_n = _tile_from(unit // SPLIT, tl.cdiv(M, BM), tiles_n, turn, GROUP)
        prefetch(weights, tile_n * BN, unit % SPLIT * share * BK, N, K, BN, AHEAD * BK)
    begin(PDL)
    now = tl.load(number)
    live = live_tokens(count, M)
    tiles_m = tl.cdiv(live, BM)
    # not flattened, because the loop over K would lose its pipeline: flags are set in between
    for unit in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT, tl.num_programs(0)):
        tile = unit // SPLIT
        part = unit % SPLIT
        tile_m, tile_n = _tile_from(tile, tiles_m, tiles_n, turn, GROUP)
        first = part * share
        acc = accumulate(a, w, tile_m * BM, tile_n * BN, first, tl.minimum(first + share, steps), BM, BN, BK, SWAP)
        done = True
        if ONCE:
            release(PDL)
        if SPLIT > 1:
            acc, done = join_splits(acc, partial, arrived, tile, part, SPLIT)
        if done:
            total = tl.trans(acc) if SWAP else acc
            rows = tile_m * BM + tl.arange(0, BM)
            WIDTH: tl.constexpr = BN // SLICES
            owner = tile_n * BN // W
            for s in tl.static_range(SLICES):
                col = tile_n * BN + s * WIDTH + tl.arange(0, WIDTH)
                y = columns(total, s, SLICES)
                if bias is not None:
                    y += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
                y = y.to(OUT)
                mask = (rows < live)[:, None] & (col < N)[None, :]
                if STEPS == 1:
                    for peer in tl.static_range(R):
                        _send(y, addresses, peer, inbox, rows, col, 0, W, mask, OUT)
                else:
                    _send(y, addresses, owner, inbox, rows, col, owner * W, W, mask, OUT)
            tl.debug_barrier()  # all threads store before the flag below
            if STEPS == 1:
                for peer in tl.static_range(R):
                    _flag(addresses, peer, flags, tile_m * tiles_n + tile_n, now)
            else:
                _flag(addresses, owner, flags, tile_m * tiles_n + tile_n, now)
    release(PDL)


@triton.jit
def _await(flag, number, abort, KIND: tl.constexpr):
    """Block all threads of the program until all of these flags hold `number` or more, or waits are aborted."""
    if KIND == "interpreted":
        seen = tl.min(tl.atomic_add(flag, 0, sem="acquire", scope="sys"), axis=0)
        while seen < number:
            seen = tl.min(tl.atomic_add(flag, 0, sem="acquire", scope="sys"), axis=0)
    else:
        tl.inline_asm_elementwise(SPIN, "=r,l,r,l", [flag, number, abort], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _next(item, ticket, STEPS: tl.constexpr):
    """Return the program's next item: a fixed stride in one step, drawn in two steps. -1: its first."""
    if STEPS == 2:
        return tl.atomic_add(ticket, 1, sem="relaxed")
    else:
        return tl.where(item < 0, tl.program_id(0), item + tl.num_programs(0))


@triton.jit(do_not_specialize=["rank", "stride_sumsq", "T"])
def _reduce_pushed_kernel(
    addresses, rank, abort, number, flags, room, inbox, source, x, sumsq, stride_sumsq, live, ticket, T, H, W,
    R: tl.constexpr, ADD: tl.constexpr, STEPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    SOURCES: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # In two steps, during the GEMM, flags alone decide which data may be read. Programs that fit next to the GEMM's,
    # which have all started when these may, add its first rows and write them to all ranks during the remaining
    # multiplications. The GEMM has waited for all earlier kernels: on a rank with a set flag nothing reads x or sumsq
    # any more, because their readers precede its GEMM. `tests/kernels/test_pushed_protocol.py` simulates it.
    if not OVERLAP:
        begin(PDL)
    release(PDL)
    now = tl.load(number, cache_modifier=".cg")
    parts = R if STEPS == 1 else 1
    own = tl.load(addresses + rank)
    mine = tl.multiple_of((own + x).to(tl.pointer_type(TYPE)), 16)
    last = tl.minimum(tl.load(live, cache_modifier=".cg"), T)
    items = tl.cdiv(last, ROWS) * parts
    # poll all flags of an item at once: TILES tiles of R ranks; missing ones repeat the last
    place = tl.arange(0, SOURCES * TILES)
    flag = (own + flags).to(tl.pointer_type(tl.int32)) + tl.minimum(place // TILES, R - 1) * room
    item = _next(-1, ticket, STEPS)
    while item < items:
        following = _next(item, ticket, STEPS)  # drawn early: the result is ready when this item is done
        row = (item // parts).to(tl.int64) * ROWS
        part = item % parts if STEPS == 1 else rank
        tile = part * W // BN
        more = (tl.minimum(part * W + W, H) - 1) // BN - tile
        tile += tl.minimum(place % TILES, more) + row.to(tl.int32) // BM * tl.cdiv(H, BN)
        _await(flag + tile, now, abort, KIND)
        rows = row + tl.arange(0, ROWS)
        squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, W, BLOCK):
            column = start + tl.arange(0, BLOCK)
            at = part * W + column
            mask = (rows < last)[:, None] & ((column < W) & (at < H))[None, :]
            there = rows[:, None] * H + at[None, :]
            sent = there if STEPS == 1 else rows[:, None] * W + column[None, :]
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for peer in tl.static_range(R):
                came = tl.multiple_of((own + inbox + peer * source).to(tl.pointer_type(TYPE)), 16)
                total += tl.load(came + sent, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            if ADD:
                total += tl.load(mine + there, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            value = total.to(TYPE)
            squares += tl.where(mask, value.to(tl.float32) * value.to(tl.float32), 0.0)
            if STEPS == 1:
                tl.store(mine + there, value, mask=mask)
            else:
                for peer in tl.static_range(R):
                    there_x = tl.multiple_of((tl.load(addresses + peer) + x).to(tl.pointer_type(TYPE)), 16)
                    tl.store(there_x + there, value, mask=mask)
        total_squares = tl.sum(squares, axis=1)
        to = part.to(tl.int64) * stride_sumsq + rows
        if STEPS == 1:
            tl.store((own + sumsq).to(tl.pointer_type(tl.float32)) + to, total_squares, mask=rows < last)
        else:
            for peer in tl.static_range(R):
                all_squares = (tl.load(addresses + peer) + sumsq).to(tl.pointer_type(tl.float32))
                tl.store(all_squares + to, total_squares, mask=rows < last)
        item = following
    if OVERLAP:
        begin(PDL)  # so that a kernel that waits for this one has waited for the GEMM too


def push_project(
    peers: Peers, number: Tensor, inbox: Inbox, a: Tensor, weight: Tensor, bias: Tensor | None, *, steps: int,
    num_sms: int, space: Workspace | None = None, num_tokens: Tensor | None = None, config: GemmConfig | None = None,
) -> Pushed | None:  # fmt: skip
    """Send `a [T, K] @ weight [H, K].T`, plus `bias [H]`, rounded to a's dtype, to the ranks that add it.

    number `[1]` int32: see `peer.advance`. steps: of the sum, 1 or 2. Returns None and launches nothing if the inbox is
    too small for the tiles, or a tile has columns of two owners."""
    check_operands(a, weight)
    tokens, hidden, depth = a.shape[0], *weight.shape
    launch = launch_of(tokens, hidden, depth, config, num_sms)
    count, rows, features = flags_of(launch, tokens, hidden)
    width = width_of(hidden, peers.ranks, steps)
    if count > inbox.room or tokens > inbox.rows or (steps == 2 and width % features):
        return None
    flags = inbox.flags + 4 * peers.rank * inbox.room
    partial = inbox.partial + peers.rank * inbox.rows * width * a.element_size()
    turn = first_tile(peers, -(-hidden // features), steps)
    if launch.config.special:
        from weft.kernels.collectives import push_gemm_hopper as pushed_hopper

        pushed_hopper.launch_push(
            peers, number, launch, a, weight, bias, num_tokens, width=width, flags=flags, partial=partial, turn=turn,
            steps=steps,
        )  # fmt: skip
        return Pushed(inbox, steps, rows, features)
    c, ws = launch.config, check_workspace(space, launch, tokens, hidden)
    push_kernel[launch.grid](
        TensorDescriptor.from_tensor(a, [c.tokens, c.depth]), TensorDescriptor.from_tensor(weight, [features, c.depth]),
        weight, ws.partial if ws else None, ws.arrived if ws else None, num_tokens, tokens, hidden, depth, width, bias,
        peers.addresses, number, flags, partial, turn, BM=c.tokens, BN=features, BK=c.depth, GROUP=c.group,
        SPLIT=launch.split, SWAP=c.swap, SLICES=c.slices, OUT=TYPES[a.dtype], R=peers.ranks, STEPS=steps,
        **launch.options,
    )  # fmt: skip
    return Pushed(inbox, steps, rows, features)


def reduce_pushed(
    peers: Peers, number: Tensor, pushed: Pushed, *, meet: int, x: int, sumsq: int, stride_sumsq: int, live: Tensor,
    ticket: Tensor, tokens: int, hidden: int, dtype: torch.dtype, add: bool, overlap: bool, num_sms: int,
) -> None:  # fmt: skip
    """Like `peer.reduce`, for pushed partial sums.

    meet: `[ranks]` int32, flags of the end of a two-step sum, as an offset into the arenas. ticket `[1]` int32: 0
    before and after. overlap: launched directly after that GEMM on its stream; a two-step sum then starts during the
    GEMM."""
    inbox, steps, ranks = pushed.inbox, pushed.steps, peers.ranks
    width = shard_width(hidden, ranks)
    together = min(ROWS, pushed.rows) if steps == 2 else 1
    items = -(-tokens // together) * (ranks if steps == 1 else 1)
    block = min(2048, triton.next_power_of_2(width))
    source = inbox.rows * width_of(hidden, ranks, steps) * dtype.itemsize
    programs = (WAVES if overlap or steps == 1 else PROGRAMS_PER_SM) * num_sms
    _reduce_pushed_kernel[(max(1, min(items, programs)),)](
        peers.addresses, peers.rank, peers.abort, number, inbox.flags, inbox.room, inbox.partial, source, x, sumsq,
        stride_sumsq, live, ticket, tokens, hidden, width, ADD=add, STEPS=steps, BM=pushed.rows, BN=pushed.features,
        TILES=triton.next_power_of_2(-(-width // pushed.features) + 1), SOURCES=triton.next_power_of_2(ranks),
        ROWS=together, OVERLAP=overlap and steps == 2, BLOCK=block, TYPE=TYPES[dtype],
        num_warps=max(1, min(8, block // 256)), **common_arguments(peers),
    )  # fmt: skip
    if steps == 2:
        meet_kernel[(1,)](
            peers.addresses, peers.rank, peers.abort, number, meet, ticket, num_warps=1, **common_arguments(peers)
        )
