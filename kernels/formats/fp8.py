"""The FP8 number formats: what e4m3 values and their scales mean, how tensors are put into them, and their product.

e4m3 (`torch.float8_e4m3fn`) has four significant bits, numbers from 2^-9 to 448, a NaN and no infinity. A tensor in FP8
is `values * scale`:

- weights `[out, in]`: a float32 scale for each output channel `[out]`, or, as some checkpoints have it, for each block
  of 128 x 128 `[ceil(out / 128), ceil(in / 128)]`;
- activations `[T, K]`: a float32 scale for each 128 columns of a token, `[ceil(K / 128), T]`, a power of two. The
  kernel that makes an activation scales it in its epilogue, where no tile sees a whole row; such a scale costs no
  precision and does not depend on the neighbours. Two neighbouring blocks may share theirs (`Fp8Rows.span`): a product
  of many tokens then takes sums out of the tensor cores half as often. `quantize_tokens` has one scale a token instead,
  as others do;
- K and V in pages: a float32 scale for each layer and KV head, fixed before the first token. Attention multiplies in 16
  bits: every e4m3 number is one of float16 and of bfloat16.

Products are added in two levels: within 128 of the depth (256 where two blocks share a scale) by the tensor cores,
which keep some 14 bits, and beyond it in float32. `product` is the twin of all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""of e4m3"""
BLOCK = 128
"""of the depth: columns of an activation that share a scale, sides of a weight's block"""
LEAST_EXPONENT, MOST_EXPONENT = -40, 120
"""of an activation's scale: with the least one, zeros; the largest number of 16 bits asks for the other"""


class Fp8Weight(NamedTuple):
    """A matrix of a layer, as its product reads it."""

    values: Tensor
    """`[out, in]` e4m3, contiguous; `in` is a multiple of 16"""
    scale: Tensor
    """float32 `[out]`; of blocks `[ceil(out / 128), ceil(in / 128)]`; or those written out by rows,
    `[out, ceil(in / 128)]`, where packing mixed rows of several blocks"""

    @property
    def blocked(self) -> bool:
        return self.scale.dim() == 2


class Fp8Rows(NamedTuple):
    """Activations of T tokens, as a product reads them."""

    values: Tensor
    """`[T, K]` e4m3, contiguous"""
    scale: Tensor
    """float32 `[ceil(K / 128), T]`, or `[1, T]`: one a token"""
    span: int = BLOCK
    """columns that have the same scale for certain: 128, or 256 where each two blocks from the first on share theirs"""

    def part(self, tokens: slice) -> Fp8Rows:
        """Of some of the tokens; a view."""
        return Fp8Rows(self.values[tokens], self.scale[:, tokens], self.span)


class KvScales(NamedTuple):
    """Of K and V in pages, both `[layers, 2, Hkv]` float32; page content times `scale` is what was written."""

    scale: Tensor
    inverse: Tensor
    """1 / scale, rounded once: what is written is multiplied by it"""


def saturated(x: Tensor) -> Tensor:
    """float32 -> e4m3, to the nearest, ties to even; beyond the largest number it is that one; NaN stays."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def power_of_two_scale(amax: Tensor) -> Tensor:
    """float32: the least power of two (from 2^-40 on) that brings `amax` within e4m3; NaN and infinity give infinity.

    Of the number's bits, so that it is the same wherever it is computed.
    """
    bits = amax.float().contiguous().view(torch.int32)
    # 448 = 1.75 * 2^8: one exponent more where the mantissa is larger than 1.75
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    exponent = exponent.clamp(LEAST_EXPONENT, MOST_EXPONENT)
    exponent = torch.where((bits >> 23) == 255, 128, exponent)
    return ((exponent + 127) << 23).view(torch.float32)


def channel_scale(amax: Tensor) -> Tensor:
    """float32: `amax / 448`, and 1 where that is nothing."""
    scale = amax.float() / LARGEST
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_weight(weight: Tensor, *, exact: bool = False) -> Fp8Weight:
    """`[out, in]` of any float -> e4m3 with a scale for each output channel.

    exact: scales are powers of two, so that numbers of no more than four significant bits stay what they are.
    """
    amax = weight.float().abs().amax(-1)
    scale = power_of_two_scale(amax) if exact else channel_scale(amax)
    return Fp8Weight(saturated(weight.float() / scale[:, None]), scale)


def expanded(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scales of blocks `[ceil(rows / 128), ceil(columns / 128)]`, or by rows, -> `[rows, columns]`."""
    return by_row(scale, rows).repeat_interleave(BLOCK, 1)[:, :columns]


def by_row(scale: Tensor, rows: int) -> Tensor:
    """Scales of blocks `[ceil(rows / 128), ...]`, or by rows already, -> `[rows, ...]`."""
    return scale if len(scale) == rows else scale.repeat_interleave(BLOCK, 0)[:rows]


