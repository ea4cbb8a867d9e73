"""`Eagle3Layer`: what an EAGLE-3 head computes, in plain torch operations for any device, except attention.

The head's K and V of a token depend on the token and the target's states at the token before, so they lie at the
position of the token. The first token of a request has none, and no query sees that position. After a cached prefix the
states at the token before are not known; zeros stand for them. That can make a draft wrong, never a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.reference.layer import head_norm


class Eagle3Layer:
    """table `[V, H]`: embeddings to use if the head has none."""

    def __init__(self, draft: Eagle3Head, weights: Eagle3Weights, table: Tensor, config: ResolvedConfig) -> None:
        layer, kv = draft.layer, config.kv
        self.weights = weights
        self.num_heads, self.head_dim, self.hidden_size = layer.num_heads, layer.head_dim, layer.hidden_size
        self._eps, self._before = layer.norm.eps, draft.norm_before_residual
        self._table = table if weights.embedding is None else weights.embedding
        self.kv_layer, self._page_size = kv.first_draft_layer, kv.page_size

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype) * weight

    def normed(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer reads `[T, 2 H]`, and what its output is added to `[T, H]`."""
        w = self.weights
        state = self._norm(hidden, w.hidden_norm)
        embedded = self._norm(F.embedding(token_ids, self._table), w.input_norm)
        return torch.cat((embedded, state), -1), state if self._before else hidden

    def _rotated(self, x: Tensor, positions: Tensor, norm: Tensor | None) -> Tensor:
        """Rotate the two halves of each head of `x [T, heads * D]`, after its norm if it has one."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = head_norm(heads, norm, self._eps)
        cos, sin = self.weights.rotary[positions][:, None].unbind(-1)
        a, b = heads.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def write(self, kv: Tensor, read: Tensor, positions: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V of tokens, given what the layer reads, to the pages of `KvLayout.draft_view`."""
        w = self.weights
        page, offset = slot_mapping // self._page_size, slot_mapping % self._page_size
        k = self._rotated(F.linear(read, w.k), positions, w.k_norm)
        kv[page, self.kv_layer, 0, offset] = k.to(kv.dtype)
        kv[page, self.kv_layer, 1, offset] = F.linear(read, w.v).view(k.shape).to(kv.dtype)

    def queries(self, read: Tensor, positions: Tensor) -> Tensor:
        """Return `[T, Hq, D]`."""
        return self._rotated(F.linear(read, self.weights.q), positions, self.weights.q_norm)

    def end(self, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of the draft vocabulary `[n, Vd]` float32, and the stream `[n, H]` that the next step reads,
        given the result of attention."""
        w = self.weights
        residual = residual + F.linear(mixed, w.o)
        inner = self._norm(residual, w.post_norm)
        residual = residual + F.linear(F.silu(F.linear(inner, w.gate)) * F.linear(inner, w.up), w.down)
        return F.linear(self._norm(residual, w.norm), w.head).float(), residual
