"""`CpuDrafter`: a model that drafts, as the runner uses it, and the single decodes that it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.iteration.batch import I32, UNDRAFTED, Batch, SamplingInputs


class CpuDrafter(Protocol):
    """Computes an iteration's drafts in its beginning. Their number is the scheduler's choice. So no draft needs a page
    that its request does not have, and the host need not know a draft before it is verified."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose input `follow` gets."""
        ...

    def draft(self, batch: Batch, token_ids: Tensor) -> None:
        """Fill in the drafts among `token_ids [T]`, which are `UNDRAFTED`."""
        ...

    def follow(self, batch: Batch, token_ids: Tensor, tapped: list[Tensor], last: I32) -> None:
        """Take in an iteration that was verified: write K and V of all of its tokens. tapped: the residual stream
        `[T, H]` at each of `taps`. last `[R]`: the last token of each request that counts."""
        ...


def draft_in_turn(batch: Batch, token_ids: Tensor, step: Callable[[Batch, Tensor, I32], Tensor]) -> None:
    """Fill in drafts, the first of all requests, then the second, and so on. `step` gets decodes of one token each, the
    ids `[n]` of these tokens, and their rows in `batch`; it returns the tokens `[n]` that follow."""
    undrafted = np.flatnonzero(batch.token_ids == UNDRAFTED)
    of = np.repeat(np.arange(batch.num_requests), batch.query_len)
    firsts = np.cumsum(batch.query_len) - batch.query_len
    offset = undrafted - firsts[of[undrafted]]
    for place in range(1, int(offset.max(initial=0)) + 1):
        at = undrafted[offset == place]
        if len(at):
            before = torch.from_numpy(at - 1)
            token_ids[at] = step(single_decodes(batch, at - 1), token_ids[before], of[at])


def single_decodes(batch: Batch, tokens: np.ndarray) -> Batch:
    """Return an iteration with a decode for each of these tokens of decodes, which samples nothing."""
    of, number = np.repeat(np.arange(batch.num_requests), batch.query_len)[tokens], len(tokens)
    at = np.arange(number, dtype=np.int32)
    return batch._replace(
        num_decodes=number, slots=batch.slots[of], epochs=batch.epochs[of], page_table=batch.page_table[of],
        query_len=np.ones(number, np.int32), kv_len=batch.positions[tokens] + 1, token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens], slot_mapping=batch.slot_mapping[tokens], sampled_rows=at,
        sampling=SamplingInputs.none()._replace(logit_tokens=at), count_resets=(), prompt_logprobs=(), pooled=(),
        adapters=None, drafted=False,
    )  # fmt: skip
