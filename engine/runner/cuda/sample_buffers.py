"""`SampleBuffers`: logits, sampled tokens and last tokens of slots on a GPU, which all executors share."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.kernels.sampling import resident, verified
from weft.kernels.sampling.sampler import sample, sample_scratch


class SampleBuffers:
    """vocabulary: columns of the logits."""

    def __init__(self, inputs: DeviceInputs, vocabulary: int) -> None:
        self.inputs = inputs
        device, s = inputs.slab.device, inputs.layout.max_sampled
        self.last_token = torch.zeros(s, dtype=torch.int64, device=device)
        """`[slots]` last sampled token of each slot's request."""
        # The copy engine requires rows of a multiple of 16 bytes.
        self.logits = torch.zeros(s, -(-vocabulary // 4) * 4, dtype=torch.float32, device=device)[:, :vocabulary]
        self.sampled = torch.zeros(2, s, dtype=torch.int64, device=device)
        """`[2, rows]` sampled tokens, and 1 for rows whose logits are not finite."""
        self.tokens, self._bad = self.sampled
        self.reached = torch.zeros(s, dtype=torch.int32, device=device)
        """`[rows]` 1 for samples that count, if iterations may have drafts."""
        self._candidates = sample_scratch(s, device)
        self._ids = torch.zeros(inputs.layout.max_tokens, dtype=torch.int32, device=device)

    def _prepare(self, tokens: int) -> Tensor:
        """Update the page table and return the token ids `[tokens]`, with those of decodes from `last_token`."""
        column, ids = self.inputs.column, self._ids[:tokens]
        resident.prepare(
            column["token_ids"], column["token_slots"], self.last_token, self.inputs.page_table, column["update_at"],
            column["update_page"], self.inputs.count["updates"], out=ids,
        )  # fmt: skip
        return ids

    @property
    def ids(self) -> Tensor:
        """`[T]` int32 token ids of the last run."""
        return self._ids

    def sample(self, num_rows: int) -> None:
        """Sample `tokens` from the first rows of `logits`, and store each as its slot's last token."""
        sample(
            self.logits[:num_rows], **self.inputs.sampler_arguments(num_rows), out=self.tokens[:num_rows],
            bad=self._bad[:num_rows], scratch=self._candidates[:num_rows],
        )  # fmt: skip
        self._remember(num_rows)

    def _remember(self, rows: int) -> None:
        column, count = self.inputs.column, self.inputs.count["sampled"]
        tokens, slots = self.tokens[:rows], column["slots"][:rows]
        if not self.inputs.layout.verifies:
            resident.remember(tokens, slots, count, self.last_token)
            return
        verified.remember_verified(
            tokens, self._bad[:rows], column["first"][:rows], column["expected"][:rows], slots, count,
            self.last_token, reached=self.reached[:rows],
        )  # fmt: skip
