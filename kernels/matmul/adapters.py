"""What LoRA adapters add to a projection on a GPU (reference: `reference/adapters.py`).

The rows of an iteration are sorted by adapter. A work list in device memory names a tile of rows of one adapter per
item, so captured launches serve any mix. `shrink` multiplies by A, `expand` multiplies that by B and adds it in place.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import gpu
from weft.kernels.matmul.adapter_work import FEW_TOKENS, max_items, tile_rows
from weft.kernels.matmul.gemm_activations import activate, gate_with

SPLIT_DEPTH = 512  # Least depth of a split of A's columns.


class Slots(NamedTuple):
    """The matrices of one projection in all slots. A projection has P parts, such as q, k and v, of widths n."""

    a: Tensor  # `[S, P * R * K]`: `[P, R, K]` of each slot.
    b: Tensor  # `[S, sum(n) * R]`: the `[n, R]` of each part, in sequence.
    widths: tuple[int, ...]
    rank: int  # R
    shift: Tensor | None = None  # `[S, P * R]` in the dtype of a: A times the bias of the norm before it.


class Work(NamedTuple):
    """Which rows have which adapter."""

    order: Tensor  # `[T]` int32 rows, sorted by adapter; rows without one are last.
    items: Tensor  # `[max, 4]` int32: see `adapter_work`.
    counts: Tensor  # `[2]` int32: items with an adapter, and all items.


def splits_of(tokens: int, depth: int) -> int:
    """Return into how many parts `shrink` divides the depth, whose sums `expand` adds in order."""
    most = 16 if tokens <= FEW_TOKENS else 2
    return max(1, min(most, depth // SPLIT_DEPTH))


def shrunk_size(tokens: int, shapes: Iterable[tuple[int, int]], rank: int) -> int:
    """Return the most float32 numbers that `shrink` writes up to a token bucket. shapes: (K, parts) of projections."""
    sizes = (min(tokens, FEW_TOKENS), tokens)
    return max(splits_of(t, depth) * parts * t * rank for t in sizes for depth, parts in shapes)


@triton.jit
def _shrink_kernel(
    x, sumsq, stride_sumsq, eps, order, items, counts, a, stride_slot, t, T, K, KS,
    PARTS: tl.constexpr, R: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    item = tl.program_id(0)
    if item < tl.load(counts):
        slot = tl.load(items + item * 4).to(tl.int64)
        first = tl.load(items + item * 4 + 1)
        rows = tl.load(items + item * 4 + 2)
        rank = tl.load(items + item * 4 + 3)
        part = tl.program_id(1) // (R // RB)
        r = tl.program_id(1) % (R // RB) * RB + tl.arange(0, RB)
        if tl.program_id(1) % (R // RB) * RB < rank:
            m = tl.arange(0, BM)
            row = tl.load(order + first + m, mask=m < rows, other=0).to(tl.int64)
            begins = tl.program_id(2) * KS
            ends = tl.minimum(begins + KS, K)
            k = begins + tl.arange(0, BK)
            source = x + row[:, None] * K + k[None, :]
            matrix = a + slot * stride_slot + (part * R + r)[None, :] * K + k[:, None]
            acc = tl.zeros([BM, RB], tl.float32)
            for at in range(begins, ends, BK):
                inside = at + tl.arange(0, BK) < ends
                left = tl.load(source, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
                right = tl.load(matrix, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
                acc = tl.dot(left, right, acc, input_precision="ieee")
                source += BK
                matrix += BK
            if PARTS > 0:
                squares = tl.zeros([BM], tl.float32)
                for i in range(PARTS):
                    squares += tl.load(sumsq + i * stride_sumsq + row, mask=m < rows, other=0.0)
                acc *= tl.rsqrt(squares / K + eps)[:, None]
            parts = tl.num_programs(1) // (R // RB)
            target = (tl.program_id(2) * parts + part) * T + first + m
            tl.store(t + target.to(tl.int64)[:, None] * R + r[None, :], acc, mask=(m < rows)[:, None])


@triton.jit
def _product(
    t, shift, b, part, n, width, first, rows, rank, T, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SPLITS: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Return t times the rows n of a part's B, `[BM, BN]` float32. b: the part's B in the item's slot."""
    m, step = tl.arange(0, BM), tl.arange(0, 16)
    acc = tl.zeros([BM, BN], tl.float32)
    for begins in range(0, rank, 16):
        r = begins + step
        sums = tl.zeros([BM, 16], tl.float32)
        for split in tl.static_range(SPLITS):
            source = ((split * P + part) * T + first + m).to(tl.int64)
            mask = (m < rows)[:, None] & (r < rank)[None, :]
            sums += tl.load(t + source[:, None] * R + r[None, :], mask=mask, other=0.0)
        if shift is not None:
            sums += tl.load(shift + part * R + r).to(tl.float32)[None, :]
        right = tl.load(b + n[None, :] * R + r[:, None], mask=(n < width)[None, :] & (r < rank)[:, None], other=0.0)
        acc = tl.dot(sums.to(right.dtype), right, acc, input_precision="ieee")
    return acc


