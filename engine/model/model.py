"""The serial plan: one pass of the model over a batch, kernel by kernel. Tensors only; it knows no request."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.kernels import reference as k
from weft.kernels.attention import AttentionBackend


class ModelInputs(NamedTuple):
    """Device tensors of one iteration."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    slot_mapping: Tensor
    """[T] int64"""
    attention: Any
    """the attention back end's step"""


class Model:
    """Weights and KV pool of one device. `kv [pages, layers, 2, page_size, Hkv, D]`."""

    def __init__(self, spec: ModelSpec, weights: Weights, kv: Tensor, attention: AttentionBackend[Any]) -> None:
        self.spec = spec
        self.weights = weights
        self.kv = kv
        self.attention = attention

    def forward(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer: x `[T, H]` and its sum of squares `[T]`."""
        spec, weights, eps = self.spec, self.weights, self.spec.rms_norm_eps
        x, sumsq = k.embed(inputs.token_ids, weights.embedding)
        rotary = weights.rotary[inputs.positions]  # once for all layers
        for i, w in enumerate(weights.layers):
            q = k.qkv_project(
                x,
                sumsq,
                w.qkv,
                w.qkv_bias,
                eps,
                rotary,
                slice(None),
                inputs.slot_mapping,
                self.kv,
                i,
                spec.num_heads,
            )
            a = self.attention.attend(q, self.kv, i, inputs.attention, out=q.new_empty(len(q), q[0].numel()))
            x, sumsq = k.residual_project(a, w.o, x if w.o_bias is None else x + w.o_bias)
            h = k.gate_up_project(x, sumsq, w.gate_up, eps)
            x, sumsq = k.residual_project(h, w.down, x)
        return x, sumsq

    def logits(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """`[S, V]` float32 logits of the rows `[S]` that need them."""
        w = self.weights
        return k.lm_head(x[rows], sumsq[rows], w.norm, w.lm_head, self.spec.rms_norm_eps)
