"""The FP8 GEMMs of an expert layer, and the permutation of rows to experts and back (see `experts`).

The rows copied into expert order are the previous GEMM's e4m3 output and scales. The norm's factor is copied with them
and applied in the epilogue, which quantizes each expert's hidden part. The kernel that adds a token's experts also
writes the next GEMM's operand.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import is_hopper
from weft.kernels.experts import fp8_experts_triton
from weft.kernels.experts.experts import MAX_PAD, TILE_FIELDS, add_experts, expert_rows, scatter_options, shared_gate
from weft.kernels.experts.fp8_experts_triton import PAIRS
from weft.kernels.experts.router import Choice
from weft.kernels.formats.fp8 import BLOCK, E4M3, Fp8Rows, Fp8Weight
from weft.kernels.formats.fp8_triton import power_of_two, saturated
from weft.kernels.matmul.fp8_projections import rows_buffer
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_tiles import live_tokens, row_scale

COLUMNS = 512  # Bytes of a row that one program copies at once.
SPECIAL = GemmConfig(128, 256, 128, 4, 4, special=True)  # The tiles of the warp-specialized kernel.


class Fp8ExpertSpace(NamedTuple):
    """Rows of one nano-batch in expert order; padding between experts is undefined."""

    rows: Fp8Rows  # R rows of H: the experts' input.
    factor: Tensor  # [R] float32: 1 / rms of each row.
    hidden: Fp8Rows  # R rows of I.
    outputs: Tensor  # [R, H] of 16 bits: the experts' output.
    place: Tensor  # [T, K] int32: the row of each choice.
    tiles: Tensor  # [tiles, TILE_FIELDS] int32
    number: Tensor  # [1] int32: number of tiles.


def expert_space(
    tokens: int, hidden: int, inter: int, count: int, top: int, dtype: torch.dtype, device: torch.device | str
) -> Fp8ExpertSpace:
    """Allocate space for `tokens` tokens with any routing and any tiles."""
    pairs = tokens * top
    rows = -(-(pairs + min(count, pairs) * (MAX_PAD - 1)) // MAX_PAD) * MAX_PAD

    def buffer(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    def eight(width: int) -> Fp8Rows:
        outputs = rows_buffer(rows, width, device)
        if outputs.values.device.type != "meta":  # padding is multiplied too, and discarded
            outputs.values.view(torch.uint8).zero_()
            outputs.scale.zero_()
        return outputs

    return Fp8ExpertSpace(
        eight(hidden), buffer(rows, kind=torch.float32), eight(inter), buffer(rows, hidden, kind=dtype),
        buffer(tokens, top), buffer(-(-pairs // 16) + min(count, pairs), TILE_FIELDS), buffer(1),
    )  # fmt: skip


@triton.jit(do_not_specialize=["T", "stride_sumsq", "stride_scale", "stride_out"])
def _scatter_kernel(
    x, scale, stride_scale, sumsq, stride_sumsq, experts, rank, counts, place, out, out_scale, stride_out, factor,
    tiles, number, num_tokens, T, H, eps, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BC: tl.constexpr, CHUNK: tl.constexpr,
    PAD: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Like `experts._scatter_kernel`, for bytes x `[T, H]` and their scales `[blocks, T]`, with each row's 1 / rms."""
    begin(PDL)
    release(PDL)
    live = live_tokens(num_tokens, T)
    first = tl.program_id(0) * TOKENS
    if (first >= live) & (first > 0):
        return
    row, k, real, to = expert_rows(
        experts, rank, counts, tiles, number, live, first, E, EP, K, KP, BT, TOKENS, CHUNK, PAD, GROUP, FIELDS
    )  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(place + row * K + k, to, mask=real)
        tl.store(factor + to, row_scale(sumsq, row, live, stride_sumsq, H, eps, PARTS), mask=real)
    begins = tl.program_id(1) * COLUMNS
    for left in tl.range(begins, tl.minimum(begins + COLUMNS, H), BC):
        column = left + tl.arange(0, BC)
        some = real[:, None] & (column < H)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * H + column[None, :], mask=some, other=0)
        tl.store(out + to.to(tl.int64)[:, None] * H + column[None, :], value, mask=some)
        block = left // 128 + tl.arange(0, BC // 128)
        some = real[:, None] & (block * 128 < H)[None, :]
        value = tl.load(scale + block[None, :] * stride_scale + row[:, None], mask=some, other=0.0)
        tl.store(out_scale + block.to(tl.int64)[None, :] * stride_out + to[:, None], value, mask=some)


