"""Where kernels find recurrent states, and the work lists of chunks.

A request's state lies in n pages of the KV pool, as units that never cross a page: one head of a recurrent state, or a
layer's whole convolution. A kernel reads unit u of row r at `places[u]` in page `read[r, places[u, 0]]` and writes to
`write[r, ...]`, which may be the same page: one program reads what it overwrites. Nothing is read at position 0.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 64  # Tokens of a block; blocks begin at absolute multiples, so that bits do not depend on how prompts are cut.
ROWS = tl.constexpr(32)
"""Rows of a GEMM's tile. From 64 rows on, Triton uses `wgmma` on a Hopper GPU. In scans Triton 3.6 then read operands
beyond their shared memory, or computed wrong values (measured on an H200; also triton-lang/triton#11366)."""
CHUNK_FIELDS, BLOCK_FIELDS, CHECKPOINT_FIELDS = 8, 4, 4


class StateTensor(NamedTuple):
    """One tensor of one layer's state in the pages of all requests."""

    pool: Tensor  # [pages, elements]: the whole KV pool in the tensor's dtype.
    places: Tensor  # [units, 2] int32: index among a request's n pages, first element in that page.


class StateTables(NamedTuple):
    """Pages of the states of an iteration's requests, in device memory; the same for all layers."""

    read: Tensor  # [R, n] int32
    write: Tensor  # [R, n] int32


class ChunkWork(NamedTuple):
    """An iteration's chunks in device memory, in buffers of a fixed size; the same for all layers."""

    chunks: Tensor  # [., 8] int32: see `chunk_lists`.
    blocks: Tensor  # [., 4] int32
    checkpoints: Tensor  # [., 4] int32
    counts: Tensor  # [2] int32: live chunks and blocks.
    pages: Tensor  # [., n] int32 pages of each checkpoint.


def unit_places(runs: Sequence[tuple[int, int, int]], units: int, unit_bytes: int, itemsize: int) -> NDArray[np.int32]:
    """Return `places [units, 2]` of a tensor whose bytes lie in `runs` (page index, first byte, bytes).

    Raises `ValueError` if a unit crosses a page: the pages are too small for the kernels."""
    places: list[tuple[int, int]] = []
    for page, begin, size in runs:
        if size % unit_bytes:
            raise ValueError(f"a state unit of {unit_bytes} bytes does not fit a page; use a larger --block-size")
        places += [(page, (begin + at) // itemsize) for at in range(0, size, unit_bytes)]
    if len(places) != units:
        raise ValueError(f"{len(places)} units of a state have places, not {units}")
    return np.array(places, np.int32).reshape(units, 2)


def chunk_lists(
    first_rows: NDArray[np.integer], queries: NDArray[np.integer], context: NDArray[np.integer],
    table_rows: NDArray[np.integer], checkpoint_rows: NDArray[np.integer] | None = None,
    checkpoint_tokens: NDArray[np.integer] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:  # fmt: skip
    """Return chunks `[c, 8]`, blocks `[b, 4]` and checkpoints `[e, 4]` of chunks of `queries` tokens after `context`.

    A chunk: first token row, tokens, context, table row, first block, blocks, first checkpoint and the one after the
    last. A block: first token row, tokens, chunk, tokens of the chunk before it. A checkpoint is the state of table row
    `checkpoint_rows[i]` after `checkpoint_tokens[i]` of its tokens: those tokens, how many of them are in its block, i,
    the block. Longest chunks are first. Raises `ValueError` for a checkpoint of a row without a chunk."""
    order = np.argsort(-np.asarray(queries, np.int64), kind="stable")
    first_rows, queries, context, table_rows = (
        np.asarray(values, np.int64)[order] for values in (first_rows, queries, context, table_rows)
    )
    before = context % BLOCK
    count = -(-(before + queries) // BLOCK)
    first_block = np.cumsum(count) - count
    chunk = np.repeat(np.arange(len(queries)), count)
    index = np.arange(len(chunk)) - first_block[chunk]
    begin = np.maximum(index * BLOCK - before[chunk], 0)
    end = np.minimum((index + 1) * BLOCK - before[chunk], queries[chunk])

    none = np.zeros(0, np.int64)
    rows = none if checkpoint_rows is None else np.asarray(checkpoint_rows, np.int64)
    tokens = none if checkpoint_tokens is None else np.asarray(checkpoint_tokens, np.int64)
    chunk_of = {int(row): i for i, row in enumerate(table_rows)}
    if missing := sorted(set(rows.tolist()) - set(chunk_of)):
        raise ValueError(f"rows {missing} have checkpoints but no chunk")
    own = np.array([chunk_of[row] for row in rows.tolist()], np.int64)
    by_place = np.lexsort((tokens, own))
    own, tokens = own[by_place], tokens[by_place]
    in_block = first_block[own] + (before[own] + tokens - 1) // BLOCK

    chunks = np.zeros((len(queries), CHUNK_FIELDS), np.int32)
    blocks = np.zeros((len(chunk), BLOCK_FIELDS), np.int32)
    checkpoints = np.zeros((len(rows), CHECKPOINT_FIELDS), np.int32)
    ranges = [np.searchsorted(own, np.arange(len(queries)), side) for side in ("left", "right")]
    for i, value in enumerate((first_rows, queries, context, table_rows, first_block, count, *ranges)):
        chunks[:, i] = value
    for i, value in enumerate((first_rows[chunk] + begin, end - begin, chunk, begin)):
        blocks[:, i] = value
    for i, value in enumerate((tokens, tokens - begin[in_block], by_place, in_block)):
        checkpoints[:, i] = value
    return chunks, blocks, checkpoints


def chunk_work(
    lists: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]], pages: NDArray[np.integer],
    device: torch.device | str,
) -> ChunkWork:  # fmt: skip
    """Return `chunk_lists` in new buffers of just their size; pages `[e, n]` of the checkpoints, in the given order."""
    counts = np.array([len(lists[0]), len(lists[1])], np.int32)
    values = (*(np.concatenate((of, np.zeros((1, of.shape[1]), np.int32))) for of in lists), counts)
    chunks, blocks, checkpoints, numbers = (torch.from_numpy(value).to(device) for value in values)
    return ChunkWork(
        chunks, blocks, checkpoints, numbers, torch.from_numpy(np.ascontiguousarray(pages, np.int32)).to(device)
    )


@triton.jit
def unit_at(pool, stride_page, places, unit, table, row, N):
    """Return the pointer to a unit of the state of a row of the table `[R, N]`."""
    page = tl.load(table + row * N + tl.load(places + 2 * unit)).to(tl.int64)
    begin = tl.load(places + 2 * unit + 1)
    return pool + (page * stride_page + tl.multiple_of(begin, 4))


@triton.jit
def before_checkpoint(checkpoints, blocks, e):
    """Return the block up to which whole blocks precede a checkpoint, and how many tokens of that block do.

    A scan loads this for each part of a chunk. Triton 3.6 drops the update of a block index that is carried from part
    to part."""
    block = tl.load(checkpoints + 4 * e + 3)
    some = tl.load(checkpoints + 4 * e + 1)
    whole = some == tl.load(blocks + 4 * block + 1)
    return block + whole.to(tl.int32), tl.where(whole, 0, some)


@triton.jit
def inside(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return whether indices are below SIZE; known when compiled if whole blocks cover it."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < SIZE


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), also accurate where that is small (Kahan's log1p)."""
    power = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + power
    return tl.where(x > 20.0, x, tl.where(one == 1.0, power, tl.log(one) * (power / (one - 1.0))))


@triton.jit
def live_rows(count, rows):
    """Return the rows to compute: the launch's, or fewer by a count in device memory."""
    if count is not None:
        return tl.minimum(tl.load(count), rows)
    else:
        return rows


@triton.jit
def rows_of(values, part, ROWS: tl.constexpr):
    """Return rows [part * ROWS, (part + 1) * ROWS) of a vector."""
    PARTS: tl.constexpr = values.shape[0] // ROWS
    apart = tl.reshape(values, (PARTS, ROWS))
    return tl.sum(tl.where(tl.arange(0, PARTS)[:, None] == part, apart, 0.0), axis=0)
