"""FP8 operands that benchmarks and tests build and read, and engines do not."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.formats.fp8 import BLOCK, Fp8Rows, Fp8Weight, channel_scale, expanded, padded_blocks, saturated


def quantize_weight_blocks(weight: Tensor) -> Fp8Weight:
    """Quantize `[out, in]` of any float type to e4m3 with a scale for each 128 x 128 block."""
    out, depth = weight.shape
    tall, wide = -(-out // BLOCK), -(-depth // BLOCK)
    filled = torch.nn.functional.pad(weight.float(), (0, wide * BLOCK - depth, 0, tall * BLOCK - out))
    scale = channel_scale(filled.abs().view(tall, BLOCK, wide, BLOCK).amax((1, 3)))
    return Fp8Weight(saturated(weight.float() / expanded(scale, out, depth)), scale)


def quantize_tokens(x: Tensor) -> Fp8Rows:
    """Quantize `[T, K]` of any float type to e4m3 with a scale for each token."""
    scale = channel_scale(x.float().abs().amax(-1))
    return Fp8Rows(saturated(x.float() / scale[:, None]), scale[None])


def row_values(rows: Fp8Rows) -> Tensor:
    """Dequantize activations to `[T, K]` float32."""
    values = rows.values.float()
    if len(rows.scale) == 1:
        return values * rows.scale[0][:, None]
    return (padded_blocks(values) * rows.scale.t()[..., None]).flatten(1)[:, : values.shape[1]]
