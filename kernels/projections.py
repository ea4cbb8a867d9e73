"""The matrix products of a layer with what surrounds them as epilogues (twins: `reference.qkv_project` and its
siblings).

Norm weights are folded into the matrices (`pack.fold_norm`), so the RMS norm before a product is one scale per row,
applied to the accumulator. The scale comes from partial sums of squares `sumsq [parts, T] float32`: each feature tile
of the product before wrote one part; adding them in order keeps the result independent of timing.
"""

# Device functions carry no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gemm import (
    TORCH_TO_TRITON,
    Workspace,
    accumulate,
    ahead,
    begin,
    check_operands,
    check_workspace,
    columns,
    live_tokens,
    meet,
    plan_launch,
    release,
    row_scale,
    tile_of,
    tiles,
)
from weft.kernels.gemm_config import GemmConfig

EARLY = tl.constexpr(2048)
"""partial squares of a tile's rows up to which they are fetched before the loop over the depth: they arrive meanwhile.
More would take the loop's registers: a tile of 128 x 128 with 40 parts took thirty times as long."""


@triton.jit
def _head_scale(
    total, scale, bias, col, N, eps, INDEX: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """1 / rms of head INDEX of the COUNT heads in a tile: `[BM]`."""
    y = columns(total, INDEX, COUNT) * scale[:, None]
    tl.static_assert(y.shape[1] == D, "a head norm needs the whole head in one tile")
    if HAS_BIAS:
        at = col + tl.arange(0, D)
        y += tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
    return tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)


