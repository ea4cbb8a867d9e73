"""The dry run: one forward pass on shapes, which records every attention call of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.errors import ModelError
from weft.engine.model.transformers_impl.hook import attending
from weft.engine.model.transformers_impl.module import TransformersModule
from weft.engine.model.transformers_impl.spec import AttentionCall

TOKENS = 3
KNOWN = {
    "scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_router_logits", "output_attentions", "deterministic", "logits_to_keep",
}  # fmt: skip
"""Arguments of an attention call that are supported or have no effect on generation."""


def layer_of(module: nn.Module) -> int:
    """Return the layer index of an attention module."""
    return int(getattr(module, "layer_idx", None) or 0)


def call_of(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> AttentionCall:
    """Describe an attention call. Raises `ModelError` if the attention back ends cannot compute it."""
    for name, value in given.items():
        if name not in KNOWN and value is not None and (isinstance(value, Tensor) or name == "position_bias"):
            raise ModelError(f"it passes {name} to its attention, which the attention back ends do not support")
    if q.shape[0] != 1:
        raise ModelError(f"its attention splits one batch into {q.shape[0]}")
    if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2] or k.shape[3] != q.shape[3]:
        raise ModelError("its attention uses keys and values that are not those of its tokens")
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ModelError(f"its attention has {q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads")
    if given.get("is_causal") is False:
        raise ModelError("its attention looks ahead: it is not a decoder")
    if getattr(module, "is_cross_attention", False):
        raise ModelError("its attention reads an encoder's states")
    scale, window, softcap = given.get("scaling"), given.get("sliding_window"), given.get("softcap")
    if any(isinstance(value, Tensor) for value in (scale, window, softcap)):
        raise ModelError("its attention's scale, window or soft-cap changes from step to step")
    return AttentionCall(
        layer_of(module),
        q.shape[1],
        k.shape[1],
        k.shape[3],
        v.shape[3],
        float(q.shape[3] ** -0.5 if scale is None else scale),
        int(window) if window else None,
        float(softcap or 0.0),
        given.get("s_aux") is not None,
    )


def attention_calls(model: TransformersModule) -> tuple[list[AttentionCall], int]:
    """Return the attention calls of one forward pass, in order, and the vocabulary size.

    Raises `ModelError`, and anything that the model raises."""
    seen: list[AttentionCall] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], /) -> Tensor:
        seen.append(call_of(module, q, k, v, given))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    device = next(model.module.parameters()).device
    ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    with torch.inference_mode(), attending(attend):
        logits = model.logits(ids, torch.arange(TOKENS, device=device), ids[:1])
    return seen, logits.shape[-1]
