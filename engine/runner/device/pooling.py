"""`pooled`: the hidden states that an iteration's embeddings ask for, added up, on any device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.iteration.batch import I32, Batch


def pooled_rows(batch: Batch) -> I32:
    """`[N]`: rows of the iteration's tokens whose hidden states are read, by request."""
    return np.concatenate([of.token_rows for of in batch.pooled]) if batch.pooled else np.zeros(0, np.int32)


def pooled(batch: Batch, hidden: Callable[[np.ndarray], Tensor]) -> Tensor | None:
    """`[P, H]` float32: a sum for each of `batch.pooled`; None where there is none.

    hidden: gives the states `[N, H]` behind the final norm of rows `[N]` of the iteration's tokens.
    """
    if not batch.pooled:
        return None
    states = hidden(pooled_rows(batch)).float()
    counts = [len(of.token_rows) for of in batch.pooled]
    if len(states) == len(counts):
        return states
    return torch.stack([part.sum(0) for part in states.split(counts)])
