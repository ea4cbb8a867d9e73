"""`Fp8Matrix`: a quantized matrix with its input transformation, and the reference for its GEMM.

The preceding norm is not folded in (`weight_layout.fold_norm`): the matrix is quantized without it. The GEMM reads `(x
- mean) * norm`, quantized; the row's 1 / rms is a factor of the result, like the channel scales. If a checkpoint has a
static scale, or the norm has a bias, the norm is applied first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.formats.fp8 import (
    E4M3,
    Fp8Rows,
    Fp8Weight,
    quantize_rows,
    quantize_static,
    scaled_matmul,
    weight_values,
)

Activations = Literal["dynamic", "static", "none"]
"""How a GEMM's input is quantized: with powers of two per 128 columns of a token, the checkpoint's scale, or not at
all."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """The matrix of one operation `[out, inner]`, or of experts `[experts, out, inner]`."""

    weight: Fp8Weight
    activations: Activations = "dynamic"
    input_scale: Tensor | None = None  # Static activation scale, [] float32; of experts `[experts]`.
    norm: Tensor | None = None  # `[inner]`, the weight of the preceding norm.
    norm_bias: Tensor | None = None  # `[inner]`.
    centred: bool = False  # Whether that norm subtracts the mean.

    def __getitem__(self, index: int | slice) -> Fp8Matrix:
        """Return some rows, or one or more experts."""
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


Matrix = Tensor | Fp8Matrix  # A weight as the reference implementations accept it.


def linear(x: Tensor, row_scale: Tensor | None, matrix: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `[T, out]` float32: x `[T, K]` times the matrix; a row_scale `[T]` (1 / rms) applies the norm."""
    h = x.float()
    if row_scale is None:
        return _biased(_scaled_matmul(h, matrix), bias)
    if matrix.centred:
        h = h - h.mean(-1, keepdim=True)
    if matrix.activations == "dynamic" and matrix.norm_bias is None:
        y = scaled_matmul(quantize_rows(h, matrix.norm), matrix.weight)
        return _biased(y * row_scale[:, None], bias)
    h = h * row_scale[:, None]
    if matrix.norm is not None:
        h = h * matrix.norm.float()
    if matrix.norm_bias is not None:
        h = h + matrix.norm_bias.float()
    return _biased(_scaled_matmul(h, matrix), bias)


def _scaled_matmul(h: Tensor, matrix: Fp8Matrix) -> Tensor:
    if matrix.activations == "none":
        return F.linear(h, weight_values(matrix.weight))
    rows: Fp8Rows
    if matrix.activations == "static":
        assert matrix.input_scale is not None
        rows = quantize_static(h, matrix.input_scale)
    else:
        rows = quantize_rows(h)
    return scaled_matmul(rows, matrix.weight)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.float()


def by_rows(change: Callable[..., Tensor], *weights: Fp8Weight) -> Fp8Weight:
    """Apply `change`, which only moves rows (joins, cuts, orders), to values and scales `[..., out, n]`."""
    # as bytes: not every operation that moves numbers supports e4m3
    values = change(*(w.values.view(torch.uint8) for w in weights)).view(E4M3)
    return Fp8Weight(values, change(*(w.scale for w in weights)))
