"""Shared device functions of the Triton GEMMs: tile order, sums over K, joining of splits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(weights, row, col, N, K, BN: tl.constexpr, WIDTH: tl.constexpr):
    """Prefetch `WIDTH` columns of `BN` weight rows into L2: they do not depend on the previous kernel."""
    rows = row + tl.arange(0, BN)
    cols = col + tl.arange(0, WIDTH // 64) * 64  # 128 bytes each
    at = tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + tl.minimum(cols, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weights + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_of(unit, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Map a tile index to (token tile, feature tile): `GROUP` token tiles are walked before the next feature tile."""
    group = unit // (GROUP * tiles_n)
    first = group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inside = unit % (GROUP * tiles_n)
    return first + inside % size, inside // size


@triton.jit
def uneven_tile_of(unit, tiles_m, tiles_n, GROUP: tl.constexpr, MORE: tl.constexpr):
    """`tile_of`, but with further depth (`MORE`) the token tiles of each feature tile begin with another one. Rows of
    many adapters are in few token tiles, which would be the tiles of few programs."""
    tile_m, tile_n = tile_of(unit, tiles_m, tiles_n, GROUP)
    if MORE > 0:
        first = tile_m // GROUP * GROUP
        tile_m = first + (tile_m - first + tile_n) % tl.minimum(tiles_m - first, GROUP)
    return tile_m, tile_n


@triton.jit
def prefetch_first(weights, M, N, K, share, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
          SPLIT: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Prefetch the first `AHEAD` steps of this program's first tile."""
    unit = tl.program_id(0)
    _, tile_n = tile_of(unit // SPLIT, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    prefetch(weights, tile_n * BN, unit % SPLIT * share * BK, N, K, BN, AHEAD * BK)


@triton.jit
def live_tokens(count, M):
    """Return the rows to compute: the launch's M, or the smaller count in device memory."""
    if count is not None:
        return tl.minimum(tl.load(count), M)
    else:
        return M


@triton.jit
def accumulate(a, w, row, col, first, last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr):
    """Sum steps [first, last) of one tile: `[BM, BN]` float32, or its transpose with SWAP."""
    if SWAP:
        acc = tl.zeros([BN, BM], tl.float32)
        for step in range(first, last):
            x = a.load([row, step * BK])
            y = w.load([col, step * BK])
            acc = tl.dot(y, x.T, acc)
    else:
        acc = tl.zeros([BM, BN], tl.float32)
        for step in range(first, last):
            x = a.load([row, step * BK])
            y = w.load([col, step * BK])
            acc = tl.dot(x, y.T, acc)
    return acc


@triton.jit
def accumulate_more(acc, a, w, steps, count, part, row, col, SPLIT: tl.constexpr, SWAP: tl.constexpr):
    """Add a split's share of the further depth (`adapter_depth.More`) to `accumulate`'s sum. steps: the tile's."""
    for i in range(part, count, SPLIT):
        at = tl.load(steps + i) * 64
        x = a.load([row, at])
        y = w.load([col, at])
        if SWAP:
            acc = tl.dot(y, x.T, acc)
        else:
            acc = tl.dot(x, y.T, acc)
    return acc


@triton.jit
def join_splits(acc, partial, arrived, tile, part, SPLIT: tl.constexpr):
    """Store this split's sum; a tile's last split gets the total, added in order. Returns (total, is_last)."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    base = partial + tile.to(tl.int64) * (SPLIT * ROWS * COLS)
    tl.store(base + part * (ROWS * COLS) + at, acc)
    tl.debug_barrier()  # all threads store before the release below
    before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
    is_last = before == SPLIT - 1
    total = tl.zeros([ROWS, COLS], tl.float32)
    if is_last:
        for other in tl.static_range(SPLIT):
            total += tl.load(base + other * (ROWS * COLS) + at, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return total, is_last


@triton.jit
def columns(acc, INDEX: tl.constexpr, COUNT: tl.constexpr):
    """Return slice INDEX of COUNT equal column slices of a register tile."""
    if COUNT == 1:
        return acc
    else:
        ROWS: tl.constexpr = acc.shape[0]
        WIDTH: tl.constexpr = acc.shape[1] // 2
        low, high = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, WIDTH)), (0, 2, 1)))
        if INDEX < COUNT // 2:
            return columns(low, INDEX, COUNT // 2)
        else:
            return columns(high, INDEX - COUNT // 2, COUNT // 2)


@triton.jit
def rotated(a, b, cos, sin):
    """Rotate pairs (a, b) by (cos, sin), float32.

    The roundings are written out. A compiler may fuse either product of `b * cos + a * sin` with the sum, and chose
    differently in different kernels: a row's bits followed the tiles."""
    return tl.fma(a, cos, -(b * sin)), tl.fma(b, cos, a * sin)


@triton.jit
def row_scale(sumsq, rows, live, stride, width, eps, PARTS: tl.constexpr):
    """Return 1 / rms of `rows` from partial sums of squares `[sums, tokens]`.

    Tiles of 128 rows add them in order, as `gemm_hopper` does, so that both have the same bits. For fewer rows it is
    faster to fetch all at once."""
    if rows.shape[0] >= 128:
        total = tl.load(sumsq + rows, mask=rows < live, other=0.0)
        for part in tl.static_range(1, PARTS):
            total += tl.load(sumsq + part * stride + rows, mask=rows < live, other=0.0)
    else:
        BLOCK: tl.constexpr = triton.next_power_of_2(PARTS)
        part = tl.arange(0, BLOCK)
        mask = (part < PARTS)[:, None] & (rows < live)[None, :]
        sums = tl.load(sumsq + part[:, None] * stride + rows[None, :], mask=mask, other=0.0)
        total = tl.sum(sums, axis=0)
    return tl.rsqrt(total / width + eps)
