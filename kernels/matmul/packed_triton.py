"""GEMMs of 4- and 8-bit weights in plain Triton, for up to a few hundred tokens, with the epilogues of `gemm_triton`.
Activations already contain the weight of the preceding norm (`times_norm`).

Weight rows are the left operand and tokens the columns of the MMA. Codes become 16-bit integers in registers, which is
exact; a group's sum is scaled in float32, and lows multiply the group's sum of activations. Programs may share a tile's
K as in `gemm_triton`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.formats.packed_weight import PackedWeight
from weft.kernels.matmul.gemm_launch import Launch, Workspace, check_workspace
from weft.kernels.matmul.gemm_tiles import join_splits, live_tokens, row_scale, tile_of
from weft.kernels.matmul.packed_epilogues import finish_gated, finish_heads, finish_linear, finish_residual


def _unpacking(magic: int, one: int, minus: int, type_: str) -> tl.constexpr:
    """Return PTX that makes 16-bit numbers of the low and the high halves of two bytes. The bits of a code are the last
    of a mantissa (`magic`), from which a constant (`minus`) is subtracted, exactly."""
    bits, factor, addend = (f"0x{value:04x}{value:04x}" for value in (magic, one, minus))
    text = f".reg .b32 t, u, q, r; mov.b32 q, {factor}; mov.b32 r, {addend};"
    text += "prmt.b32 t, $2, 0, 0x4140; shr.b32 u, t, 4;"
    for source, out in (("t", 0), ("u", 1)):
        text += f"lop3.b32 {source}, {source}, 0x000f000f, {bits}, 0xea; fma.rn.{type_} ${out}, {source}, q, r;"
    return tl.constexpr("{ " + text + "}")


_FROM_0_BF16, _FROM_8_BF16 = (_unpacking(0x4300, 0x3F80, 0xC300 + centre, "bf16x2") for centre in (0, 8))
_FROM_0_FP16, _FROM_8_FP16 = (_unpacking(0x6400, 0x3C00, 0xE400 + centre, "f16x2") for centre in (0, 8))


@triton.jit
def _halves(codes, CENTRE: tl.constexpr, DTYPE: tl.constexpr, FAST: tl.constexpr):
    """Return the low and high halves of bytes minus the centre, exactly."""
    if FAST and (CENTRE == 0 or CENTRE == 8):
        if DTYPE.is_bf16():
            return tl.inline_asm_elementwise(
                _FROM_0_BF16 if CENTRE == 0 else _FROM_8_BF16, "=r,=r,r", [codes],
                dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                _FROM_0_FP16 if CENTRE == 0 else _FROM_8_FP16, "=r,=r,r", [codes],
                dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        return _integers(codes & 15, CENTRE, DTYPE), _integers(codes >> 4, CENTRE, DTYPE)


@triton.jit
def _integers(codes, CENTRE: tl.constexpr, DTYPE: tl.constexpr):
    """Return codes minus the centre, exactly."""
    return (codes.to(tl.int16) - CENTRE).to(tl.float32).to(DTYPE)


@triton.jit
def _operand(x, rows, first, live, K, SPAN: tl.constexpr):
    """Load `[SPAN, BM]` activations. They go straight to shared memory: a norm's weight applied here would send them
    through registers in each step."""
    at = first + tl.arange(0, SPAN)
    mask = (at < K)[:, None] & (rows < live)[None, :]
    return tl.load(x + rows.to(tl.int64)[None, :] * K + at[:, None], mask=mask, other=0.0)


@triton.jit
def _factor(of, group, cols, padded):
    """Load a group's scales or lows, `[BN, 1]` float32."""
    return tl.load(of + group * padded + cols).to(tl.float32)[:, None]


@triton.jit
def _sums(y, BN: tl.constexpr):
    """Return each token's sum of activations for all rows, `[BN, BM]`: the tensor cores add them up."""
    return tl.dot(tl.full([BN, y.shape[0]], 1.0, y.dtype), y)