@triton.jit
def _cos_sin(rotary, position, rows, live, col, LAST: tl.constexpr, D: tl.constexpr, W: tl.constexpr):
    """(cos, sin) pairs of columns `col .. col + W` for each row: `[BM, W]`; nothing for the heads from LAST on."""
    at = col % D + tl.arange(0, W)
    mask = (rows < tl.where(col // D < LAST, live, 0))[:, None]
    return tl.load(rotary + position[:, None] * D + at[None, :], mask=mask, other=0.0)


@triton.jit
def _rotate(y, cos_sin, skip):
    """Rotate neighbour pairs of `y [BM, W]` float32 by (cos, sin) pairs; `skip` leaves them as they are."""
    BM: tl.constexpr = y.shape[0]
    W: tl.constexpr = y.shape[1]
    a, b = tl.split(tl.reshape(y, (BM, W // 2, 2)))
    cos, sin = tl.split(tl.reshape(cos_sin, (BM, W // 2, 2)))
    cos = tl.where(skip, 1.0, cos)
    return tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (BM, W))


@triton.jit(do_not_specialize=["M", "layer", "stride_sumsq"])
def _qkv_kernel(
    a, w, weights, partial, arrived, count, M, N, K,
    sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, layer, layers, q_out, q_norm, k_norm,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, HAS_COUNT: tl.constexpr, FLATTEN: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    HEAD: tl.constexpr = min(D, BN)
    W: tl.constexpr = min(WIDTH, HEAD)  # an epilogue slice lies within one head and is narrow: few live registers
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
            rows = tile_m * BM + tl.arange(0, BM)
            real = rows < live
            scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
            position = tl.load(positions + rows, mask=real, other=0).to(tl.int64)
            slot = tl.load(slots + rows, mask=real, other=0).to(tl.int64)
            page_row = (slot // PAGE * layers + layer) * (2 * PAGE) + slot % PAGE
            d = tl.arange(0, W)
            # no branches in here: the loops could not be fused otherwise. Masked accesses cost no traffic.
            for s in tl.static_range(BN // W):
                col = tile_n * BN + s * W
                head = col // D
                at = col % D + d
                is_v = (head >= HQ + HKV).to(tl.int32)
                y = columns(total, s, BN // W) * scale[:, None]
                if HAS_BIAS:
                    y += tl.load(bias + col + d, mask=col + d < N, other=0.0).to(tl.float32)[None, :]
                if HAS_NORM:
                    if s % (HEAD // W) == 0:
                        inverse = _head_scale(
                            total, scale, bias, col, N, eps, s // (HEAD // W), BN // HEAD, D, HAS_BIAS
                        )
                    weight = tl.load(q_norm + at, mask=at < tl.where(head < HQ, D, 0), other=0.0).to(tl.float32)
                    weight += tl.load(k_norm + at, mask=at < tl.where(head < HQ, 0, D), other=0.0).to(tl.float32)
                    y = tl.where(is_v == 0, y * inverse[:, None] * weight[None, :], y)
                cos_sin = _cos_sin(rotary, position, rows, live, col, HQ + HKV, D, W)
                y = _rotate(y, cos_sin, is_v != 0).to(OUT)
                target = q_out + rows.to(tl.int64)[:, None] * (HQ * D) + (col + d)[None, :]
                tl.store(target, y, mask=(rows < tl.where(head < HQ, live, 0))[:, None])
                row = page_row + is_v * PAGE
                kv_head = head - HQ - is_v * HKV
                target = kv + row[:, None] * (HKV * D) + (kv_head * D + at)[None, :]
                tl.store(target, y, mask=(rows < tl.where((head >= HQ) & (head < HQ + 2 * HKV), live, 0))[:, None])
    release(PDL)


@triton.jit(do_not_specialize=["M", "stride_sumsq"])
def _residual_kernel(
    a, w, weights, partial, arrived, count, M, N, K, x, out, sumsq, stride_sumsq,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, SLICES: tl.constexpr, HAS_COUNT: tl.constexpr, FLATTEN: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = BN // SLICES
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
            squares = tl.zeros([BM], tl.float32)
            for s in tl.static_range(SLICES):
                col = tile_n * BN + s * W
                y = (x.load([tile_m * BM, col]).to(tl.float32) + columns(total, s, SLICES)).to(OUT)
                out.store([tile_m * BM, col], y)
                squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
            rows = tile_m * BM + tl.arange(0, BM)
            tl.store(sumsq + tile_n * stride_sumsq + rows, squares, mask=rows < live)
    release(PDL)


@triton.jit(do_not_specialize=["M", "stride_sumsq"])
def _gate_up_kernel(
    a, w, weights, partial, arrived, count, M, N, K, out, sumsq, stride_sumsq, eps,
    PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, SLICES: tl.constexpr, HAS_COUNT: tl.constexpr, FLATTEN: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    W: tl.constexpr = BN // SLICES
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
        rows = tile_m * BM + tl.arange(0, BM)
        if BM * PARTS <= EARLY:
            scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
        acc = accumulate(a, w, tile_m * BM, tile_n * BN, first, tl.minimum(first + share, steps), BM, BN, BK, SWAP)
        done = True
        if ONCE:
            release(PDL)
        if SPLIT > 1:
            acc, done = meet(acc, partial, arrived, tile, part, SPLIT)
        if done:
            total = tl.trans(acc) if SWAP else acc
            if BM * PARTS > EARLY:
                scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
            for s in tl.static_range(SLICES):
                y = columns(total, s, SLICES) * scale[:, None]
                gate, up = tl.split(tl.reshape(y, (BM, W // 2, 2)))
                h = gate * up / (1.0 + tl.exp(-gate))  # as in gemm_hopper, to the bit
                out.store([tile_m * BM, (tile_n * BN + s * W) // 2], h.to(OUT))
    release(PDL)


def _parts(sumsq: Tensor) -> Tensor:
    """`[T]` or `[parts, T]` -> `[parts, T]`."""
    return sumsq if sumsq.dim() == 2 else sumsq[None]


def qkv_project(
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rotary: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv: Tensor,
    layer: int,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    out: Tensor,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """Norm, QKV matrix, bias, q/k norm, rotary embedding; q goes to `out [T, Hq, D]`, K and V into the pages of `kv`.

    sumsq `[parts, T]` float32; rotary `[positions, D/2, 2]` float32; positions and slot_mapping `[T]` int32 or int64;
    the slots of padding tokens lie in page 0.
    """
    check_operands(x, weight)
    if not (kv.is_contiguous() and out.is_contiguous() and rotary.is_contiguous()):
        raise ValueError("kv, out and rotary must be contiguous")
    m, k = x.shape
    n = weight.shape[0]
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    sumsq = _parts(sumsq)
    launch = plan_launch(m, n, k, config, num_sms)
    if q_norm is not None and launch.config.features < head_dim:
        launch = plan_launch(m, n, k, launch.config._replace(features=head_dim), num_sms)
    if launch.config.special and (q_norm is None or head_dim == 128):
        from weft.kernels.gemm_hopper import launch_product

        launch_product(
            "qkv", launch, x, weight, out, num_tokens, sumsq=sumsq, stride_sumsq=sumsq.stride(0), eps=eps, bias=bias,
            rotary=rotary, positions=positions, slots=slot_mapping, kv=kv, layer=layer, layers=layers, q_norm=q_norm,
            k_norm=k_norm, PARTS=sumsq.shape[0], HQ=num_heads, HKV=num_kv_heads, D=head_dim, PAGE=page_size,
            HAS_BIAS=bias is not None, HAS_NORM=q_norm is not None,
        )  # fmt: skip
        return out
    c = launch.config
    ws = check_workspace(space, launch, m, n)
    _qkv_kernel[launch.grid](
        tiles(x, c.tokens, c.depth), tiles(weight, c.features, c.depth), weight,
        ws.partial if ws else None, ws.arrived if ws else None, num_tokens, m, n, k,
        sumsq, sumsq.stride(0), eps, bias, rotary, positions, slot_mapping, kv, layer, layers, out, q_norm, k_norm,
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, PAGE=page_size, PARTS=sumsq.shape[0],
        HAS_BIAS=bias is not None, HAS_NORM=q_norm is not None, WIDTH=32 if c.features >= 128 else 64,
        BM=c.tokens, BN=c.features, BK=c.depth, GROUP=c.group, SPLIT=launch.split, SWAP=c.swap,
        HAS_COUNT=num_tokens is not None, FLATTEN=launch.split == 1, OUT=TORCH_TO_TRITON[x.dtype],
        **launch.options,
    )  # fmt: skip
    return out


def residual_project(
    a: Tensor,
    weight: Tensor,
    x: Tensor,
    *,
    out: Tensor,
    sumsq: Tensor,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`x + a @ weight.T` into `out` (may be `x` itself) and its partial sums of squares.

    sumsq `[max_parts, T]` float32 is scratch; returns out and the view `[parts, T]` of it that was written.
    """
    check_operands(a, weight)
    m, k = a.shape
    n = weight.shape[0]
    launch = plan_launch(m, n, k, config, num_sms)
    c = launch.config
    parts = triton.cdiv(n, c.features)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    if sumsq.shape[0] < parts or sumsq.stride(1) != 1:
        raise ValueError(f"sumsq needs {parts} contiguous rows")
    if c.special:
        from weft.kernels.gemm_hopper import launch_product

        launch_product("residual", launch, a, weight, out, num_tokens, x, sumsq=sumsq, stride_sumsq=sumsq.stride(0))
        return out, sumsq[:parts]
    ws = check_workspace(space, launch, m, n)
    width = c.features // c.slices
    _residual_kernel[launch.grid](
        tiles(a, c.tokens, c.depth), tiles(weight, c.features, c.depth), weight,
        ws.partial if ws else None, ws.arrived if ws else None, num_tokens, m, n, k,
        tiles(x, c.tokens, width), tiles(out, c.tokens, width), sumsq, sumsq.stride(0),
        BM=c.tokens, BN=c.features, BK=c.depth, GROUP=c.group, SPLIT=launch.split, SWAP=c.swap, SLICES=c.slices,
        HAS_COUNT=num_tokens is not None, FLATTEN=launch.split == 1, OUT=TORCH_TO_TRITON[x.dtype],
        **launch.options,
    )  # fmt: skip
    return out, sumsq[:parts]


def gate_up_project(
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """Norm, gate-up matrix `[2 I, H]` (rows alternate), SwiGLU -> `out [T, I]`. sumsq `[parts, T]` float32."""
    check_operands(x, weight)
    m, k = x.shape
    n = weight.shape[0]
    sumsq = _parts(sumsq)
    launch = plan_launch(m, n, k, config, num_sms)
    c = launch.config
    if c.special:
        from weft.kernels.gemm_hopper import launch_product

        launch_product(
            "gate_up", launch, x, weight, out, num_tokens, sumsq=sumsq, stride_sumsq=sumsq.stride(0), eps=eps,
            PARTS=sumsq.shape[0],
        )  # fmt: skip
        return out
    ws = check_workspace(space, launch, m, n)
    _gate_up_kernel[launch.grid](
        tiles(x, c.tokens, c.depth), tiles(weight, c.features, c.depth), weight,
        ws.partial if ws else None, ws.arrived if ws else None, num_tokens, m, n, k,
        tiles(out, c.tokens, c.features // c.slices // 2), sumsq, sumsq.stride(0), eps,
        PARTS=sumsq.shape[0],
        BM=c.tokens, BN=c.features, BK=c.depth, GROUP=c.group, SPLIT=launch.split, SWAP=c.swap, SLICES=c.slices,
        HAS_COUNT=num_tokens is not None, FLATTEN=launch.split == 1, OUT=TORCH_TO_TRITON[x.dtype],
        **launch.options,
    )  # fmt: skip
    return out


def sumsq_buffer(hidden: int, num_tokens: int, device: torch.device | str) -> Tensor:
    """Scratch `[parts, T]` float32 large enough for any configuration."""
    return torch.empty(triton.cdiv(hidden, 64), num_tokens, dtype=torch.float32, device=device)
