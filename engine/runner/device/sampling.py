"""`Sampling`: what follows the logits, on any device: penalties, biases, masks, token counts, log-probabilities.

The one place where a per-request column has its effect, but for those that the samplers in `kernels/` take themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.runner.device.collectives import Alone, Collectives, DeviceCollectives
from weft.engine.runner.iteration.batch import (
    PROMPT_LOGPROB_ROWS,
    Batch,
    CountReset,
    Logprobs,
    PromptLogprobs,
    SamplingInputs,
)
from weft.kernels.reference import sampling, sampling_shards


class Scores(NamedTuple):
    """Log-probabilities on the host once the iteration is done; to be read then."""

    rows: np.ndarray
    columns: tuple[Tensor, ...]
    """ranks, ids, values as in `Logprobs`"""

    def read(self) -> Logprobs:
        ranks, ids, values = (column.numpy() for column in self.columns)
        return Logprobs(self.rows.astype(np.int32), ranks, ids, values)


class Raw(NamedTuple):
    """Logits as the model gave them, of the rows that asked for log-probabilities."""

    rows: np.ndarray
    logits: Tensor


class Sampling:
    """Works on the current stream. On a GPU nothing here waits for it: all transfers are pinned and non-blocking.

    Of one rank of several it has the part of a vocabulary that the rank's logits are of: V below is the size of that
    part. Which tokens are sampled is agreed on with the others.
    """

    def __init__(
        self,
        device: torch.device,
        num_slots: int,
        vocabulary: range,
        collectives: Collectives | DeviceCollectives | None = None,
    ) -> None:
        """`vocabulary`: the ids of the columns of the logits."""
        collectives = collectives or Alone()
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

    def up(self, array: np.ndarray) -> Tensor:
        """The array on the device. On the CPU it is the same memory."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._pinned else tensor

    def asked(self, logits: Tensor, s: SamplingInputs) -> Raw | None:
        """Ahead of `adjust`: the logits of rows that asked for log-probabilities, which are the model's own."""
        rows = np.flatnonzero(s.columns["logprobs"] >= 0)
        return Raw(rows, logits[self.up(rows)]) if len(rows) else None

    def adjust(self, logits: Tensor, batch: Batch) -> None:
        """Ahead of the sampler: penalties, biases and the masks of grammars, in place on `logits [S, V]` float32."""
        s = batch.sampling
        for reset in batch.count_resets:
            self._reset_counts(reset)
        if s.columns["counted"].any():
            self._penalize(logits, s)
        if len(s.bias_rows):
            own = self._own(s.bias_ids)
            where = (self.up(s.bias_rows[own].astype(np.int64)), self.up(self._columns(s.bias_ids)))
            logits.index_put_(where, self.up(s.bias_values[own]), accumulate=True)
        if len(s.mask_rows):
            rows, masks = self.up(s.mask_rows.astype(np.int64)), self.up(s.masks)
            sampling.allow_only(logits, rows, masks, self._ids.start)

    def draw(self, logits: Tensor, s: SamplingInputs) -> tuple[Tensor, Tensor]:
        """The torch twins' choice: tokens `[S]` int64, and rows that hold no numbers `[S]` bool."""
        arguments = {name: self.up(values) for name, values in s.sampler_arguments().items()}
        if self._shard is not None:
            self._shard = self._shard.with_sizes(logits)
            return sampling_shards.sample(logits, self._shard, **arguments, asked=self._asked(s))
        tokens = sampling.sample(logits, **arguments) if s.columns["temperature"].any() else logits.argmax(-1)
        return tokens, sampling.nonfinite(logits)

    def _asked(self, s: SamplingInputs) -> sampling_shards.Asked:
        """`Asked.of`, from the host's columns."""
        rows = np.flatnonzero(s.columns["temperature"] > 0)
        k, p = s.columns["top_k"][rows], s.columns["top_p"][rows]
        cut = np.flatnonzero((k > 0) | (p < 1.0))
        k = k[cut]
        return sampling_shards.Asked(
            self.up(rows), self.up(cut), int(k.max()) if len(cut) else 0, bool((k > 0).all())
        )  # fmt: skip

    def count(self, tokens: Tensor, s: SamplingInputs) -> None:
        """Behind the sampler: count the sampled `tokens` (`[S]` or more) of requests with penalties."""
        counted = s.columns["counted"]
        if counted.any():
            rows, slots = self.up(np.flatnonzero(counted)), self.up(s.slots[counted].astype(np.int64))
            one = torch.ones((), dtype=torch.int32, device=self._device)
            sampled = tokens[rows] - self._ids.start
            if self._shard is not None:
                # those of other ranks count nothing
                one = ((sampled >= 0) & (sampled < len(self._ids))).int()
                sampled = sampled.clamp(0, len(self._ids) - 1)
            self._resident_counts()[1].index_put_((slots, sampled), one, accumulate=True)

    def scores(self, tokens: Tensor, s: SamplingInputs, raw: Raw | None) -> Scores | None:
        """Behind the sampler: what `asked` kept, with the sampled `tokens` (`[S]` or more)."""
        if raw is None:
            return None
        columns = self._logprobs_of(raw.logits, tokens[self.up(raw.rows)], int(s.columns["logprobs"].max()))
        return Scores(raw.rows, self.down(columns))

    def prompt_scores(self, asked: PromptLogprobs, rows: np.ndarray, logits_of: Callable[[Tensor], Tensor]) -> Scores:
        """Scores of prompt tokens. `rows`: where the positions stand on the device; `logits_of` gives their logits."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(rows), PROMPT_LOGPROB_ROWS):
            part = slice(start, start + PROMPT_LOGPROB_ROWS)
            at, targets = self.up(rows[part].astype(np.int64)), self.up(asked.targets[part].astype(np.int64))
            parts.append(self._logprobs_of(logits_of(at), targets, asked.top))
        return Scores(np.arange(len(rows)), self.down([torch.cat(column) for column in zip(*parts, strict=True)]))

    def _logprobs_of(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        if self._shard is not None:
            return sampling_shards.logprobs_of(logits, self._shard, tokens, top)
        return sampling.logprobs_of(logits, tokens, top)

    def _own(self, ids: np.ndarray) -> np.ndarray:
        """Which token ids have a column here, bool."""
        own: np.ndarray = (ids >= self._ids.start) & (ids < self._ids.stop)
        return own

    def _columns(self, ids: np.ndarray) -> np.ndarray:
        """int64, of those that have one."""
        return ids[self._own(ids)].astype(np.int64) - self._ids.start

    def down(self, columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors on the host, once the stream is there."""
        if not self._pinned:
            return tuple(columns)
        out = []
        for tensor in columns:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            out.append(pinned)
        return tuple(out)

    def _penalize(self, logits: Tensor, s: SamplingInputs) -> None:
        seen, counts = self._resident_counts()
        counted = s.columns["counted"]
        rows, slots = self.up(np.flatnonzero(counted)), self.up(s.slots[counted].astype(np.int64))
        presence, frequency, repetition = (
            self.up(s.columns[name][counted]) for name in ("presence", "frequency", "repetition")
        )
        logits[rows] = sampling.apply_penalties(
            logits[rows], seen[slots], counts[slots], presence, frequency, repetition
        )

    def _reset_counts(self, reset: CountReset) -> None:
        seen, counts = self._resident_counts()
        seen[reset.slot] = False
        seen[reset.slot, self.up(self._columns(reset.prompt))] = True
        output = self.up(self._columns(reset.output))
        counts[reset.slot] = torch.bincount(output, minlength=self._shape[1]).int() if len(output) else 0

    def _resident_counts(self) -> tuple[Tensor, Tensor]:
        """(prompt_seen bool, output counts int32) `[slots, V]`, made when the first request with penalties comes."""
        if self._counts is None:
            seen = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._counts = seen, torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._counts
