"""`AttentionKind`: parameters of a `transformers` model's attention calls. Each kind has its own back end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from weft.engine.errors import ConfigError
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.kernels.attention.backend import AttentionShape


class AttentionKind(NamedTuple):
    heads: int
    kv_heads: int
    width: int  # Values per head in a page.
    scale: float
    window: int | None
    softcap: float
    sinks: bool

    def shape(self, layout: KvLayout, dtype: torch.dtype, device: torch.device, max_model_len: int) -> AttentionShape:
        # A window as long as the longest context has no effect.
        window = self.window if self.window and self.window < max_model_len else None
        return AttentionShape(
            self.heads, self.kv_heads, self.width, layout.page_size, dtype, device, layout.dtype, (window,), self.scale,
            self.softcap, self.sinks,
        )  # fmt: skip


def attention_kinds(spec: TransformersSpec, layout: KvLayout) -> dict[int, AttentionKind]:
    """Return the kind of each attention call that keeps K and V, by its number."""
    return {
        i: AttentionKind(call.heads, *layout.heads(i), call.scale, call.window, call.softcap, call.sinks)
        for i, call in enumerate(spec.calls)
        if not call.row
    }


def refuse_on_gpu(spec: TransformersSpec, kinds: Iterable[AttentionKind], backend: str) -> None:
    """Raise `ConfigError` for options and models that the GPU's work lists and back ends do not support."""
    if backend not in ("auto", "triton"):
        raise ConfigError(f"--attention-backend {backend}: transformers' code needs triton on a GPU")
    if spec.mixers or spec.single:
        what = f"one request at a time ({spec.single})" if spec.single else "recurrent states"
        raise ConfigError(
            f"{spec.architecture}: transformers' code with {what} is not supported on a GPU yet; use --device cpu"
        )
    if len({(kind.heads, kind.kv_heads) for kind in kinds}) > 1:
        raise ConfigError(
            f"{spec.architecture}: with transformers' code, a GPU needs the same heads in all layers; use --device cpu"
        )
