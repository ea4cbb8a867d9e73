"""What images change in the rows of a model's layers: their embeddings, and rotary rows of M-RoPE."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows
from weft.kernels.matmul.fp8_rows import leave_blocks
from weft.kernels.matmul.rows import row_options


@triton.jit
def _rotary_kernel(table, positions, axes, out, T, P, PAIRS, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    axis = tl.load(axes + pair, mask=inside, other=0)
    position = tl.load(positions + axis * T + row, mask=inside, other=0).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), P - 1)  # padding
    at = (position * PAIRS + pair) * 2
    for part in tl.static_range(2):
        value = tl.load(table + at + part, mask=inside, other=0.0)
        tl.store(out + (row * PAIRS + pair) * 2 + part, value, mask=inside)


def rotary_rows(table: Tensor, positions: Tensor, axes: Tensor, *, out: Tensor) -> Tensor:
    """Write the cosines and sines of tokens with several positions: `out[t, p] = table[positions[axes[p], t], p]`.

    table `[P, D/2, 2]`; positions `[3, S]` with S >= T; axes `[D/2]` int32; out `[T, D/2, 2]`."""
    tokens, pairs = out.shape[:2]
    _rotary_kernel[(tokens,)](
        table, positions, axes, out, positions.shape[1], table.shape[0], pairs, BLOCK=triton.next_power_of_2(pairs),
        num_warps=1, **pdl_options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["stride_sums", "stride_q"])
def _images_kernel(
    x, sumsq, stride_sums, image_rows, images, R, stride_image, H, next_norm, q_out, q_scale, stride_q,
    ADD: tl.constexpr, PARTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    row = tl.program_id(0).to(tl.int64)
    image = tl.minimum(tl.load(image_rows + row).to(tl.int64), R - 1)
    if image >= 0:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, H, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(images + image * stride_image + at, mask=at < H, other=0.0)
            if ADD:
                before = tl.load(x + row * H + at, mask=at < H, other=0.0)
                value = (before.to(tl.float32) + value.to(tl.float32)).to(value.dtype)
            tl.store(x + row * H + at, value, mask=at < H)
            squares += value.to(tl.float32) * value.to(tl.float32)
            if q_out is not None:
                block = start // 128 + tl.arange(0, BLOCK // 128)
                at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
                z = tl.reshape(value, (BLOCK // 128, 128)).to(tl.float32)
                if next_norm is not None:
                    z *= tl.load(next_norm + at, mask=at < H, other=0.0).to(tl.float32)
                leave_blocks(z, q_out + row * H, at, q_scale + row, stride_q, block, H, PAIRS)
        # The sums of squares are partial sums: the first gets the whole.
        total = tl.sum(squares, axis=0)
        part = tl.arange(0, triton.next_power_of_2(PARTS))
        tl.store(sumsq + part * stride_sums + row, tl.where(part == 0, total, 0.0), mask=part < PARTS)


def put_images(
    x: Tensor, sumsq: Tensor, image_rows: Tensor, images: Tensor, *, add: bool, quantized: Fp8Rows | None = None,
    next_norm: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write `images[image_rows[t]]` to `x[t]`, or add it, for all tokens whose row is not negative; returns x.

    x `[T, H]`; sumsq `[sums, T]` float32, whose sums stay those of x; image_rows `[T]` int32; images `[R, H]`, whose
    rows may have any stride. `quantized` gets these rows times `next_norm [H]`, as from `embedding.embed`."""
    hidden = x.shape[1]
    options = row_options(hidden)
    if quantized is not None:
        options["BLOCK"] = max(2 * BLOCK, options["BLOCK"])  # scales cover whole blocks
    _images_kernel[(x.shape[0],)](
        x, sumsq, sumsq.stride(0), image_rows, images, images.shape[0], images.stride(0), hidden, next_norm,
        *((None, None, None) if quantized is None else (quantized.values, quantized.scale, quantized.scale.stride(0))),
        ADD=add, PARTS=sumsq.shape[0], PAIRS=quantized is not None and quantized.span > BLOCK, **options,
    )  # fmt: skip
    return x


def axes_tensor(axes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the axis of each rotary pair, for `rotary_rows`."""
    return torch.tensor(axes, dtype=torch.int32, device=device)
