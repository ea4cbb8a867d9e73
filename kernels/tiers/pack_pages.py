"""Packs and unpacks KV pages on a GPU (see `packed_page.PackedPage`), a few per launch.

A word is two scalars: 32 bits of the pool, a byte of codes, two bytes each of bases and lows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.formats.packed_page import ESCAPE, PackedPage

PAGES_PER_LAUNCH = 4  # Pages per launch: their numbers are its arguments.
TILE_WORDS = 4096  # Words per program: all rows of some columns.
WARPS = 4
PATCHES = 1024  # Escapes per program.


@triton.jit
def _page_of(i, p0, p1, p2, p3):
    return tl.where(i == 0, p0, tl.where(i == 1, p1, tl.where(i == 2, p2, p3))).to(tl.int64)


@triton.jit(do_not_specialize=["p0", "p1", "p2", "p3"])
def _pack_kernel(
    pool, cells, p0, p1, p2, p3,
    VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAPACITY: tl.constexpr, STRIDE: tl.constexpr,
    ESCAPES_AT: tl.constexpr, BASES_AT: tl.constexpr, CODES_AT: tl.constexpr, LOWS_AT: tl.constexpr,
    ESCAPE: tl.constexpr, ROWS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cell = cells + tl.program_id(2).to(tl.int64) * STRIDE
    count = cell.to(tl.pointer_type(tl.int32))
    escapes = (cell + ESCAPES_AT).to(tl.pointer_type(tl.int32))
    bases = (cell + BASES_AT).to(tl.pointer_type(tl.int16))
    lows = (cell + LOWS_AT).to(tl.pointer_type(tl.int16))
    block = tl.program_id(1)
    row = tl.arange(0, ROWS_PADDED)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < ROWS) & (column < COLUMNS)
    at = block * (ROWS * COLUMNS) + row * COLUMNS + column
    page = _page_of(tl.program_id(2), p0, p1, p2, p3)
    word = tl.load(pool + page * (VALUES // 2) + at, mask=mask, other=0)
    first, second = (word >> 7) & 255, (word >> 23) & 255
    first_base = tl.max(first, axis=0)[None, :]
    second_base = tl.max(second, axis=0)[None, :]
    base_at = block * COLUMNS + column
    tl.store(bases + base_at, (first_base | second_base << 8).to(tl.int16), mask=column < COLUMNS)
    first_below, second_below = first_base - first, second_base - second
    code = tl.minimum(first_below, ESCAPE) | tl.minimum(second_below, ESCAPE) << 4
    tl.store(cell + CODES_AT + at, code.to(tl.uint8), mask=mask)
    signs = ((word >> 8) & 0x80) | ((word >> 16) & 0x8000)
    tl.store(lows + at, ((word & 0x7F) | ((word >> 8) & 0x7F00) | signs).to(tl.int16), mask=mask)

    first_far, second_far = mask & (first_below >= ESCAPE), mask & (second_below >= ESCAPE)
    far = tl.sum(first_far.to(tl.int32)) + tl.sum(second_far.to(tl.int32))
    if far > CAPACITY:
        tl.atomic_add(count, far, sem="relaxed")
    elif far > 0:
        none = tl.zeros_like(word)
        place = tl.atomic_add(count + none, 1, mask=first_far, sem="relaxed")
        tl.store(escapes + place, (2 * at) << 8 | first, mask=first_far & (place < CAPACITY))
        place = tl.atomic_add(count + none, 1, mask=second_far, sem="relaxed")
        tl.store(escapes + place, (2 * at + 1) << 8 | second, mask=second_far & (place < CAPACITY))


@triton.jit(do_not_specialize=["p0", "p1", "p2", "p3"])
def _unpack_kernel(
    pool, cells, p0, p1, p2, p3,
    VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    BASES_AT: tl.constexpr, CODES_AT: tl.constexpr, LOWS_AT: tl.constexpr,
    ROWS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cell = cells + tl.program_id(2).to(tl.int64) * STRIDE
    bases = (cell + BASES_AT).to(tl.pointer_type(tl.int16))
    lows = (cell + LOWS_AT).to(tl.pointer_type(tl.int16))
    block = tl.program_id(1)
    row = tl.arange(0, ROWS_PADDED)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < ROWS) & (column < COLUMNS)
    at = block * (ROWS * COLUMNS) + row * COLUMNS + column
    base = tl.load(bases + block * COLUMNS + column, mask=column < COLUMNS, other=0).to(tl.int32)
    code = tl.load(cell + CODES_AT + at, mask=mask, other=0).to(tl.int32)
    low = tl.load(lows + at, mask=mask, other=0).to(tl.int32)
    first = ((base & 255) - (code & 15)) & 255
    second = (((base >> 8) & 255) - (code >> 4)) & 255
    signs = ((low & 0x80) << 8) | ((low & 0x8000) << 16)
    word = signs | (low & 0x7F) | ((low & 0x7F00) << 8) | first << 7 | second << 23
    page = _page_of(tl.program_id(2), p0, p1, p2, p3)
    tl.store(pool + page * (VALUES // 2) + at, word, mask=mask)


@triton.jit(do_not_specialize=["p0", "p1", "p2", "p3"])
def _patch_kernel(
    pool, cells, p0, p1, p2, p3,
    VALUES: tl.constexpr, CAPACITY: tl.constexpr, STRIDE: tl.constexpr, ESCAPES_AT: tl.constexpr,
    LOWS_AT: tl.constexpr, PATCHES: tl.constexpr,
):  # fmt: skip
    """Patch the scalars whose exponents are in the list; `pool` in 16 bits."""
    cell = cells + tl.program_id(1).to(tl.int64) * STRIDE
    count = tl.minimum(tl.load(cell.to(tl.pointer_type(tl.int32))), CAPACITY)
    i = tl.program_id(0) * PATCHES + tl.arange(0, PATCHES)
    escape = tl.load((cell + ESCAPES_AT).to(tl.pointer_type(tl.int32)) + i, mask=i < count, other=0)
    at, exponent = (escape >> 8) & 0xFFFFFF, escape & 255
    mask = (i < count) & (at < VALUES)
    low = tl.load(cell + LOWS_AT + at, mask=mask, other=0).to(tl.int32)
    page = _page_of(tl.program_id(1), p0, p1, p2, p3)
    value = (low & 0x7F) | ((low & 0x80) << 8) | exponent << 7
    tl.store(pool + page * VALUES + at, value.to(tl.int16), mask=mask)


def _tile(form: PackedPage) -> tuple[int, int, tuple[int, int]]:
    """Return (rows of a tile, its columns, programs along columns and blocks)."""
    rows = triton.next_power_of_2(form.rows)
    columns = form.width // 2
    block = min(triton.next_power_of_2(columns), max(1, TILE_WORDS // rows))
    return rows, block, (triton.cdiv(columns, block), form.blocks)


def _four(pages: Sequence[int]) -> tuple[int, ...]:
    return (*pages, *[0] * (PAGES_PER_LAUNCH - len(pages)))


def pack(form: PackedPage, pool: Tensor, pages: Sequence[int], cells: Tensor) -> None:
    """Pack pages of a pool into the first cells.

    pool `[pages, ...]` bf16, contiguous; pages: at most `PAGES_PER_LAUNCH`, in the layout `form`; cells `[>= pages,
    nbytes]` uint8, aligned to 16 bytes. A cell whose count exceeds the capacity does not hold a page."""
    rows, block, grid = _tile(form)
    cells[: len(pages), : form.escapes_at].zero_()
    _pack_kernel[(*grid, len(pages))](
        _words(pool), cells, *_four(pages), VALUES=form.values, ROWS=form.rows, COLUMNS=form.width // 2,
        CAPACITY=form.capacity, STRIDE=cells.stride(0), ESCAPES_AT=form.escapes_at, BASES_AT=form.bases_at,
        CODES_AT=form.codes_at, LOWS_AT=form.lows_at, ESCAPE=ESCAPE, ROWS_PADDED=rows, BLOCK=block,
        num_warps=WARPS,
    )  # fmt: skip


def unpack(form: PackedPage, cells: Tensor, pool: Tensor, pages: Sequence[int]) -> None:
    """Unpack the first cells, all of them packed, into these pages of the pool."""
    rows, block, grid = _tile(form)
    four = _four(pages)
    _unpack_kernel[(*grid, len(pages))](
        _words(pool), cells, *four, VALUES=form.values, ROWS=form.rows, COLUMNS=form.width // 2,
        STRIDE=cells.stride(0), BASES_AT=form.bases_at, CODES_AT=form.codes_at, LOWS_AT=form.lows_at,
        ROWS_PADDED=rows, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    _patch_kernel[(triton.cdiv(form.capacity, PATCHES), len(pages))](
        pool.view(-1).view(torch.int16), cells, *four, VALUES=form.values, CAPACITY=form.capacity,
        STRIDE=cells.stride(0), ESCAPES_AT=form.escapes_at, LOWS_AT=form.lows_at, PATCHES=PATCHES,
    )  # fmt: skip


def _words(pool: Tensor) -> Tensor:
    return pool.view(-1).view(torch.int32)
