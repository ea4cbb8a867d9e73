"""`PackedMatrix`: a matrix in 4 or 8 bits with its input transformation, and the product with it.

As for FP8, the preceding norm is not folded in: codes cannot be multiplied by it. The product reads `(x - mean) *
norm`, quantized to int8 with a scale for each 32 columns of a token; the row's 1 / rms is a factor of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.kernels.formats.packed_rows import PackedRows
from weft.kernels.native.products import multiply
from weft.kernels.native.tiles import Tiles, pack, values


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The matrix of one operation `[out, inner]`, or a table of `out` rows."""

    tiles: Tiles
    norm: Tensor | None = None  # `[inner]` float32, the weight of the preceding norm.
    norm_bias: Tensor | None = None  # `[inner]` float32.
    centred: bool = False  # Whether that norm subtracts the mean.
    order: Tensor | None = None  # See `PackedRows`.

    @classmethod
    def of(
        cls, rows: PackedRows, norm: Tensor | None = None, norm_bias: Tensor | None = None, *, centred: bool = False
    ) -> PackedMatrix:
        """Lay out rows for the product."""
        form = rows.form
        tiles = pack(
            rows.codes(), rows.scale(), rows.low(), bits=form.bits, group=form.group, centre=form.centre
        )  # fmt: skip
        bias = None if norm_bias is None else norm_bias.float()
        return cls(tiles, None if norm is None else norm.float(), bias, centred, rows.order)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.tiles.rows, self.tiles.columns))

    def __len__(self) -> int:
        return self.tiles.rows

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors."""
        own = (self.tiles.codes, self.tiles.scale, self.tiles.low, self.norm, self.norm_bias, self.order)
        return tuple(tensor for tensor in own if tensor is not None)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows of a table, `[len(indices), inner]` float32."""
        made = values(self.tiles, indices)
        if self.order is None:
            return made
        out = torch.empty_like(made)
        out[:, self.order] = made
        return out


def linear(x: Tensor, row_scale: Tensor | None, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """Return `[T, out]` float32: x `[T, K]` times the matrix; a row_scale `[T]` (1 / rms) applies the norm."""
    norm = matrix.norm if row_scale is not None else None
    if row_scale is not None and (matrix.centred or matrix.norm_bias is not None):
        x = x.float()
        if matrix.centred:
            x = x - x.mean(-1, keepdim=True)
        if matrix.norm_bias is not None:  # It is added before the quantization.
            x = x * row_scale[:, None]
            x = (x if norm is None else x * norm) + matrix.norm_bias
            norm = row_scale = None
    if matrix.order is not None:
        x = x[:, matrix.order]
        norm = None if norm is None else norm[matrix.order]
    return multiply(x, matrix.tiles, norm=norm, row_scale=row_scale, bias=None if bias is None else bias.float())
