"""Persistent matrix product `out[M, N] = a[M, K] @ weight[N, K].T` for Hopper, and the pieces its fused variants share.

Every operand arrives through a host-side TMA descriptor, so a launch allocates nothing and can be captured. The grid is
`num_sms` programs that walk the tiles; the real token count may live in device memory, and then tiles past it are
skipped.

Two shapes of one loop:

- many tokens: tokens are the rows of the MMA, one program per SM, deep TMA pipeline;
- few tokens (`swap`): 64 or more rows of the weight are the left operand and the tokens its columns, so 8 tokens fill
  an MMA, and `split` programs share one tile's depth so that every SM streams weights. Partial sums meet in a workspace
  and are added in a fixed order by whichever program arrives last: the result does not depend on timing.
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels import tuned
from weft.kernels.gemm_config import SPECIAL, GemmConfig


class Workspace(NamedTuple):
    """Scratch of the split products: one per stream that runs GEMMs, allocated before capture."""

    partial: Tensor
    """[...] float32"""
    arrived: Tensor
    """[tiles] int32, zero between launches"""


def workspace(device: torch.device | str, elements: int = 1 << 24, tiles: int = 1 << 13) -> Workspace:
    return Workspace(
        torch.empty(elements, dtype=torch.float32, device=device), torch.zeros(tiles, dtype=torch.int32, device=device)
    )


@functools.cache
def _has_special() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def choose(num_tokens: int, features: int, depth: int, num_sms: int) -> GemmConfig:
    """The configuration for a product of `num_tokens` rows: a measured one if the shape is known, else by rule."""
    if (measured := tuned.lookup(num_tokens, features, depth)) is not None:
        return measured
    if num_tokens <= 128:
        tokens = max(16, triton.next_power_of_2(num_tokens))
        tiles = triton.cdiv(features, 64)
        steps = triton.cdiv(depth, 128)
        # the smallest split whose last wave is nearly full: partial sums cost traffic
        per_sm = 2
        slots = per_sm * num_sms
        fill = {s: tiles * s / (triton.cdiv(tiles * s, slots) * slots) for s in (1, 2, 4, 8) if s * 4 <= steps}
        split = next((s for s in fill if fill[s] >= 0.9), max(fill, key=lambda s: fill[s], default=1))
        return GemmConfig(tokens, 64, 128, 4 if tokens <= 32 else 3, 4, 8, split, True, per_sm, 1, ahead=4)
    if triton.cdiv(num_tokens, 128) * triton.cdiv(features, 256) < num_sms:
        return GemmConfig(128, 128, 64, 4, 8 if num_tokens > 256 else 4, 8, 1, False, 1, 1)
    return SPECIAL if _has_special() else GemmConfig(128, 256, 64, 3, 8)


@triton.jit
def begin(PDL: tl.constexpr):
    """Wait until the kernel before this one has finished and its results are visible (dependent launch)."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start, as far as there is room, and prefetch; its own `begin` waits for this one's end.

    Early release is not better: what the next kernel prefetches would be evicted before it is read.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(weights, row, col, N, K, BN: tl.constexpr, WIDTH: tl.constexpr):
    """Ask the L2 for `WIDTH` columns of `BN` rows of the weight: they do not depend on the kernel before this one."""
    rows = row + tl.arange(0, BN)
    cols = col + tl.arange(0, WIDTH // 64) * 64  # 128 bytes each
    at = tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + tl.minimum(cols, K - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [weights + at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_of(unit, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile index -> (token tile, feature tile): `GROUP` token tiles are walked before the next feature tile."""
    group = unit // (GROUP * tiles_n)
    first = group * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    inside = unit % (GROUP * tiles_n)
    return first + inside % size, inside // size


@triton.jit
def ahead(weights, M, N, K, share, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
          SPLIT: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Prefetch the first `AHEAD` steps of this program's first tile."""
    unit = tl.program_id(0)
    _, tile_n = tile_of(unit // SPLIT, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    prefetch(weights, tile_n * BN, unit % SPLIT * share * BK, N, K, BN, AHEAD * BK)


@triton.jit
def live_tokens(count, M, HAS_COUNT: tl.constexpr):
    """Rows to compute: the launch's M, or the smaller count in device memory."""
    if HAS_COUNT:
        return tl.minimum(tl.load(count), M)
    else:
        return M


@triton.jit
def accumulate(a, w, row, col, first, last, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr):
    """Sum of steps [first, last) of one tile: `[BM, BN]` float32, or its transpose with SWAP."""
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
def meet(acc, partial, arrived, tile, part, SPLIT: tl.constexpr):
    """Leave this part's sum; the last of a tile's parts gets the total, added in order. Returns (total, is_last)."""
    ROWS: tl.constexpr = acc.shape[0]
    COLS: tl.constexpr = acc.shape[1]
    at = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    base = partial + tile.to(tl.int64) * (SPLIT * ROWS * COLS)
    tl.store(base + part * (ROWS * COLS) + at, acc)
    tl.debug_barrier()  # every thread's store precedes the release below
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
    """Slice INDEX of COUNT equal column slices of a register tile."""
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
def row_scale(sumsq, rows, live, stride, width, eps, PARTS: tl.constexpr):
    """1 / rms of `rows` from partial sums of squares `[parts, tokens]`, added in order of the parts."""
    BLOCK: tl.constexpr = triton.next_power_of_2(PARTS)
    part = tl.arange(0, BLOCK)
    mask = (part < PARTS)[:, None] & (rows < live)[None, :]
    sums = tl.load(sumsq + part[:, None] * stride + rows[None, :], mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(sums, axis=0) / width + eps)


@triton.jit(do_not_specialize=["M"])
def _matmul_kernel(
    a, w, weights, out, partial, arrived, count, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, SLICES: tl.constexpr, HAS_COUNT: tl.constexpr, FLATTEN: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    share = tl.cdiv(steps, SPLIT)
    if AHEAD > 0:
        ahead(weights, M, N, K, share, BM, BN, BK, GROUP, SPLIT, AHEAD)
    begin(PDL)
    live = live_tokens(count, M, HAS_COUNT)
    tiles_m = tl.cdiv(live, BM)
    for unit in tl.range(tl.program_id(0), tiles_m * tiles_n * SPLIT, tl.num_programs(0), flatten=FLATTEN):
        tile = unit // SPLIT
        part = unit % SPLIT
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
        first = part * share
        acc = accumulate(a, w, tile_m * BM, tile_n * BN, first, tl.minimum(first + share, steps), BM, BN, BK, SWAP)
        done = True
        if ONCE:
            release(PDL)
        if SPLIT > 1:
            acc, done = meet(acc, partial, arrived, tile, part, SPLIT)
        if done:
            total = tl.trans(acc) if SWAP else acc
            for s in tl.static_range(SLICES):
                piece = columns(total, s, SLICES)
                out.store([tile_m * BM, tile_n * BN + s * (BN // SLICES)], piece.to(OUT))
    release(PDL)


TORCH_TO_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


_dependent = True


@contextmanager
def dependent_launch(allowed: bool) -> Iterator[None]:
    """Launches inside start early behind the kernel before them on their stream, or, if not `allowed`, do not."""
    global _dependent
    before, _dependent = _dependent, allowed
    try:
        yield
    finally:
        _dependent = before


@functools.cache
def _has_dependent_launch() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def pdl_options() -> dict[str, bool]:
    """Launch options of dependent launch, where the GPU has it. Kernels launched so must call `begin` first of all."""
    return {"PDL": True, "launch_pdl": True} if _dependent and _has_dependent_launch() else {"PDL": False}


class Launch(NamedTuple):
    """What every product needs besides its operands."""

    grid: tuple[int, ...]
    config: GemmConfig
    split: int
    options: dict[str, int | bool]


def plan_launch(num_tokens: int, features: int, depth: int, config: GemmConfig | None, num_sms: int) -> Launch:
    config = config or choose(num_tokens, features, depth, num_sms)
    steps = triton.cdiv(depth, config.depth)
    split = config.split
    while split > 1 and triton.cdiv(steps, split) * (split - 1) >= steps:  # no part may be empty
        split -= 1
    units = triton.cdiv(num_tokens, config.tokens) * triton.cdiv(features, config.features) * split
    grid = min(num_sms * config.per_sm, units)
    options = {
        "AHEAD": config.ahead if pdl_options()["PDL"] else 0,
        "ONCE": grid == units,  # every program has one tile: it may release the next kernel before its epilogue
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    return Launch((grid,), config, split, options | pdl_options())


def check_operands(a: Tensor, weight: Tensor) -> None:
    if a.dtype != weight.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"operands must both be bfloat16 or float16, not {a.dtype} and {weight.dtype}")
    if a.shape[1] != weight.shape[1]:
        raise ValueError(f"depths differ: {tuple(a.shape)} and {tuple(weight.shape)}")
    if a.shape[1] % 8 or a.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("rows must be contiguous and a multiple of 16 bytes long")


def tiles(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A TMA view of a matrix in blocks of `rows x cols`."""
    return TensorDescriptor.from_tensor(tensor, [rows, cols])


def check_workspace(space: Workspace | None, launch: Launch, num_tokens: int, features: int) -> Workspace | None:
    if launch.split == 1:
        return None
    c = launch.config
    count = triton.cdiv(num_tokens, c.tokens) * triton.cdiv(features, c.features)
    if (
        space is None
        or space.arrived.numel() < count
        or space.partial.numel() < count * launch.split * (c.tokens * c.features)
    ):
        raise ValueError(f"a product split over {launch.split} programs needs a larger workspace ({count} tiles)")
    return space


def matmul(
    a: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """`out[M, N] = a[M, K] @ weight[N, K].T`; out bf16, fp16 or float32.

    num_tokens: optional int32 scalar in device memory; rows past it are left as they are (up to a tile).
    """
    check_operands(a, weight)
    m, k = a.shape
    n = weight.shape[0]
    launch = plan_launch(m, n, k, config, num_sms)
    if launch.config.special:
        if out.dtype == a.dtype:
            from weft.kernels.gemm_hopper import launch_product

            launch_product("plain", launch, a, weight, out, num_tokens)
            return out
        launch = plan_launch(m, n, k, GemmConfig(128, 256, 64, 3, 8), num_sms)
    c = launch.config
    ws = check_workspace(space, launch, m, n)
    _matmul_kernel[launch.grid](
        tiles(a, c.tokens, c.depth), tiles(weight, c.features, c.depth), weight,
        tiles(out, c.tokens, c.features // c.slices), ws.partial if ws else None, ws.arrived if ws else None,
        num_tokens, m, n, k,
        BM=c.tokens, BN=c.features, BK=c.depth, GROUP=c.group, SPLIT=launch.split, SWAP=c.swap, SLICES=c.slices,
        HAS_COUNT=num_tokens is not None, FLATTEN=launch.split == 1, OUT=TORCH_TO_TRITON[out.dtype],
        **launch.options,
    )  # fmt: skip
    return out
