"""`FiniteCheck`: verifies that all weights are finite, with one pass over each tensor on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.errors import ModelError


class FiniteCheck:
    """Collects one figure per tensor on the tensor's device, so that a GPU synchronizes only once, at the end."""

    def __init__(self) -> None:
        self._figures: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor of any floating dtype, or a part of it, as converted for serving."""
        # Each figure is NaN or inf if a value is, and fast on a CPU. A sum of float32 weights cannot overflow.
        if tensor.dtype == torch.float8_e4m3fn:  # has no inf; NaN has all bits set except the sign
            nan = (tensor.view(torch.uint8) & 0x7F).amax() == 0x7F
            figure = torch.where(nan, float("nan"), 0.0)
        else:
            figure = tensor.sum() if tensor.dtype == torch.float32 else tensor.abs().amax().float()
        self._figures.append((name, figure))

    def end(self, dtype: torch.dtype) -> None:
        """Raise `ModelError` with the names of tensors that hold NaN or inf in the serving `dtype`."""
        if not self._figures:
            return
        names, figures = zip(*self._figures, strict=True)
        fine = torch.stack(figures).isfinite().tolist()
        bad = sorted({name for name, good in zip(names, fine, strict=True) if not good}, key=names.index)
        if bad:
            more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
            raise ModelError(
                f"weights are not finite (NaN or inf, as {str(dtype).removeprefix('torch.')}): "
                f"{', '.join(bad[:3])}{more}; the checkpoint is damaged, or its values need a wider --dtype"
            )
