"""`Sampling`: the steps around the sampler, on any device: penalties, biases, masks, token counts, log-probabilities,
and `pooled`, the sums of hidden states for embeddings.

Applies all per-request columns except those that the samplers in `kernels/` read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.device.collectives import Collectives, DeviceCollectives, SingleRank
from weft.engine.runner.iteration.batch import (
    I32,
    PROMPT_LOGPROB_ROWS,
    Batch,
    CountReset,
    Logprobs,
    PromptLogprobs,
    SamplingInputs,
)
from weft.kernels.reference import sampling, sampling_shards


class Scores(NamedTuple):
    """Log-probabilities in host tensors. Call `read` after the iteration has ended."""

    rows: np.ndarray
    columns: tuple[Tensor, ...]  # Ranks, ids and values as in `Logprobs`.

    def read(self) -> Logprobs:
        ranks, ids, values = (column.numpy() for column in self.columns)
        return Logprobs(self.rows.astype(np.int32), ranks, ids, values)


class RawLogits(NamedTuple):
    """The model's unchanged logits of rows that need log-probabilities."""

    rows: np.ndarray
    logits: Tensor


class Sampling:
    """Launches on the current stream and never waits for the GPU: all transfers are pinned and non-blocking.

    With several ranks it covers the rank's shard of the vocabulary, of size V below. Ranks agree on the sampled tokens.
    """

    def __init__(
        self, device: torch.device, num_slots: int, vocabulary: range,
        collectives: Collectives | DeviceCollectives | None = None,
    ) -> None:  # fmt: skip
        """vocabulary: token ids of the logits' columns."""
        collectives = collectives or SingleRank()
        self._device = device
        self._pinned = device.type == "cuda"
        self._ids = vocabulary
        self._shape = (num_slots, len(vocabulary))
        self._shard = (
            sampling_shards.Shard(vocabulary.start, collectives.rank, collectives.all_gather)
            if collectives.ranks > 1
            else None
        )
        self._counts: tuple[Tensor, Tensor] | None = None

    def to_device(self, array: np.ndarray) -> Tensor:
        """Return the array on the device; on the CPU it is the same memory."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._pinned else tensor

    def raw_logits(self, logits: Tensor, s: SamplingInputs) -> RawLogits | None:
        """Return a copy of the logits of rows that need log-probabilities. Call before `adjust`."""
        rows = np.flatnonzero(s.columns["logprobs"] >= 0)
        return RawLogits(rows, logits[self.to_device(rows)]) if len(rows) else None

    def adjust(self, logits: Tensor, batch: Batch, token_ids: Tensor | None = None) -> None:
        """Apply penalties, biases and grammar masks in place to `logits [S, V]` float32, before the sampler. token_ids
        `[T]` int32 on the device, if the host does not know the drafts."""
        s = batch.sampling
        for reset in batch.count_resets:
            self._reset_counts(reset)
        if s.columns["counted"].any():
            self._penalize(logits, batch, token_ids)
        if len(s.bias_rows):
            own = self._own(s.bias_ids)
            where = (self.to_device(s.bias_rows[own].astype(np.int64)), self.to_device(self._columns(s.bias_ids)))
            logits.index_put_(where, self.to_device(s.bias_values[own]), accumulate=True)
        if len(s.mask_rows):
            rows, masks = self.to_device(s.mask_rows.astype(np.int64)), self.to_device(s.masks)
            sampling.allow_only(logits, rows, masks, self._ids.start)

    def draw(self, logits: Tensor, s: SamplingInputs) -> tuple[Tensor, Tensor]:
        """Sample with the reference implementation. Returns tokens `[S]` int64 and rows that are not finite `[S]`."""
        arguments = {name: self.to_device(values) for name, values in s.sampler_arguments().items()}
        if self._shard is not None:
            self._shard = self._shard.with_sizes(logits)
            return sampling_shards.sample(logits, self._shard, **arguments, summary=self._summary(s))
        tokens = sampling.sample(logits, **arguments) if s.columns["temperature"].any() else logits.argmax(-1)
        return tokens, sampling.nonfinite(logits)

    def _summary(self, s: SamplingInputs) -> sampling_shards.SamplingSummary:
        """`SamplingSummary.of`, from the host's columns."""
        rows = np.flatnonzero(s.columns["temperature"] > 0)
        k, p = s.columns["top_k"][rows], s.columns["top_p"][rows]
        cut = np.flatnonzero((k > 0) | (p < 1.0))
        k = k[cut]
        return sampling_shards.SamplingSummary(
            self.to_device(rows), self.to_device(cut), int(k.max()) if len(cut) else 0, bool((k > 0).all())
        )  # fmt: skip

    def count(self, tokens: Tensor, s: SamplingInputs, reached: Tensor | None = None) -> None:
        """Count the sampled `tokens` (`[S]` or more) of requests with penalties, after the sampler. reached `[S]`: the
        samples that count; None: all."""
        counted = s.columns["counted"]
        if counted.any():
            rows, slots = self.to_device(np.flatnonzero(counted)), self.to_device(s.slots[counted].astype(np.int64))
            one = torch.ones((), dtype=torch.int32, device=self._device)
            if reached is not None:
                one = reached[rows].int()
            sampled = tokens[rows] - self._ids.start
            if self._shard is not None:
                # Tokens of other ranks add zero.
                one = one * ((sampled >= 0) & (sampled < len(self._ids))).int()
                sampled = sampled.clamp(0, len(self._ids) - 1)
            self._resident_counts()[1].index_put_((slots, sampled), one, accumulate=True)

    def scores(self, tokens: Tensor, s: SamplingInputs, raw: RawLogits | None) -> Scores | None:
        """Return scores from `raw_logits` and the sampled `tokens` (`[S]` or more), after the sampler."""
        if raw is None:
            return None
        columns: Sequence[Tensor] = self._logprobs_of(
            raw.logits, tokens[self.to_device(raw.rows)], int(s.columns["logprobs"].max())
        )
        if len(s.logprob_rows):
            columns = self._with_requested(columns, raw, s)
        return Scores(raw.rows, self.to_host(columns))

    def _with_requested(self, columns: Sequence[Tensor], raw: RawLogits, s: SamplingInputs) -> Sequence[Tensor]:
        """Add `[n, m]` ids and values: each row's `logprob_ids`, then zeros."""
        index = np.searchsorted(raw.rows, s.logprob_rows).astype(np.int64)
        place = np.arange(len(index)) - np.searchsorted(index, index)
        ranks, ids, values = columns
        more = torch.zeros((len(raw.rows), int(place.max()) + 1), dtype=ids.dtype, device=ids.device)
        scores = torch.zeros_like(more, dtype=values.dtype)
        for start in range(0, len(index), PROMPT_LOGPROB_ROWS):
            part = slice(start, start + PROMPT_LOGPROB_ROWS)
            rows, at, asked = (self.to_device(a[part].astype(np.int64)) for a in (index, place, s.logprob_ids))
            more[rows, at] = asked
            scores[rows, at] = self._logprobs_of(raw.logits[rows], asked, 0)[2][:, 0]
        return ranks, torch.cat((ids, more), -1), torch.cat((values, scores), -1)

    def prompt_scores(self, asked: PromptLogprobs, rows: np.ndarray, logits_of: Callable[[Tensor], Tensor]) -> Scores:
        """Return scores of prompt tokens. rows: their positions on the device. logits_of: returns logits of rows."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(rows), PROMPT_LOGPROB_ROWS):
            part = slice(start, start + PROMPT_LOGPROB_ROWS)
            at, targets = (
                self.to_device(rows[part].astype(np.int64)),
                self.to_device(asked.targets[part].astype(np.int64)),
            )
            parts.append(self._logprobs_of(logits_of(at), targets, asked.top))
        return Scores(np.arange(len(rows)), self.to_host([torch.cat(column) for column in zip(*parts, strict=True)]))

    def _logprobs_of(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._shard is not None:
            return sampling_shards.logprobs_of(logits, self._shard, tokens, top)
        return sampling.logprobs_of(logits, tokens, top)

    def _own(self, ids: np.ndarray) -> np.ndarray:
        """Return which token ids have a column here, bool."""
        return np.asarray((ids >= self._ids.start) & (ids < self._ids.stop))

    def _columns(self, ids: np.ndarray) -> np.ndarray:
        """Return the columns of the ids that have one, int64."""
        return ids[self._own(ids)].astype(np.int64) - self._ids.start

    def to_host(self, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors on the host, valid once the stream has reached this point."""
        if not self._pinned:
            return tuple(columns)
        out = []
        for tensor in columns:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            out.append(pinned)
        return tuple(out)

    def _penalize(self, logits: Tensor, batch: Batch, token_ids: Tensor | None) -> None:
        seen, counts = self._resident_counts()
        s = batch.sampling
        counted = s.columns["counted"]
        rows, slots = self.to_device(np.flatnonzero(counted)), self.to_device(s.slots[counted].astype(np.int64))
        presence, frequency, repetition = (
            self.to_device(s.columns[name][counted]) for name in ("presence", "frequency", "repetition")
        )
        own_counts = counts[slots]
        if batch.drafted:
            self._add_drafts(own_counts, batch, np.flatnonzero(counted), token_ids)
        logits[rows] = sampling.apply_penalties(logits[rows], seen[slots], own_counts, presence, frequency, repetition)

    def _add_drafts(self, counts: Tensor, batch: Batch, rows: np.ndarray, token_ids: Tensor | None) -> None:
        """Count, in `counts [n, V]` of n samples, the drafts before each of them. rows `[n]`: the samples. token_ids:
        see `adjust`."""
        verified = batch.verified
        assert verified is not None
        before = rows - verified.first[rows]
        sample = np.repeat(np.arange(len(rows)), before)
        # The last draft before a sample is the token that it is sampled after.
        back = np.arange(len(sample)) - np.repeat(np.cumsum(before) - before, before)
        at = batch.sampling.logit_tokens[rows][sample] - back
        if token_ids is not None:  # of one rank, which has all columns
            where = self.to_device(sample), token_ids[self.to_device(at)].long()
        else:
            drafts = batch.token_ids[at]
            own = self._own(drafts)
            where = (self.to_device(sample[own]), self.to_device(self._columns(drafts)))
        counts.index_put_(where, torch.ones((), dtype=counts.dtype, device=self._device), accumulate=True)

    def _reset_counts(self, reset: CountReset) -> None:
        seen, counts = self._resident_counts()
        seen[reset.slot] = False
        seen[reset.slot, self.to_device(self._columns(reset.prompt))] = True
        output = self.to_device(self._columns(reset.output))
        counts[reset.slot] = torch.bincount(output, minlength=self._shape[1]).int() if len(output) else 0

    def _resident_counts(self) -> tuple[Tensor, Tensor]:
        """Return (prompt_seen bool, output counts int32) `[slots, V]`, created by the first request with penalties."""
        if self._counts is None:
            seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._counts = seen, torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts


def pooled_rows(batch: Batch) -> I32:
    """Return `[N]` token rows whose hidden states are read, in the order of requests."""
    return np.concatenate([of.token_rows for of in batch.pooled]) if batch.pooled else np.zeros(0, np.int32)


def pooled(batch: Batch, hidden: Callable[[np.ndarray], Tensor]) -> Tensor | None:
    """Return a float32 sum for each of `batch.pooled`, `[P, H]`, or None if it is empty.

    hidden: returns the states `[N, H]` after the final norm of token rows `[N]`."""
    if not batch.pooled:
        return None
    states = hidden(pooled_rows(batch)).float()
    counts = [len(of.token_rows) for of in batch.pooled]
    if len(states) == len(counts):
        return states
    return torch.stack([part.sum(0) for part in states.split(counts)])