def quantize_weight_blocks(weight: Tensor) -> Fp8Weight:
    """`[out, in]` of any float -> e4m3 with a scale for each block of 128 x 128."""
    out, depth = weight.shape
    tall, wide = -(-out // BLOCK), -(-depth // BLOCK)
    filled = torch.nn.functional.pad(weight.float(), (0, wide * BLOCK - depth, 0, tall * BLOCK - out))
    scale = channel_scale(filled.abs().view(tall, BLOCK, wide, BLOCK).amax((1, 3)))
    return Fp8Weight(saturated(weight.float() / expanded(scale, out, depth)), scale)


def weight_values(weight: Fp8Weight) -> Tensor:
    """What the weight stands for: `[out, in]` float32."""
    values = weight.values.float()
    if weight.blocked:
        return values * expanded(weight.scale, *values.shape)
    return values * weight.scale[:, None]


def _blocks(x: Tensor) -> Tensor:
    """`[T, K]` -> `[T, ceil(K / 128), 128]` float32, filled up with zeros."""
    blocks = -(-x.shape[1] // BLOCK)
    return torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - x.shape[1])).view(len(x), blocks, BLOCK)


def quantize_rows(x: Tensor, weight: Tensor | None = None, *, span: int = BLOCK) -> Fp8Rows:
    """`[T, K]` of any float -> e4m3 with a power of two for each `span` (128 or 256) columns of a token.

    weight `[K]`: of a norm that follows and is not folded into a matrix; x is multiplied by it in float32 first.
    """
    filled = _blocks(x if weight is None else x.float() * weight.float())
    amax = filled.abs().amax(-1)  # [T, blocks]
    if span == 2 * BLOCK:
        pairs = torch.nn.functional.pad(amax, (0, amax.shape[1] % 2)).unflatten(1, (-1, 2)).amax(-1)
        amax = pairs.repeat_interleave(2, 1)[:, : amax.shape[1]]
    scale = power_of_two_scale(amax)
    values = saturated(filled * (1.0 / scale)[..., None]).flatten(1)[:, : x.shape[1]]
    return Fp8Rows(values.contiguous(), scale.t().contiguous(), span)


def quantize_tokens(x: Tensor) -> Fp8Rows:
    """`[T, K]` of any float -> e4m3 with a scale for each token."""
    scale = channel_scale(x.float().abs().amax(-1))
    return Fp8Rows(saturated(x.float() / scale[:, None]), scale[None])


def quantize_static(x: Tensor, scale: Tensor) -> Fp8Rows:
    """`[T, K]` of any float -> e4m3 with the one scale (float32 scalar) that a checkpoint brings for all tokens."""
    return Fp8Rows(saturated(x.float() / scale), scale.float().expand(1, len(x)).contiguous())


def row_values(rows: Fp8Rows) -> Tensor:
    """What activations stand for: `[T, K]` float32."""
    values = rows.values.float()
    if len(rows.scale) == 1:
        return values * rows.scale[0][:, None]
    return (_blocks(values) * rows.scale.t()[..., None]).flatten(1)[:, : values.shape[1]]


def product(a: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """`[T, out]` float32: `a` times the transposed weight, as most kernels add: over 128 of the depth, then in float32,
    in order. Scales of blocks go to each sum of 128; those of tokens and channels to the result.
    """
    depth = a.values.shape[1]
    a_blocks, w_blocks = a.scale.shape[0] > 1, weight.blocked
    total = torch.zeros(len(a.values), len(weight.values), device=a.values.device)
    for block, first in enumerate(range(0, depth, BLOCK)):
        part = a.values[:, first : first + BLOCK].float() @ weight.values[:, first : first + BLOCK].float().t()
        if a_blocks:
            part *= a.scale[block][:, None]
        if w_blocks:
            part *= by_row(weight.scale[:, block], total.shape[1])
        total += part
    if not a_blocks:
        total *= a.scale[0][:, None]
    return total if w_blocks else total * weight.scale


def kv_scales(scale: Tensor) -> KvScales:
    """`[layers, 2, Hkv]` float32, above zero."""
    return KvScales(scale, 1.0 / scale)


def unit_kv_scales(layers: int, num_kv_heads: int, device: torch.device | str) -> KvScales:
    """1 for every head: where neither checkpoint nor calibration says better."""
    return kv_scales(torch.ones(layers, 2, num_kv_heads, device=device))


def quantize_kv(x: Tensor, inverse: Tensor) -> Tensor:
    """`[T, Hkv, D]` of any float times `inverse [Hkv]` -> e4m3."""
    return saturated(x.float() * inverse[:, None])
