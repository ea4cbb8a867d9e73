"""FP8 formats: e4m3 values and their scales, quantization, and the reference GEMM.

e4m3 (`torch.float8_e4m3fn`) has four significant bits, numbers from 2^-9 to 448, a NaN and no infinity. An FP8 tensor
is `values * scale`:

- Weights `[out, in]`: a float32 scale for each output channel `[out]` or, in some checkpoints, for each 128 x 128 block
  `[ceil(out / 128), ceil(in / 128)]`.
- Activations `[T, K]`: a float32 power of two for each 128 columns of a token, `[ceil(K / 128), T]`. The kernel that
  produces an activation quantizes it in its epilogue, where no tile sees a whole row. Such a scale costs no precision
  and does not depend on neighboring blocks. Two neighboring blocks may share a scale (`Fp8Rows.span`); a GEMM of many
  tokens then moves sums out of the tensor cores half as often.
- K and V in pages: a float32 scale for each layer and KV head, fixed before the first token. Attention multiplies in 16
  bits; every e4m3 number is exact in float16 and bfloat16.

GEMMs add in two levels: within 128 of K (256 if two blocks share a scale) in the tensor cores, which keep about 14
bits, and beyond that in float32. `scaled_matmul` is the reference for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # The largest e4m3 number.
BLOCK = 128  # Columns of an activation that share a scale; also the side of a weight block.
MIN_EXPONENT, MAX_EXPONENT = -40, 120
"""Bounds of an activation scale's exponent. Zero blocks get the first; the largest 16-bit number needs the second."""


class Fp8Weight(NamedTuple):
    """A layer's weight matrix as its GEMM reads it."""

    values: Tensor  # `[out, in]` e4m3, contiguous; `in` is a multiple of 16.
    scale: Tensor
    """float32 `[out]`; per block `[ceil(out / 128), ceil(in / 128)]`; or `[out, ceil(in / 128)]` if blocks share rows.
    """

    @property
    def blocked(self) -> bool:
        return self.scale.dim() == 2


class Fp8Rows(NamedTuple):
    """Activations of T tokens as a GEMM reads them."""

    values: Tensor  # `[T, K]` e4m3, contiguous.
    scale: Tensor  # float32 `[ceil(K / 128), T]`, or `[1, T]` with one scale per token.
    span: int = BLOCK  # Columns guaranteed to share a scale: 128, or 256 if each pair of blocks shares one.

    def of_tokens(self, tokens: slice) -> Fp8Rows:
        """Return a view of some tokens."""
        return Fp8Rows(self.values[tokens], self.scale[:, tokens], self.span)


class KvScales(NamedTuple):
    """Scales of K and V in pages, both fields `[layers, 2, Hkv]` float32. Pages times `scale` are the original."""

    scale: Tensor
    inverse: Tensor  # 1 / scale, rounded once; values are multiplied by it before they are written.


def saturated(x: Tensor) -> Tensor:
    """Convert float32 to e4m3, to nearest even. Numbers out of range become the largest; NaN stays."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


def power_of_two_scale(amax: Tensor) -> Tensor:
    """Return the least power of two, from 2^-40 on, that brings `amax` into range; NaN and infinity give infinity.

    It is computed from the number's bits, so every implementation agrees."""
    bits = amax.float().contiguous().view(torch.int32)
    # 448 = 1.75 * 2^8: a mantissa above 1.75 needs one exponent more
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    exponent = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT)
    exponent = torch.where((bits >> 23) == 255, 128, exponent)
    return ((exponent + 127) << 23).view(torch.float32)


def channel_scale(amax: Tensor) -> Tensor:
    """Return float32 `amax / 448`, or 1 where `amax` is 0."""
    scale = amax.float() / LARGEST
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def quantize_weight(weight: Tensor, *, exact: bool = False) -> Fp8Weight:
    """Quantize `[out, in]` of any float type to e4m3 with a scale for each output channel.

    exact: scales are powers of two, so numbers of up to four significant bits do not change."""
    amax = weight.float().abs().amax(-1)
    scale = power_of_two_scale(amax) if exact else channel_scale(amax)
    return Fp8Weight(saturated(weight.float() / scale[:, None]), scale)


def expanded(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Expand scales `[ceil(rows / 128), ceil(columns / 128)]`, or by rows, to `[rows, columns]`."""
    return by_row(scale, rows).repeat_interleave(BLOCK, 1)[:, :columns]


def by_row(scale: Tensor, rows: int) -> Tensor:
    """Expand scales `[ceil(rows / 128), ...]` to `[rows, ...]`; scales by rows stay as they are."""
    return scale if len(scale) == rows else scale.repeat_interleave(BLOCK, 0)[:rows]


def weight_values(weight: Fp8Weight) -> Tensor:
    """Dequantize a weight to `[out, in]` float32."""
    values = weight.values.float()
    if weight.blocked:
        return values * expanded(weight.scale, *values.shape)
    return values * weight.scale[:, None]


def padded_blocks(x: Tensor) -> Tensor:
    """Return `[T, K]` as `[T, ceil(K / 128), 128]` float32, padded with zeros."""
    blocks = -(-x.shape[1] // BLOCK)
    return torch.nn.functional.pad(x.float(), (0, blocks * BLOCK - x.shape[1])).view(len(x), blocks, BLOCK)


def quantize_rows(x: Tensor, weight: Tensor | None = None, *, span: int = BLOCK) -> Fp8Rows:
    """Quantize `[T, K]` of any float type to e4m3 with a power of two for each `span` (128 or 256) columns of a token.

    weight `[K]`: of a norm that is not folded into a matrix; x is multiplied by it in float32 first."""
    filled = padded_blocks(x if weight is None else x.float() * weight.float())
    amax = filled.abs().amax(-1)  # [T, blocks]
    if span == 2 * BLOCK:
        pairs = torch.nn.functional.pad(amax, (0, amax.shape[1] % 2)).unflatten(1, (-1, 2)).amax(-1)
        amax = pairs.repeat_interleave(2, 1)[:, : amax.shape[1]]
    scale = power_of_two_scale(amax)
    values = saturated(filled * (1.0 / scale)[..., None]).flatten(1)[:, : x.shape[1]]
    return Fp8Rows(values.contiguous(), scale.t().contiguous(), span)


def quantize_static(x: Tensor, scale: Tensor) -> Fp8Rows:
    """Quantize `[T, K]` of any float type to e4m3 with a checkpoint's single scale (float32 scalar)."""
    return Fp8Rows(saturated(x.float() / scale), scale.float().expand(1, len(x)).contiguous())


def scaled_matmul(a: Fp8Rows, weight: Fp8Weight) -> Tensor:
    """Return `[T, out]` float32: `a` times the transposed weight.

    Sums over 128 of K are added in float32, in order, as most kernels do. Block scales apply to each sum of 128, token
    and channel scales to the result."""
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
    """Return the scales `[layers, 2, Hkv]` float32, all positive, with their inverses."""
    return KvScales(scale, 1.0 / scale)


def unit_kv_scales(layers: int, num_kv_heads: int, device: torch.device | str) -> KvScales:
    """Return scales of 1 for every head, used without scales from a checkpoint or calibration."""
    return kv_scales(torch.ones(layers, 2, num_kv_heads, device=device))


def quantize_kv(x: Tensor, inverse: Tensor) -> Tensor:
    """Quantize `[T, Hkv, D]` of any float type times `inverse [Hkv]` to e4m3."""
    return saturated(x.float() * inverse[:, None])
