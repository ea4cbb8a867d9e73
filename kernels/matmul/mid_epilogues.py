"""Epilogues of `mid_hopper`: for an unsplit tile, and for rows added from splits."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from weft.kernels.common.hopper import store_tile
from weft.kernels.matmul.gemm_hopper import page_rows, rotate_half


@gluon.jit
def row_scale(sumsq, row0, live, stride, width, eps, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """Return `[ROWS]` from the partial sums of squares of rows `row0 ..`, all fetched at once.

    A thread adds all sums of its row in order, so results equal those of `gemm_hopper` bit for bit."""
    BLOCK: gl.constexpr = gl.constexpr(1 << (PARTS - 1).bit_length())
    L: gl.constexpr = gl.BlockedLayout([BLOCK, 1], [1, 32], [1, 4], [1, 0])
    part = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, L))
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    mask = (part < PARTS)[:, None] & (rows < live)[None, :]
    sums = gl.load(sumsq + part[:, None] * stride + rows[None, :], mask=mask, other=0.0)
    return gl.rsqrt(gl.sum(sums, axis=0) / width + eps)


@gluon.jit
def _normed_rotated(
    y, scale, rows, live, col, positions, rotary, D: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr
):
    """Norm and rotate columns `col ..` of the QKV GEMM: `y [R, W]` float32 in layout L."""
    y = y * scale[:, None]
    at = col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, L))
    position = gl.load(positions + rows, mask=rows < live, other=0).to(gl.int64)
    cos_sin = gl.load(rotary + position[:, None] * D + (at % D)[None, :])
    return rotate_half(y, cos_sin, (at >= HEADS * D)[None, :])


@gluon.jit
def _write_heads(
    tile, rows, live, col, out, kv, slots, layer, layers,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Write 16-bit `tile [R, W]` in layout L to q or the pages."""
    at = col + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, L))
    page_row = page_rows(slots, rows, live, layer, layers, PAGE)
    is_v = (at >= (HQ + HKV) * D).to(gl.int32)
    real = (rows < live)[:, None]
    q_at = out + rows.to(gl.int64)[:, None] * (HQ * D) + at[None, :]
    gl.store(q_at, tile, mask=real & (at < HQ * D)[None, :])
    within = at - HQ * D + is_v * ((PAGE - 1) * HKV * D)
    kv_at = kv + page_row[:, None] * (HKV * D) + within[None, :]
    gl.store(kv_at, tile, mask=real & ((at >= HQ * D) & (at < (HQ + 2 * HKV) * D))[None, :])


@gluon.jit
def _silu(gate, up):
    """Like `gemm_activations.gate_with`, to the bit."""
    return gate * up / (1.0 + gl.exp(-gate))


