"""`StackedExperts`: a checkpoint tensor with all experts of a layer, and how to split it into one tensor per expert.

Compressed checkpoints store experts separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from weft.engine.model.families.family import TensorNames


class StackedExperts(NamedTuple):
    """One stacked tensor. Names are those in the files."""

    prefix: str  # Prefix of its layer.
    tail: str  # `.weight` or `.bias`.
    pair: tuple[str, ...]
    """Names of each expert's modules in the layer, with `{}` for the expert: gate and up, or only down."""
    experts: int
    alternate: bool  # Matrices are `[in, out]`, and rows of gate and up alternate.
    turned: int  # Matrices are `[in, out]` unless this is their width, that of the stream; 0: they are not.

    def modules(self) -> list[str]:
        """Return module names in the order of `split`."""
        return [f"{self.prefix}{name.format(i)}" for i in range(self.experts) for name in self.pair]

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors: matrices `[out, in]`, biases `[out]`."""
        for i, each in enumerate(tensor):
            turned = self.alternate or (self.turned and each.shape[-1 if len(self.pair) > 1 else 0] != self.turned)
            rows = each.t() if turned and each.ndim == 2 else each
            halves = [rows]
            if len(self.pair) > 1:
                halves = [rows[0::2], rows[1::2]] if self.alternate else list(rows.chunk(2))
            for name, half in zip(self.pair, halves, strict=True):
                yield f"{self.prefix}{name.format(i)}{self.tail}", half


def stacked_experts(names: TensorNames, prefix: str, count: int, hidden: int) -> dict[str, StackedExperts]:
    """Return the stacked tensors of the layer with this prefix, by name."""
    if not names.experts_gate_up:
        return {}
    found = {}
    pairs = ((names.experts_gate_up, (names.expert_gate, names.expert_up)), (names.experts_down, (names.expert_down,)))
    for name, pair in pairs:
        for end, tail in (("", ".weight"), ("_bias", ".bias")):
            found[f"{prefix}{name}{end}"] = StackedExperts(
                prefix, tail, pair, count, names.experts_alternate, hidden if names.experts_turned else 0
            )
    return found
