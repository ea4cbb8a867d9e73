"""`Work`: how an iteration's cost divides among its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.model.spec import ModelSpec
from weft.engine.runner.iteration.batch import Batch

GPU_BALANCE = 150.0
CPU_BALANCE = 20.0
"""operations of a matrix product that cost about as much as one byte of memory"""
GPU_TILE = 128
"""tokens that a product of more computes at once (`kernels/matmul/gemm.py`)"""


class Costs(NamedTuple):
    """What the parts of an iteration cost beside each other, in bytes of memory traffic or what costs as much."""

    weights: float
    """of all of them, read once"""
    token: float
    """multiplied with the weights"""
    position: float
    """of one layer, that a decode reads"""
    pair: float
    """of a prompt's token and a position of one layer that it attends to"""
    layers: Mapping[int | None, int]
    """how many layers see so many positions; None: all"""
    tile: int = 1
    """tokens that products compute at once: fewer take as long"""

    def seen(self, length: float) -> float:
        """Positions that a token sees in all layers, its own included, behind a context of this length."""
        return sum(n * (length if window is None else min(length, window)) for window, n in self.layers.items())

    def all_seen(self, lengths: npt.NDArray[np.integer | np.floating]) -> npt.NDArray[np.float64]:
        """The same, of several."""
        total = np.zeros(len(lengths))
        for window, layers in self.layers.items():
            total += layers * (lengths if window is None else np.minimum(lengths, window))
        return total


class Work:
    """Shares by the tokens and the context of each request, in bytes of memory traffic or what costs as much.

    All tokens of an iteration share its dense products (reading the weights, or multiplying, whichever costs more);
    attention is each request's own: a decode reads its KV, a chunk multiplies with it.
    """

    def __init__(self, spec: ModelSpec, weight_bytes: int, kv_bytes: int, *, cuda: bool) -> None:
        """kv_bytes: of a token in one layer."""
        self._balance = GPU_BALANCE if cuda else CPU_BALANCE
        self._weight_bytes = float(weight_bytes)
        self._per_token = 2.0 * spec.active_parameters / self._balance
        self._kv_bytes = float(kv_bytes)
        self._per_pair = 4.0 * spec.num_heads * spec.head_dim / self._balance
        self._layers = Counter(spec.windows)
        self._tile = GPU_TILE if cuda else 1

    @property
    def costs(self) -> Costs:
        return Costs(self._weight_bytes, self._per_token, self._kv_bytes, self._per_pair, self._layers, self._tile)

    def shares(self, batch: Batch) -> npt.NDArray[np.float64]:
        """`[R]`: of the whole iteration; they add up to one."""
        tokens = batch.query_len.astype(np.float64)
        dense = max(self._per_token, self._weight_bytes / max(batch.num_tokens, 1))
        context = batch.kv_len - 0.5 * (tokens - 1)
        seen = self.costs.all_seen(context)
        cost = tokens * dense + seen * np.maximum(self._kv_bytes, self._per_pair * tokens)
        return np.asarray(cost / cost.sum())
