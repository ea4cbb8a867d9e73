"""`StateDrafter`: a drafter that reads the target's state at the token before, on the CPU.

Its K and V of a token depend on the token and the state at the token before, so they lie at the position of the token.
The first token of a request has none, and no query sees that position. After a cached prefix the state at the token
before is not known; zeros stand for it. That can make a draft wrong, never a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.cpu.drafts.drafter import draft_in_turn
from weft.engine.runner.iteration.batch import I32, Batch
from weft.kernels.attention.backend import AttentionRequests
from weft.kernels.attention.torch_backend import TorchAttention, TorchStep


class StateDrafter(ABC):
    """See `CpuDrafter`. width: columns of a state."""

    def __init__(self, taps: tuple[int, ...], slots: int, width: int, dtype: torch.dtype) -> None:
        self.taps = taps
        self._state = torch.zeros(slots, width, dtype=dtype)
        """`[slots, width]` the states at the newest token that the target has computed."""
        self._epoch = np.full(slots, -1, np.int64)
        self._next = np.zeros(slots, np.int64)
        """Epoch of each slot's request, and the position after that token."""

    @abstractmethod
    def _states(self, tapped: list[Tensor]) -> Tensor:
        """Return the states `[T, width]` of an iteration, given the target's stream at each of `taps`."""

    @abstractmethod
    def _write(self, batch: Batch, token_ids: Tensor, before: Tensor) -> None:
        """Write K and V of all tokens. before `[T, width]`: the states at the tokens before them."""

    @abstractmethod
    def _step(self, decodes: Batch, token_ids: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens `[n]` that follow, and the states that the next step reads. Writes K and V."""

    def draft(self, batch: Batch, token_ids: Tensor) -> None:
        hidden = self._before_first(batch)

        def step(decodes: Batch, tokens: Tensor, rows: I32) -> Tensor:
            at = torch.from_numpy(rows)
            drafted, hidden[at] = self._step(decodes, tokens, hidden[at])
            return drafted

        draft_in_turn(batch, token_ids, step)

    def follow(self, batch: Batch, token_ids: Tensor, tapped: list[Tensor], last: I32) -> None:
        states = self._states(tapped)
        before = states.roll(1, 0)
        before[torch.from_numpy(np.cumsum(batch.query_len) - batch.query_len).long()] = self._before_first(batch)
        self._write(batch, token_ids, before)
        slots = batch.slots
        self._state[torch.from_numpy(slots.astype(np.int64))] = states[torch.from_numpy(last.astype(np.int64))]
        self._epoch[slots], self._next[slots] = batch.epochs, batch.positions[last] + 1

    def _before_first(self, batch: Batch) -> Tensor:
        """Return the states `[R, width]` at the token before each request's first; zeros if they are not known."""
        firsts = np.cumsum(batch.query_len) - batch.query_len
        slots = batch.slots
        known = (self._epoch[slots] == batch.epochs) & (self._next[slots] == batch.positions[firsts])
        states = self._state[torch.from_numpy(slots.astype(np.int64))]
        return states.masked_fill(~torch.from_numpy(known)[:, None], 0.0)


class HidingAttention(TorchAttention):
    """Hides the first position of each request from decodes: it has no K and V."""

    def prepare(self, requests: AttentionRequests) -> TorchStep:
        step = super().prepare(requests)
        for work in step.values():
            for group in work.decode.groups:
                group.mask[..., 0] = -torch.inf
        return step