@gluon.jit
def epilogue(
    acc, scale, io, desc, out, kv, row0, col, live, positions, rotary, slots, layer, layers,
    KIND: gl.constexpr, W: gl.constexpr, HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    DTYPE: gl.constexpr, L: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Run the epilogue of columns `col ..` of half an unsplit tile `acc [64, W]`; "residual" returns squares `[64]`."""
    LINE: gl.constexpr = gl.SliceLayout(1, L)
    squares = gl.zeros([64], gl.float32, layout=LINE)
    if KIND == "plain":
        if FIRST:
            tma.store_wait(0)  # of the previous tile: all pieces
        io.store(acc.to(DTYPE))
        fence_async_shared()
        store_tile(desc, [row0, col], io)
    if KIND == "residual":
        y = (io.load(L).to(gl.float32) + acc).to(DTYPE)
        io.store(y)
        fence_async_shared()
        store_tile(desc, [row0, col], io)
        squares = gl.sum(y.to(gl.float32) * y.to(gl.float32), axis=1)
    if KIND == "gate_up":
        y = acc * gl.convert_layout(scale, LINE)[:, None]
        gate, up = gl.split(gl.reshape(y, (64, W // 2, 2)))
        PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W // 2, 16])
        h = gl.convert_layout(_silu(gate, up).to(DTYPE), PAIRS)
        if FIRST:
            tma.store_wait(0)
        io.store(h)
        fence_async_shared()
        store_tile(desc, [row0, col // 2], io)
    if KIND == "qkv":
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
        rows = row0 + gl.arange(0, 64, layout=LINE)
        y = _normed_rotated(acc, gl.convert_layout(scale, LINE), rows, live, col, positions, rotary, D, HQ + HKV, L)
        io.store(y.to(DTYPE))
        tile = io.load(ROWS)
        slot_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
        _write_heads(tile, slot_rows, live, col, out, kv, slots, layer, layers, HQ, HKV, D, PAGE, ROWS)
    return squares


@gluon.jit
def add_splits(
    sums, shares, row0, tile_n, live, N, K, x, out, sumsq, stride_sumsq, eps, positions, rotary, slots, kv, layer,
    layers, KIND: gl.constexpr, W: gl.constexpr, SPLIT: gl.constexpr, PARTS: gl.constexpr, HQ: gl.constexpr,
    HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Add all splits, in order, of a tile half's rows whose bit is set in `shares`, and run their epilogue."""
    R: gl.constexpr = 32 if SPLIT == 2 else 16 if SPLIT <= 4 else 8
    LANES: gl.constexpr = W // 4 if W < 128 else 32
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    col = tile_n * W
    lane = gl.arange(0, W, layout=gl.SliceLayout(0, L))
    for piece in range(64 // R):
        if ((shares >> (piece % SPLIT)) & 1) == 1:
            inside = piece * R + gl.arange(0, R, layout=gl.SliceLayout(1, L))
            rows = row0 + inside
            total = gl.zeros([R, W], gl.float32, layout=L)
            for part in gl.static_range(SPLIT):
                at = sums + part * (64 * W) + inside[:, None] * W + lane[None, :]
                total += gl.load(at, cache_modifier=".cg")
            real = (rows < live)[:, None] & (col + lane < N)[None, :]
            at = rows.to(gl.int64)[:, None] * N + (col + lane)[None, :]
            if KIND == "plain":
                gl.store(out + at, total.to(DTYPE), mask=real)
            if KIND == "residual":
                y = (gl.load(x + at, mask=real, other=0.0).to(gl.float32) + total).to(DTYPE)
                gl.store(out + at, y, mask=real)
                squares = gl.sum(y.to(gl.float32) * y.to(gl.float32), axis=1)
                gl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)
            if KIND == "gate_up":
                scale = row_scale(sumsq, row0 + piece * R, live, stride_sumsq, K, eps, R, PARTS)
                y = total * gl.convert_layout(scale, gl.SliceLayout(1, L))[:, None]
                gate, up = gl.split(gl.reshape(y, (R, W // 2, 2)))
                h = _silu(gate, up).to(DTYPE)
                HALF: gl.constexpr = h.type.layout
                h_rows = row0 + piece * R + gl.arange(0, R, layout=gl.SliceLayout(1, HALF))
                h_col = col // 2 + gl.arange(0, W // 2, layout=gl.SliceLayout(0, HALF))
                h_at = out + h_rows.to(gl.int64)[:, None] * (N // 2) + h_col[None, :]
                gl.store(h_at, h, mask=(h_rows < live)[:, None] & (h_col < N // 2)[None, :])
            if KIND == "qkv":
                scale = row_scale(sumsq, row0 + piece * R, live, stride_sumsq, K, eps, R, PARTS)
                scale = gl.convert_layout(scale, gl.SliceLayout(1, L))
                y = _normed_rotated(total, scale, rows, live, col, positions, rotary, D, HQ + HKV, L)
                _write_heads(y.to(DTYPE), rows, live, col, out, kv, slots, layer, layers, HQ, HKV, D, PAGE, L)
