"""`pooled`: sums the hidden states of an iteration's embedding requests, on any device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.iteration.batch import I32, Batch


def pooled_rows(batch: Batch) -> I32:
    """Return `[N]` token rows whose hidden states are read, in the order of requests."""
    return np.concatenate([of.token_rows for of in batch.pooled]) if batch.pooled else np.zeros(0, np.int32)


def pooled(batch: Batch, hidden: Callable[[np.ndarray], Tensor]) -> Tensor | None:
    """Return a float32 sum for each of `batch.pooled`, `[P, H]`, or None if it is empty.

    hidden: returns the states `[N, H]` after the final norm of token rows `[N]`.
    """
    if not batch.pooled:
        return None
    states = hidden(pooled_rows(batch)).float()
    counts = [len(of.token_rows) for of in batch.pooled]
    if len(states) == len(counts):
        return states
    return torch.stack([part.sum(0) for part in states.split(counts)])
