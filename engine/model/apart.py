"""`Together`: a tensor of a checkpoint that has something of all experts of a layer, and what becomes of it when every
expert has tensors of its own, as compressed checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from weft.engine.model.families.family import TensorNames


class Together(NamedTuple):
    """One tensor; names are those in the files."""

    prefix: str
    """of its layer"""
    tail: str
    """`.weight` or `.bias`: what it is of each expert"""
    pair: tuple[str, ...]
    """what each expert's parts are called in the layer, with a place for the expert: gate and up, or down alone"""
    experts: int
    alternate: bool
    """matrices are `[in, out]`, and rows of gate and up alternate"""

    def modules(self) -> list[str]:
        """In the order of `parts`."""
        return [f"{self.prefix}{name.format(i)}" for i in range(self.experts) for name in self.pair]

    def parts(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors: matrices `[out, in]`, biases `[out]`."""
        for i, each in enumerate(tensor):
            rows = each.t() if self.alternate and each.ndim == 2 else each
            halves = [rows]
            if len(self.pair) > 1:
                halves = [rows[0::2], rows[1::2]] if self.alternate else list(rows.chunk(2))
            for name, half in zip(self.pair, halves, strict=True):
                yield f"{self.prefix}{name.format(i)}{self.tail}", half


def together(names: TensorNames, prefix: str, count: int) -> dict[str, Together]:
    """The tensors of all experts in the layer whose names begin with `prefix`, by their names."""
    if not names.experts_gate_up:
        return {}
    found = {}
    pairs = ((names.experts_gate_up, (names.expert_gate, names.expert_up)), (names.experts_down, (names.expert_down,)))
    for name, pair in pairs:
        for end, tail in (("", ".weight"), ("_bias", ".bias")):
            found[f"{prefix}{name}{end}"] = Together(prefix, tail, pair, count, names.experts_alternate)
    return found
