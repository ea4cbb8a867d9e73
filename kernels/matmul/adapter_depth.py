"""LoRA adapters on a GPU: further depth of a GEMM, `[x, t] [W, B]^T`, so that its epilogue stays what it is.

`shrink_terms` writes A times each row to the columns of the row's slot in `terms [T, C]`; the other columns are zero.
`b [N, C]` has B of every slot in the same columns. A GEMM with `More` also runs over the blocks of 64 columns that rows
of its tile use. Rows without an adapter add zeros, so they have the bits of the GEMM without adapters.

A times a row is not scaled by the norm before the projection: the epilogue scales the sum.

The GEMM may start while `shrink_terms` runs, and waits for it only when it reaches the further depth (dependent
launch). So nothing may be launched between the two.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.matmul.adapter_work import FEW_TOKENS, STEP_COLUMNS, column_blocks, max_items, tile_rows


class Work(NamedTuple):
    """Which rows have which adapter."""

    order: Tensor  # `[T]` int32 rows, sorted by adapter; rows without one are last.
    items: Tensor  # `[max, 4]` int32: see `adapter_work`.
    counts: Tensor  # `[2]` int32: items with an adapter, and all items.


class Steps(NamedTuple):
    """What tiles of a number of rows use of the further depth; see `adapter_work.tile_steps`."""

    blocks: Tensor  # `[tiles, C / 64]` int32: the blocks of columns that a tile uses come first.
    counts: Tensor  # `[tiles]` int32: how many.


class More(NamedTuple):
    """The further depth of a GEMM. C is a multiple of 64."""

    terms: Tensor  # `[T, C]` in the dtype of the GEMM's operands.
    b: Tensor  # `[N, C]`, as terms.
    steps: Mapping[int, Steps]  # By the rows of a tile.


def columns(slots: int, width: int) -> int:
    """Return C for this many slots of `width` columns each."""
    return column_blocks(slots, width) * STEP_COLUMNS


class Scratch(NamedTuple):
    """Memory of `shrink_terms`."""

    partial: Tensor  # `scratch_size` float32 numbers.
    arrived: Tensor  # int32, zero between launches.


def _splits_of(tokens: int, depth: int) -> int:
    """Return into how many parts `shrink_terms` divides the depth, to keep all SMs busy."""
    most, least = (16, 256) if tokens <= FEW_TOKENS else (16 if tokens <= 1024 else 8, 512)
    return max(1, min(most, depth // least))


def scratch_size(tokens: int, shapes: Iterable[tuple[int, int]]) -> int:
    """Return the size of `Scratch.partial` for up to that many tokens. shapes: (depth, width) of projections."""
    sizes = {min(tokens, FEW_TOKENS), min(tokens, 1024), tokens}
    return max(_splits_of(t, depth) * t * width for t in sizes for depth, width in shapes)


@triton.jit
def _terms_kernel(
    x, order, items, counts, a, stride_slot, shift, stride_shift, sumsq, stride_sumsq, eps, partial, arrived, terms,
    stride_terms, T, K, KS,
    W: tl.constexpr, BW: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    item = tl.program_id(0)
    if item < tl.load(counts):
        slot = tl.load(items + item * 4).to(tl.int64)
        first = tl.load(items + item * 4 + 1)
        rows = tl.load(items + item * 4 + 2)
        j = tl.program_id(1) * BW + tl.arange(0, BW)
        m = tl.arange(0, BM)
        row = tl.load(order + first + m, mask=m < rows, other=0).to(tl.int64)
        begins = tl.program_id(2) * KS
        ends = tl.minimum(begins + KS, K)
        k = begins + tl.arange(0, BK)
        source = x + row[:, None] * K + k[None, :]
        matrix = a + slot * stride_slot + j[None, :] * K + k[:, None]
        acc = tl.zeros([BM, BW], tl.float32)
        for at in range(begins, ends, BK):
            inside = at + tl.arange(0, BK) < ends
            left = tl.load(source, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
            right = tl.load(matrix, mask=(j < W)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
            source += BK
            matrix += BK
        done = True
        if SPLITS > 1:
            sums = partial + (first + m).to(tl.int64)[:, None] * W + j[None, :]
            live = (m < rows)[:, None] & (j < W)[None, :]
            stride = T * W
            tl.store(sums + tl.program_id(2).to(tl.int64) * stride, acc, mask=live)
            tl.debug_barrier()  # all threads store before the release below
            flag = arrived + item * tl.num_programs(1) + tl.program_id(1)
            done = tl.atomic_add(flag, 1, sem="acq_rel") == SPLITS - 1
            if done:
                acc = tl.zeros([BM, BW], tl.float32)
                for split in tl.static_range(SPLITS):
                    acc += tl.load(sums + split * stride, mask=live, other=0.0, cache_modifier=".cg")
                tl.store(flag, 0)
        if done:
            if shift is not None:  # it is not scaled by the norm, but the epilogue scales the whole sum
                squares = tl.zeros([BM], tl.float32)
                for part in range(PARTS):
                    squares += tl.load(sumsq + part * stride_sumsq + row, mask=m < rows, other=0.0)
                added = tl.load(shift + slot * stride_shift + j, mask=j < W, other=0.0).to(tl.float32)
                acc += added[None, :] * tl.sqrt(squares / K + eps)[:, None]
            target = terms + row[:, None] * stride_terms + slot * W + j[None, :]
            tl.store(target, acc.to(terms.dtype.element_ty), mask=(m < rows)[:, None] & (j < W)[None, :])


def shrink_terms(
    x: Tensor, a: Tensor, work: Work, terms: Tensor, scratch: Scratch, *, width: int, shift: Tensor | None = None,
    sumsq: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Write A times the rows of `x [T, K]` with an adapter to their columns of terms, and return it.

    a `[S, width * K]`: a slot has columns `s * width ..` of terms. Columns of other slots keep what they have, which
    must be zero. shift `[S, width]`: A times the bias of the norm before the projection; sumsq `[sums, T]` float32 and
    eps: of that norm."""
    tokens, depth = x.shape
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    few = tokens <= FEW_TOKENS
    block, step = min(64, max(16, triton.next_power_of_2(width))), 128 if few else 64
    splits = _splits_of(tokens, depth)
    each = -(-depth // splits // step) * step
    splits = -(-depth // each)
    grid = max_items(tokens, len(a)), -(-width // block), splits
    if scratch.arrived.numel() < grid[0] * grid[1]:
        raise ValueError(f"arrived needs {grid[0] * grid[1]} numbers")
    if shift is None:
        sumsq = None
    _terms_kernel[grid](
        x, work.order, work.items, work.counts, a, a.stride(0), shift, 0 if shift is None else shift.stride(0), sumsq,
        0 if sumsq is None else sumsq.stride(0), eps, *scratch, terms, terms.stride(0), tokens, depth, each, W=width,
        BW=block, BM=tile_rows(tokens), BK=step, SPLITS=splits, PARTS=0 if sumsq is None else len(sumsq), num_warps=4,
        num_stages=4, **pdl_options(),
    )  # fmt: skip
    return terms