@triton.jit(do_not_specialize=["T", "stride_q"])
def _combine_kernel(
    y, place, weights, x, out, sumsq, num_tokens, T, H, next_norm, q_out, q_scale, stride_q, K: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Like `experts._combine_kernel`; with q_out, also writes the sum times `next_norm` as the next operand."""
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_tokens(num_tokens, T):
        return
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, H, BLOCK):
        at = first + tl.arange(0, BLOCK)
        rounded = add_experts(y, place, weights, x, row, at, H, K, BLOCK)
        tl.store(out + row * H + at, rounded, mask=at < H)
        z = rounded.to(tl.float32)
        squares += z * z
        if q_out is not None:
            if next_norm is not None:
                z *= tl.load(next_norm + at, mask=at < H, other=0.0).to(tl.float32)
            parts = tl.reshape(z, (BLOCK // 128, 128))
            scale, inverse = power_of_two(tl.max(tl.abs(parts), axis=1))
            block = first // 128 + tl.arange(0, BLOCK // 128)
            tl.store(q_scale + block.to(tl.int64) * stride_q + row, scale, mask=block * 128 < H)
            tl.store(q_out + row * H + at, tl.reshape(saturated(parts * inverse[:, None]), (BLOCK,)), mask=at < H)
    tl.store(sumsq + row, tl.sum(squares, axis=0))


def by_rule(tokens: int, count: int, top: int, *, hopper: bool, blocked: bool = False) -> GemmConfig:
    """Return the tiles for both GEMMs with evenly spread tokens; no others were measured yet.

    hopper: the GPU has the warp-specialized kernel. blocked: weights have block scales."""
    rows = tokens * top / count  # rows per expert
    if rows > 40:
        if hopper:  # not enough registers for the scales of two blocks of 128 features
            return SPECIAL._replace(features=128) if blocked else SPECIAL
        return GemmConfig(128, 128, 128, 3, 8)
    height = 16 if rows <= 10 else 32 if rows <= 20 else 64
    return GemmConfig(height, 128, 128, 5 if height <= 32 else 4, 8, swap=True)


def _grouped(
    a: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, factor: Tensor | None, out: Tensor | Fp8Rows,
    space: Fp8ExpertSpace, config: GemmConfig, num_sms: int, tokens: int, activation: str = "",
) -> None:  # fmt: skip
    """Launch the kernel that `config` names over all experts."""
    if a.values.dtype != E4M3 or weight.values.dtype != E4M3:
        raise TypeError(f"operands must be e4m3, not {a.values.dtype} and {weight.values.dtype}")
    count, n, k = weight.values.shape
    if k % 16 or n % 8 or not weight.values.is_contiguous() or not weight.scale.is_contiguous():
        raise ValueError("rows must be contiguous and a multiple of 16 bytes long")
    if tuple(weight.scale.shape) not in ((count, n), (count, n, -(-k // BLOCK))):
        raise ValueError(f"scales of weights must be [{count}, {n}], or by rows, not {tuple(weight.scale.shape)}")
    pairs = tokens * space.place.shape[1]
    tiles = min(pairs, -(-pairs // config.tokens) + count)
    wide = PAIRS if isinstance(out, Fp8Rows) else config.features
    grid = min(num_sms * config.per_sm, tiles * -(-n // wide))
    if config.special:
        from weft.kernels.experts import fp8_experts_hopper as kernels
    else:
        kernels = fp8_experts_triton  # type: ignore[misc]
    kernels.launch_grouped(a, weight, bias, factor, out, space.tiles, space.number, config, grid, activation)


def _config(given: GemmConfig | None, tokens: int, weight: Fp8Weight, top: int) -> GemmConfig:
    count = len(weight.values)
    return given or by_rule(tokens, count, top, hopper=is_hopper(), blocked=weight.scale.dim() == 3)


def experts_gate_up(
    x: Fp8Rows, sumsq: Tensor, choice: Choice, weight: Fp8Weight, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, space: Fp8ExpertSpace, num_sms: int, num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Fp8Rows:  # fmt: skip
    """Apply the norm and the experts' gate-up matrices `[E, 2 I, H]` (rows alternate), into rows of `space.hidden`.

    x: T rows of H, times the norm's weight; sumsq `[sums, T]` float32; bias `[E, 2 I]`; choice is of the same tokens.
    The work list in `space` is written for tiles of `config`: `experts_residual` needs the same one."""
    tokens, hidden = x.values.shape
    count, top = len(weight.values), choice.experts.shape[1]
    config = _config(config, tokens, weight, top)
    grid, options = scatter_options(tokens, hidden, count, top, config, COLUMNS)
    _scatter_kernel[grid](
        x.values.view(torch.uint8), x.scale, x.scale.stride(0), sumsq, sumsq.stride(0), choice.experts, choice.rank,
        choice.counts, space.place, space.rows.values.view(torch.uint8), space.rows.scale, space.rows.scale.stride(0),
        space.factor, space.tiles, space.number, num_tokens, tokens, hidden, eps, PARTS=sumsq.shape[0], **options,
    )  # fmt: skip
    _grouped(space.rows, weight, bias, space.factor, space.hidden, space, config, num_sms, tokens, activation)
    return space.hidden


def experts_residual(
    choice: Choice, weight: Fp8Weight, x: Tensor, *, bias: Tensor | None = None, out: Tensor, sumsq: Tensor,
    quantized: Fp8Rows | None = None, next_norm: Tensor | None = None, space: Fp8ExpertSpace, num_sms: int,
    num_tokens: Tensor | None = None, config: GemmConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write x `[T, H]` plus the weighted sum of the experts' GEMMs of `space.hidden` to `out` (may be x).

    `quantized` gets that times `next_norm [H]`, as the next GEMM's operand. bias `[E, H]`; sumsq `[sums, T]` float32
    is scratch. Returns out and its sums of squares, one row `[1, T]`. An expert's result is rounded once; a token's
    experts are added in float32, in the order of its choices."""
    tokens, hidden = x.shape
    top = choice.experts.shape[1]
    config = _config(config, tokens, weight, top)
    _grouped(space.hidden, weight, bias, None, space.outputs, space, config, num_sms, tokens)
    _combine_kernel[(tokens,)](
        space.outputs, space.place, choice.weights, x, out, sumsq, num_tokens, tokens, hidden, next_norm,
        None if quantized is None else quantized.values, None if quantized is None else quantized.scale,
        0 if quantized is None else quantized.scale.stride(0), K=top,
        BLOCK=min(1024, max(128, triton.next_power_of_2(hidden))), num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out, sumsq[:1]


@triton.jit(do_not_specialize=["stride_sumsq", "stride_scale"])
def _switch_kernel(
    x, sumsq, stride_sumsq, gate, scale, stride_scale, num_tokens, T, H, blocks, eps, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= live_tokens(num_tokens, T):
        return
    switch = shared_gate(x, sumsq, stride_sumsq, gate, row, H, eps, PARTS, BLOCK)
    block = tl.arange(0, BLOCKS)
    place = scale + block * stride_scale + row
    tl.store(place, tl.load(place, mask=block < blocks, other=0.0) * switch, mask=block < blocks)


def gate_shared(
    x: Tensor, sumsq: Tensor, gate: Tensor, eps: float, *, out: Fp8Rows, num_tokens: Tensor | None = None
) -> Fp8Rows:
    """Multiply `out`, a shared expert's hidden part, by the sigmoid of the normed x `[T, H]` times `gate [1, H]`.

    The factor goes into its scales, which are then no powers of two."""
    tokens, hidden = x.shape
    blocks = len(out.scale)
    _switch_kernel[(tokens,)](
        x, sumsq, sumsq.stride(0), gate, out.scale, out.scale.stride(0), num_tokens, tokens, hidden, blocks, eps,
        PARTS=sumsq.shape[0], BLOCK=1024, BLOCKS=triton.next_power_of_2(blocks), num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out
