"""`Kind`: what the attention calls of a `transformers` model differ by; each kind has a back end."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.engine.errors import ConfigError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.broad.spec import BroadSpec
from weft.kernels.attention.backend import AttentionShape


class Kind(NamedTuple):
    heads: int
    kv_heads: int
    width: int
    """values of a head in a page"""
    scale: float
    window: int | None
    softcap: float
    sinks: bool

    def shape(self, layout: KvLayout, dtype: torch.dtype, device: torch.device, max_model_len: int) -> AttentionShape:
        # A window that no context outgrows is none.
        window = self.window if self.window and self.window < max_model_len else None
        return AttentionShape(
            self.heads, self.kv_heads, self.width, layout.page_size, dtype, device, layout.dtype, (window,), self.scale,
            self.softcap, self.sinks,
        )  # fmt: skip


def kinds_of_calls(spec: BroadSpec, layout: KvLayout) -> list[Kind]:
    """The kind of each attention call."""
    return [
        Kind(call.heads, *layout.heads(i), call.scale, call.window, call.softcap, call.sinks)
        for i, call in enumerate(spec.calls)
    ]


def refuse_on_gpu(spec: BroadSpec, kinds: list[Kind], backend: str) -> None:
    """Raises `ConfigError` for what the GPU's work lists and back ends were not made for."""
    if backend not in ("auto", "triton"):
        raise ConfigError(f"--attention-backend {backend}: transformers' code takes triton on a GPU")
    if len({(kind.heads, kind.kv_heads) for kind in kinds}) > 1:
        raise ConfigError(
            f"{spec.architecture}: a GPU needs as many heads in every layer, on transformers' code; use --device cpu"
        )
