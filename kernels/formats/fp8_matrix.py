"""`Fp8Matrix`: a quantised matrix with what its product does to the input, and the twin of that product (`fp8`).

The norm before it is not folded in (`pack.fold_norm`): the matrix is quantised without it. What a product reads is
`(x - mean) * norm`, quantised; the row's 1 / rms is a factor of the result, as the channels' scales are. Where a
checkpoint brings a static scale, or the norm has a bias, the norm comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.formats.fp8 import E4M3, Fp8Rows, Fp8Weight, product, quantize_rows, quantize_static, weight_values

Activations = Literal["dynamic", "static", "none"]
"""what becomes of a product's input: quantised with a power of two for each 128 columns of a token, with a scale that
the checkpoint has, or left as it is"""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Of one operation: `[out, inner]`, of experts `[experts, out, inner]`."""

    weight: Fp8Weight
    activations: Activations = "dynamic"
    input_scale: Tensor | None = None
    """[] float32 where activations are static; of experts `[experts]`"""
    norm: Tensor | None = None
    """[inner]: what the norm before it multiplies by"""
    norm_bias: Tensor | None = None
    """[inner]"""
    centred: bool = False
    """that norm takes the mean off"""

    def __getitem__(self, index: int | slice) -> Fp8Matrix:
        """Some rows; of experts, one of them."""
        scale = self.input_scale
        if isinstance(index, int) and scale is not None and scale.ndim:
            scale = scale[index]
        own = Fp8Weight(self.weight.values[index], self.weight.scale[index])
        return replace(self, weight=own, input_scale=scale)

    @property
    def shape(self) -> torch.Size:
        return self.weight.values.shape

    def __len__(self) -> int:
        return len(self.weight.values)


Matrix = Tensor | Fp8Matrix
"""what a twin of a product reads"""


def linear(x: Tensor, row_scale: Tensor | None, matrix: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """`[T, out]` float32: x `[T, K]`, normed where there is a row_scale `[T]` (1 / rms), times the matrix."""
    h = x.float()
    if row_scale is None:
        return _biased(_product(h, matrix), bias)
    if matrix.centred:
        h = h - h.mean(-1, keepdim=True)
    if matrix.activations == "dynamic" and matrix.norm_bias is None:
        y = product(quantize_rows(h, matrix.norm), matrix.weight)
        return _biased(y * row_scale[:, None], bias)
    h = h * row_scale[:, None]
    if matrix.norm is not None:
        h = h * matrix.norm.float()
    if matrix.norm_bias is not None:
        h = h + matrix.norm_bias.float()
    return _biased(_product(h, matrix), bias)


def _product(h: Tensor, matrix: Fp8Matrix) -> Tensor:
    if matrix.activations == "none":
        return F.linear(h, weight_values(matrix.weight))
    rows: Fp8Rows
    if matrix.activations == "static":
        assert matrix.input_scale is not None
        rows = quantize_static(h, matrix.input_scale)
    else:
        rows = quantize_rows(h)
    return product(rows, matrix.weight)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.float()


def by_rows(change: Callable[..., Tensor], *weights: Fp8Weight) -> Fp8Weight:
    """What `change` makes of matrices when it only moves rows: joins, cuts, orders them. Scales `[..., out, n]`."""
    # as bytes: not everything that moves numbers knows e4m3
    values = change(*(w.values.view(torch.uint8) for w in weights)).view(E4M3)
    return Fp8Weight(values, change(*(w.scale for w in weights)))