@triton.jit
def _expand_kernel(
    t, shift, stride_shift, b, stride_slot, order, items, counts, y, stride_y, T, N0, N1, N2,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    blocks = tl.cdiv(N0, BN) + tl.cdiv(N1, BN) + tl.cdiv(N2, BN)
    for unit in range(tl.program_id(0), tl.load(counts) * blocks, tl.num_programs(0)):
        item = unit // blocks
        slot = tl.load(items + item * 4).to(tl.int64)
        first = tl.load(items + item * 4 + 1)
        rows = tl.load(items + item * 4 + 2)
        rank = tl.load(items + item * 4 + 3)
        block, part, start, width = unit % blocks, 0, 0, N0
        if P > 1:  # noqa: SIM102 - `and` would not stop the compiler
            if block >= tl.cdiv(N0, BN):
                block, part, start, width = block - tl.cdiv(N0, BN), 1, N0, N1
        if P > 2:  # noqa: SIM102
            if (part == 1) & (block >= tl.cdiv(N1, BN)):
                block, part, start, width = block - tl.cdiv(N1, BN), 2, N0 + N1, N2
        m, n = tl.arange(0, BM), block * BN + tl.arange(0, BN)
        row = tl.load(order + first + m, mask=m < rows, other=0).to(tl.int64)
        own = shift
        if shift is not None:
            own = shift + slot * stride_shift
        matrix = b + slot * stride_slot + start * R
        acc = _product(t, own, matrix, part, n, width, first, rows, rank, T, R, BM, BN, SPLITS, P)
        at = y + row[:, None] * stride_y + start + n[None, :]
        mask = (m < rows)[:, None] & (n < width)[None, :]
        before = tl.load(at, mask=mask, other=0.0)
        tl.store(at, (before.to(tl.float32) + acc).to(before.dtype), mask=mask)


@triton.jit
def _activate_kernel(
    t, shift, stride_shift, b, stride_slot, order, items, counts, raw, out, T, N,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, P: tl.constexpr, ACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    blocks = tl.cdiv(N, BN)
    for unit in range(tl.program_id(0), tl.load(counts + 1) * blocks, tl.num_programs(0)):
        item = unit // blocks
        slot = tl.load(items + item * 4).to(tl.int64)
        first = tl.load(items + item * 4 + 1)
        rows = tl.load(items + item * 4 + 2)
        rank = tl.load(items + item * 4 + 3)
        m, n = tl.arange(0, BM), unit % blocks * BN + tl.arange(0, BN)
        row = tl.load(order + first + m, mask=m < rows, other=0).to(tl.int64)
        live = (m < rows)[:, None]
        own = shift
        if shift is not None:
            own = shift + slot * stride_shift
        matrix = b + slot * stride_slot
        acc = _product(t, own, matrix, 0, n, N, first, rows, rank, T, R, BM, BN, SPLITS, P)
        if P == 1:
            y = tl.load(raw + row[:, None] * N + n[None, :], mask=live & (n < N)[None, :], other=0.0)
            value = activate(y.to(tl.float32) + acc, ACT)
        else:
            more = _product(t, own, matrix + N * R, 1, n, N, first, rows, rank, T, R, BM, BN, SPLITS, P)
            both = unit % blocks * (2 * BN) + tl.arange(0, 2 * BN)  # rows of gate and up alternate
            y = tl.load(raw + row[:, None] * (2 * N) + both[None, :], mask=live & (both < 2 * N)[None, :], other=0.0)
            gate, up = tl.split(tl.reshape(y, (BM, BN, 2)))
            value = gate_with(gate.to(tl.float32) + acc, up.to(tl.float32) + more, ACT)
        at = out + row[:, None] * N + n[None, :]
        tl.store(at, value.to(y.dtype), mask=live & (n < N)[None, :])


def shrink(
    x: Tensor, slots: Slots, work: Work, *, sumsq: Tensor | None = None, eps: float = 0.0, out: Tensor
) -> Tensor:
    """Write A times the rows of `x [T, K]` with an adapter, for `expand`, to the scratch `out` float32; returns it.

    sumsq `[sums, T]` float32: of the norm before the projection, if there is one."""
    tokens, depth = x.shape
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    rank, parts = slots.rank, len(slots.widths)
    few = tokens <= FEW_TOKENS
    block, step = min(32, rank), 128 if few else 64
    splits = splits_of(tokens, depth)
    each = -(-depth // splits // step) * step
    grid = max_items(tokens, len(slots.a)), parts * (rank // block), splits
    _shrink_kernel[grid](
        x, sumsq, 0 if sumsq is None else sumsq.stride(0), eps, work.order, work.items, work.counts, slots.a,
        slots.a.stride(0), out, tokens, depth, each, PARTS=0 if sumsq is None else len(sumsq), R=rank, RB=block,
        BM=tile_rows(tokens), BK=step, num_warps=4, num_stages=4, **pdl_options(),
    )  # fmt: skip
    return out


class _Tile(NamedTuple):
    width: int  # Output columns of a unit of `expand`.
    warps: int
    waves: int  # Programs per SM.


FEW, MANY = _Tile(128, 4, 8), _Tile(64, 4, 8)


def _programs(tokens: int, slots: Slots, blocks: int, tile: _Tile) -> tuple[int]:
    here = gpu()
    sms = 4 if here is None else here.sms
    return (min(max_items(tokens, len(slots.a)) * blocks, sms * tile.waves),)


def expand(shrunk: Tensor, slots: Slots, work: Work, y: Tensor, depth: int) -> Tensor:
    """Add B times what `shrink` wrote to the rows of `y [T, sum(n)]` with an adapter. depth: the projection's K."""
    tokens, tile = len(y), FEW if len(y) <= FEW_TOKENS else MANY
    sizes = (*slots.widths, 0, 0)[:3]
    blocks = sum(-(-n // tile.width) for n in slots.widths)
    _expand_kernel[_programs(tokens, slots, blocks, tile)](
        shrunk, slots.shift, 0 if slots.shift is None else slots.shift.stride(0), slots.b, slots.b.stride(0),
        work.order, work.items, work.counts, y, y.stride(0), tokens, *sizes, R=slots.rank, BM=tile_rows(tokens),
        BN=tile.width, SPLITS=splits_of(tokens, depth), P=len(slots.widths), num_warps=tile.warps, num_stages=2,
        **pdl_options(),
    )  # fmt: skip
    return y


def expand_activated(
    shrunk: Tensor, slots: Slots, work: Work, raw: Tensor, *, activation: str, out: Tensor, depth: int
) -> Tensor:
    """Write the activation of raw plus B times what `shrink` wrote to the live rows of `out [T, I]`.

    raw `[T, 2 I]` has columns of gate and up in turn if there are two parts; `[T, I]` if there is one."""
    tokens, tile = len(out), FEW if len(out) <= FEW_TOKENS else MANY
    _activate_kernel[_programs(tokens, slots, -(-slots.widths[0] // tile.width), tile)](
        shrunk, slots.shift, 0 if slots.shift is None else slots.shift.stride(0), slots.b, slots.b.stride(0),
        work.order, work.items, work.counts, raw, out, tokens, slots.widths[0], R=slots.rank, BM=tile_rows(tokens),
        BN=tile.width, SPLITS=splits_of(tokens, depth), P=len(slots.widths), ACT=activation, num_warps=tile.warps,
        num_stages=2, **pdl_options(),
    )  # fmt: skip
    return out
