"""`FiniteCheck`: that every weight is a number, one pass over each tensor where it will serve."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.errors import ModelError


class FiniteCheck:
    """Collects a figure a tensor, on the tensor's device: a GPU is waited for once, at the end."""

    def __init__(self) -> None:
        self._figures: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """`tensor`: of any floating dtype, as it was converted for serving."""
        # Both are NaN or inf where a value is, and quick on a CPU. A sum of float32 weights cannot overflow.
        if tensor.dtype == torch.float8_e4m3fn:  # no number of its own: NaN is the code without a zero among its bits
            spoilt = (tensor.view(torch.uint8) & 0x7F).amax() == 0x7F
            figure = torch.where(spoilt, float("nan"), 0.0)
        else:
            figure = tensor.sum() if tensor.dtype == torch.float32 else tensor.abs().amax().float()
        self._figures.append((name, figure))

    def end(self, dtype: torch.dtype) -> None:
        """Raises `ModelError`, which names the tensors that hold NaN or inf in the serving `dtype`."""
        if not self._figures:
            return
        names, figures = zip(*self._figures, strict=True)
        bad = [name for name, fine in zip(names, torch.stack(figures).isfinite().tolist(), strict=True) if not fine]
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise ModelError(
                f"weights are not finite (NaN or inf, as {str(dtype).removeprefix('torch.')}): "
                f"{', '.join(bad[:3])}{more}; the checkpoint is damaged, or its values need a wider --dtype"
            )
