"""`CpuEagle3`: an EAGLE-3 head that drafts.

The head's K and V of a token depend on the token and the target's states at the token before, so they lie at the
position of the token. The first token of a request has none, and no query sees that position. After a cached prefix the
states at the token before are not known; zeros stand for them. That can make a draft wrong, never a token.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts.drafter import draft_in_turn
from weft.engine.runner.iteration.batch import I32, Batch
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.torch_backend import TorchAttention
from weft.kernels.reference.layer import head_norm


class CpuEagle3:
    """See `CpuDrafter`."""

    def __init__(
        self, draft: Eagle3Head, weights: Eagle3Weights, target: CpuExecutor, config: ResolvedConfig, pool: Tensor
    ) -> None:
        layer, kv = draft.layer, config.kv
        self.taps = draft.taps
        self._weights, self._eps, self._before = weights, layer.norm.eps, draft.norm_before_residual
        self._heads, self._head_dim = layer.num_heads, layer.head_dim
        self._table = target.weights.embedding if weights.embedding is None else weights.embedding
        self._kv, self._layer, self._page_size = kv.draft_view(pool), kv.first_draft_layer, kv.page_size
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
        self._write(batch, self._normed(token_ids, before)[0])
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

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype) * weight

    def _normed(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer reads `[T, 2 H]`, and what its output is added to `[T, H]`."""
        w = self._weights
        state = self._norm(hidden, w.hidden_norm)
        embedded = self._norm(F.embedding(token_ids, self._table), w.input_norm)
        return torch.cat((embedded, state), -1), state if self._before else hidden

    def _rotated(self, x: Tensor, positions: Tensor, norm: Tensor | None) -> Tensor:
        """Rotate the two halves of each head of `x [T, heads * D]`, after its norm if it has one."""
        heads = x.unflatten(-1, (-1, self._head_dim))
        if norm is not None:
            heads = head_norm(heads, norm, self._eps)
        cos, sin = self._weights.rotary[positions][:, None].unbind(-1)
        a, b = heads.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def _write(self, batch: Batch, read: Tensor) -> None:
        """Write K and V of all tokens of a batch, given what the layer reads."""
        w, positions = self._weights, torch.from_numpy(batch.positions.astype(np.int64))
        at = torch.from_numpy(batch.slot_mapping)
        page, offset = at // self._page_size, at % self._page_size
        k = self._rotated(F.linear(read, w.k), positions, w.k_norm)
        self._kv[page, self._layer, 0, offset] = k.to(self._kv.dtype)
        self._kv[page, self._layer, 1, offset] = F.linear(read, w.v).view(k.shape).to(self._kv.dtype)

    def _step(self, decodes: Batch, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the draft vocabulary `[n, Vd]` float32, and the stream `[n, H]` that the next step reads."""
        w, positions = self._weights, torch.from_numpy(decodes.positions.astype(np.int64))
        read, residual = self._normed(token_ids, hidden)
        self._write(decodes, read)
        q = self._rotated(F.linear(read, w.q), positions, w.q_norm)
        work = self._attention.prepare(decodes)
        for group in work[None].decode.groups:
            group.mask[..., 0] = -torch.inf  # the position without K and V
        mixed = q.new_zeros(len(q), self._heads * self._head_dim)
        self._attention.decode(q, self._kv, self._layer, work, out=mixed)
        residual = residual + F.linear(mixed, w.o)
        inner = self._norm(residual, w.post_norm)
        residual = residual + F.linear(F.silu(F.linear(inner, w.gate)) * F.linear(inner, w.up), w.down)
        return F.linear(self._norm(residual, w.norm), w.head).float(), residual
