"""`CostShares`: divides an iteration's cost among its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.model.spec import ModelSpec
from weft.engine.runner.iteration.batch import Batch

GPU_BALANCE = 150.0
CPU_BALANCE = 20.0  # GEMM operations that take about as long as one byte of memory traffic.
GPU_TILE = 128  # Tokens per tile of a large GEMM (`kernels/matmul/gemm.py`).


class Costs(NamedTuple):
    """Costs of an iteration's operations in bytes of memory traffic, or operations that take as long."""

    weights: float  # Reading all weights once.
    token: float  # Multiplying a token with the weights.
    position: float  # Reading a position of one layer for a decode.
    pair: float  # Attention of a prompt token to one position of one layer.
    layers: Mapping[int | None, int]  # Number of layers by window; None: no window.
    tile: int = 1  # Tokens that a GEMM computes at once; fewer take as long.

    def seen(self, length: float) -> float:
        """Return the positions that a token attends to, summed over layers. length: its context, itself included."""
        return sum(n * (length if window is None else min(length, window)) for window, n in self.layers.items())

    def all_seen(self, lengths: npt.NDArray[np.integer | np.floating]) -> npt.NDArray[np.float64]:
        """`seen` of several lengths."""
        total = np.zeros(len(lengths))
        for window, layers in self.layers.items():
            total += layers * (lengths if window is None else np.minimum(lengths, window))
        return total


class CostShares:
    """Computes shares from the tokens and the context of each request.

    All tokens of an iteration share its dense GEMMs, which cost the higher of reading the weights and multiplying.
    Attention counts per request: a decode reads its KV, a chunk multiplies with it. Recurrent states are read and
    written once by each request."""

    def __init__(self, spec: ModelSpec, weight_bytes: int, kv_bytes: int, *, cuda: bool) -> None:
        """kv_bytes: bytes of a token in one layer."""
        self._state_bytes = 2.0 * sum(state.nbytes for state in spec.states if state is not None)
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
        """Return each request's share of the iteration, `[R]`, summing to one."""
        tokens = batch.query_len.astype(np.float64)
        dense = max(self._per_token, self._weight_bytes / max(batch.num_tokens, 1))
        context = batch.kv_len - 0.5 * (tokens - 1)
        seen = self.costs.all_seen(context)
        cost = tokens * dense + seen * np.maximum(self._kv_bytes, self._per_pair * tokens) + self._state_bytes
        return np.asarray(cost / cost.sum())
