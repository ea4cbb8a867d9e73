"""`CpuEagle3`: an EAGLE-3 head that drafts on the CPU."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts.drafter import draft_in_turn
from weft.engine.runner.device.eagle3 import Eagle3Layer
from weft.engine.runner.iteration.batch import I32, Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.torch_backend import TorchAttention


class CpuEagle3:
    """See `CpuDrafter`."""

    def __init__(
        self, draft: Eagle3Head, weights: Eagle3Weights, target: CpuExecutor, config: ResolvedConfig, pool: Tensor
    ) -> None:
        layer, kv = draft.layer, config.kv
        self.taps = draft.taps
        self._weights = weights
        self._layer = Eagle3Layer(draft, weights, target.weights.embedding, config)
        self._kv = kv.draft_view(pool)
        shape = AttentionShape(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, kv.page_size, config.compute_dtype, config.device,
            kv.dtype,
        )  # fmt: skip
        self._attention = TorchAttention(shape)
        slots = config.max_num_seqs
        self._state = torch.zeros(slots, layer.hidden_size, dtype=config.compute_dtype)
        """`[slots, H]` the projected states at the newest token that the target has computed."""
        self._epoch = np.full(slots, -1, np.int64)
        self._next = np.zeros(slots, np.int64)
        """Epoch of each slot's request, and the position after that token."""

    def draft(self, batch: Batch, token_ids: Tensor) -> None:
        hidden = self._before_first(batch)

        def step(decodes: Batch, tokens: Tensor, rows: I32) -> Tensor:
            at = torch.from_numpy(rows)
            logits, hidden[at] = self._step(decodes, tokens, hidden[at])
            return self._weights.ids[logits.argmax(-1)]

        draft_in_turn(batch, token_ids, step)

    def follow(self, batch: Batch, token_ids: Tensor, tapped: list[Tensor], last: I32) -> None:
        states = F.linear(torch.cat(tapped, -1), self._weights.fc)
        before = states.roll(1, 0)
        before[torch.from_numpy(np.cumsum(batch.query_len) - batch.query_len).long()] = self._before_first(batch)
        self._write(batch, self._layer.normed(token_ids, before)[0])
        slots = batch.slots
        self._state[torch.from_numpy(slots.astype(np.int64))] = states[torch.from_numpy(last.astype(np.int64))]
        self._epoch[slots], self._next[slots] = batch.epochs, batch.positions[last] + 1

    def _before_first(self, batch: Batch) -> Tensor:
        """Return the states `[R, H]` at the token before each request's first; zeros if they are not known."""
        firsts = np.cumsum(batch.query_len) - batch.query_len
        slots = batch.slots
        known = (self._epoch[slots] == batch.epochs) & (self._next[slots] == batch.positions[firsts])
        states = self._state[torch.from_numpy(slots.astype(np.int64))]
        return states.masked_fill(~torch.from_numpy(known)[:, None], 0.0)

    def _write(self, batch: Batch, read: Tensor) -> None:
        positions = torch.from_numpy(batch.positions.astype(np.int64))
        self._layer.write(self._kv, read, positions, torch.from_numpy(batch.slot_mapping))

    def _step(self, decodes: Batch, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See `Eagle3Layer.end`."""
        layer = self._layer
        read, residual = layer.normed(token_ids, hidden)
        self._write(decodes, read)
        q = layer.queries(read, torch.from_numpy(decodes.positions.astype(np.int64)))
        work = self._attention.prepare(decodes)
        for group in work[None].decode.groups:
            group.mask[..., 0] = -torch.inf  # the position without K and V
        mixed = q.new_zeros(len(q), layer.num_heads * layer.head_dim)
        self._attention.decode(q, self._kv, layer.kv_layer, work, out=mixed)
        return layer.end(mixed, residual)