@triton.jit
def accumulate_packed(
    x, codes, scale, low, row, col, live, K, steps, padded, first, last,
    BM: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    CENTRE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Sum steps [first, last) of one tile: `[BN, BM]` float32."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = 16 * BITS  # Bytes of a row of a block.
    rows = row + tl.arange(0, BM)
    cols = col + tl.arange(0, BN)
    place = codes + (cols // 64).to(tl.int64)[:, None] * (steps * 64 * WIDTH) + (cols % 64)[:, None] * WIDTH
    acc = tl.zeros([BN, BM], tl.float32)
    if GROUP == 128:  # Factors are loaded one step early.
        next_scale = _factor(scale, first, cols, padded)
        if low is not None:
            next_low = _factor(low, first, cols, padded)
    for step in range(first, last):
        if GROUP == 128:
            s0 = next_scale
            next_scale = _factor(scale, tl.minimum(step + 1, last - 1), cols, padded)
            if low is not None:
                l0 = next_low
                next_low = _factor(low, tl.minimum(step + 1, last - 1), cols, padded)
        for pair in tl.static_range(64 // SPAN):
            k = step * 128 + pair * (2 * SPAN)
            if GROUP < 128:
                group = k // GROUP
                after = (k + SPAN) // GROUP
                s0 = _factor(scale, group, cols, padded)
                s1 = _factor(scale, after, cols, padded)
                if low is not None:
                    l0 = _factor(low, group, cols, padded)
                    l1 = _factor(low, after, cols, padded)
            y0 = _operand(x, rows, k, live, K, SPAN)
            y1 = _operand(x, rows, k + SPAN, live, K, SPAN)
            own = place + step * (64 * WIDTH) + (pair * SPAN * BITS // 4 + tl.arange(0, SPAN))[None, :]
            if BITS == 4:
                w0, w1 = _halves(tl.load(own), CENTRE, DTYPE, FAST)
            else:
                w0 = _integers(tl.load(own), CENTRE, DTYPE)
                w1 = _integers(tl.load(own + SPAN), CENTRE, DTYPE)
            if GROUP == 128:
                acc += tl.dot(w1, y1, tl.dot(w0, y0)) * s0
                if low is not None:
                    acc += (_sums(y0, BN) + _sums(y1, BN)) * l0
            else:
                acc += tl.dot(w0, y0) * s0
                acc += tl.dot(w1, y1) * s1
                if low is not None:
                    acc += _sums(y0, BN) * l0
                    acc += _sums(y1, BN) * l1
    return acc


@triton.jit
def _prefetch(codes, tile, tiles_n, steps, share, part, BN: tl.constexpr, BITS: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch a tile's first `AHEAD` steps into L2: they do not depend on the previous kernel."""
    block = tile * (BN // 64) + tl.arange(0, BN // 64)
    line = tl.arange(0, AHEAD * 8 * BITS) * 128
    first = tl.minimum(part * share, tl.maximum(steps - AHEAD, 0))
    at = (tl.minimum(block, tl.cdiv(tiles_n * BN, 64) - 1).to(tl.int64) * steps + first)[:, None] * (1024 * BITS)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [codes + at + line[None, :]], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "layer", "stride_sumsq"])
def packed_kernel(
    a, codes, scales, low, partial, arrived, count, M, N, K, steps, padded, x, out,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUPS: tl.constexpr, SPLIT: tl.constexpr,
    SLICES: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, ONCE: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr, CENTRE: tl.constexpr, FAST: tl.constexpr,
    sumsq=None, stride_sumsq=None, normed=None, next_norm=None, eps=None, bias=None, rotary=None, positions=None,
    slots=None, kv=None, layer=None, layers=None, q_out=None, q_norm=None, k_norm=None, PARTS: tl.constexpr = 0,
    HQ: tl.constexpr = None, HKV: tl.constexpr = None, D: tl.constexpr = None, PAGE: tl.constexpr = None, factor=None,
    ACT: tl.constexpr = "", SOFTCAP: tl.constexpr = 0.0,
):  # fmt: skip
    """As `gemm_triton.product_kernel`."""
    tiles_n = tl.cdiv(N, BN)
    share = tl.cdiv(steps, SPLIT)
    if AHEAD > 0:
        unit = tl.program_id(0)
        _, tile_n = tile_of(unit // SPLIT, tl.cdiv(M, BM), tiles_n, GROUPS)
        _prefetch(codes, tile_n, tiles_n, steps, share, unit % SPLIT, BN, BITS, AHEAD)
    begin(PDL)
    live = live_tokens(count, M)
    tiles_m = tl.cdiv(live, BM)
    for unit in range(tl.program_id(0), tiles_m * tiles_n * SPLIT, tl.num_programs(0)):
        tile = unit // SPLIT
        part = unit % SPLIT
        tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUPS)
        first = part * share
        acc = accumulate_packed(a, codes, scales, low, tile_m * BM, tile_n * BN, live, K, steps, padded, first,
                                tl.minimum(first + share, steps), BM, BN, BITS, SPAN, GROUP, CENTRE, FAST)  # fmt: skip
        done = True
        if ONCE:
            release(PDL)
        if SPLIT > 1:
            acc, done = join_splits(acc, partial, arrived, tile, part, SPLIT)
        if done:
            total = tl.trans(acc)
            scale = None
            if PARTS > 0:
                rows = tile_m * BM + tl.arange(0, BM)
                scale = row_scale(sumsq, rows, live, stride_sumsq, K, eps, PARTS)
            if KIND == "residual":
                finish_residual(
                    total, x, out, bias, sumsq, stride_sumsq, normed, next_norm, live, tile_m, tile_n, N, BM, BN,
                    SLICES, OUT,
                )  # fmt: skip
            if KIND == "gate_up":
                finish_gated(total, scale, bias, out, tile_m, tile_n, N, ACT, BM, BN, SLICES, OUT)
            if KIND == "linear":
                finish_linear(total, scale, bias, factor, out, tile_m, tile_n, N, ACT, SOFTCAP, BM, BN, SLICES, OUT)
            if KIND == "qkv":
                rows = tile_m * BM + tl.arange(0, BM)
                finish_heads(total, scale, rows, live, tile_n, N, eps, bias, rotary, positions, slots, kv, layer,
                             layers, q_out, q_norm, k_norm, HQ, HKV, D, PAGE, BN, OUT)  # fmt: skip
    release(PDL)


@triton.jit
def widen_kernel(codes, scale, low, norm, out, N, K, steps, padded, BITS: tl.constexpr, SPAN: tl.constexpr,
                 GROUP: tl.constexpr, CENTRE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Write the numbers of one block, times the norm's weight, rounded once."""
    WIDTH: tl.constexpr = 16 * BITS
    begin(PDL)
    step = tl.program_id(0)
    block = tl.program_id(1)
    rows = block * 64 + tl.arange(0, 64)
    at = tl.arange(0, 128)
    if BITS == 4:  # Two columns read a byte.
        byte = at // (2 * SPAN) * SPAN + at % SPAN
    else:
        byte = at
    own = codes + (block.to(tl.int64) * steps + step) * (64 * WIDTH) + (tl.arange(0, 64) * WIDTH)[:, None]
    c = tl.load(own + byte[None, :]).to(tl.int32)
    if BITS == 4:
        c = (c >> (at // SPAN % 2 * 4)[None, :]) & 15
    cols = step * 128 + at
    group = (cols // GROUP)[None, :] * padded + rows[:, None]
    y = (c - CENTRE).to(tl.float32) * tl.load(scale + group).to(tl.float32)
    if low is not None:
        y += tl.load(low + group).to(tl.float32)
    if norm is not None:
        y *= tl.load(norm + cols, mask=cols < K, other=0.0)[None, :]
    mask = (rows < N)[:, None] & (cols < K)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * K + cols[None, :], y.to(out.dtype.element_ty), mask=mask)
    release(PDL)


@triton.jit
def _times_norm_kernel(x, norm, out, H, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + row * H + at, mask=at < H, other=0.0)
    weight = tl.load(norm + at, mask=at < H, other=0.0)
    tl.store(out + row * H + at, (y.to(tl.float32) * weight).to(y.dtype), mask=at < H)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _form(weight: PackedWeight) -> dict[str, Any]:
    return {"BITS": weight.bits, "SPAN": weight.span, "GROUP": weight.group, "CENTRE": weight.centre}


def launch_packed(
    kind: str, launch: Launch, a: Tensor, weight: PackedWeight, out: Tensor, num_tokens: Tensor | None,
    space: Workspace | None, x: Tensor | None = None, **fields: Any,
) -> None:  # fmt: skip
    """Run `packed_kernel` for a `kind`; `fields` are the epilogue's inputs."""
    c = launch.config
    m, n, k = a.shape[0], weight.rows, a.shape[1]
    width = c.features // c.slices
    ws = check_workspace(space, launch, m, n)

    def tiles(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols])

    packed_kernel[launch.grid](
        a, weight.codes, weight.scale, weight.low,
        ws.partial if ws else None, ws.arrived if ws else None, num_tokens, m, n, k, weight.codes.shape[1],
        weight.scale.shape[1], None if x is None else tiles(x, c.tokens, width),
        None if kind == "qkv" else tiles(out, c.tokens, width // 2 if kind == "gate_up" else width),
        q_out=out if kind == "qkv" else None, KIND=kind, BM=c.tokens, BN=c.features, GROUPS=c.group,
        SPLIT=launch.split, SLICES=c.slices, OUT=_DTYPES[out.dtype],
        FAST=not triton.knobs.runtime.interpret, **_form(weight), **fields, **launch.options,
    )  # fmt: skip


def times_norm(x: Tensor, norm: Tensor, out: Tensor) -> Tensor:
    """Write rows `x [T, H]` times a norm's weight `[H]` to `out`."""
    block = 1024
    _times_norm_kernel[(len(x), -(-x.shape[1] // block))](x, norm, out, x.shape[1], BLOCK=block, **pdl_options())
    return out


def widen(weight: PackedWeight, out: Tensor) -> Tensor:
    """Write the matrix times its norm to `out [rows, columns]`, as `unpack_weight`."""
    widen_kernel[weight.codes.shape[1], weight.codes.shape[0]](
        weight.codes, weight.scale, weight.low, weight.norm, out, weight.rows, weight.columns, weight.codes.shape[1],
        weight.scale.shape[1], **_form(weight), **pdl_options(),
    )  # fmt: skip
    return out
