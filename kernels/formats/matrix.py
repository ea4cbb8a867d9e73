"""`Matrix`: a weight in any format, and the product with a quantized one."""

from __future__ import annotations

from torch import Tensor

from weft.kernels.formats import fp8_matrix, packed_matrix
from weft.kernels.formats.fp8_matrix import Fp8Matrix
from weft.kernels.formats.packed_matrix import PackedMatrix

Quantized = Fp8Matrix | PackedMatrix
Matrix = Tensor | Quantized  # A weight as the reference implementations accept it.


def linear(x: Tensor, row_scale: Tensor | None, matrix: Quantized, bias: Tensor | None = None) -> Tensor:
    """Return `[T, out]` float32: x `[T, K]` times the matrix; a row_scale `[T]` (1 / rms) applies the norm."""
    if isinstance(matrix, PackedMatrix):
        return packed_matrix.linear(x, row_scale, matrix, bias)
    return fp8_matrix.linear(x, row_scale, matrix, bias)
