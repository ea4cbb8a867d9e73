"""`PagedCalls`: computes the attention calls of a `transformers` model over pages, with weft's back ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.engine.errors import ModelError
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.transformers_impl.trial import layer_of
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.runner.options.transformers_shapes import attention_kinds
from weft.kernels.attention.backend import AttentionBackend, AttentionShape


class PagedCalls:
    """Each call of a forward pass has its layer of a page and its back end, by its position in the dry run.

    Call `begin` before each pass and `end` after it. Rows of q, k and v are the iteration's tokens."""

    def __init__(self, spec: TransformersSpec, config: ResolvedConfig, make: Callable[[AttentionShape], Any]) -> None:
        self._calls, self._layout = spec.calls, config.kv
        kinds = attention_kinds(spec, config.kv)
        shapes = [kind.shape(config.kv, config.compute_dtype, config.device, config.max_model_len) for kind in kinds]
        self.shapes = tuple(dict.fromkeys(shapes))  # Shapes of the back ends, each once.
        self.backends: list[AttentionBackend[Any]] = [make(shape) for shape in self.shapes]
        self._kind = [self.shapes.index(shape) for shape in shapes]
        self._next = 0

    def begin(self, kv: Tensor, slot_mapping: Tensor, steps: Sequence[Any]) -> None:
        """kv: the pool. slot_mapping `[T]` int64: page * page_size + offset. steps: one for each back end."""
        self._kv, self._steps, self._next = kv, steps, 0
        self._page = torch.div(slot_mapping, self._layout.page_size, rounding_mode="floor")
        self._offset = slot_mapping - self._page * self._layout.page_size

    def end(self) -> None:
        """Raise `ModelError` if the pass has made fewer calls than the dry run."""
        if self._next != len(self._calls):
            raise ModelError(f"its code made {self._next} attention calls, but {len(self._calls)} in the dry run")

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], /) -> Tensor:
        number = self._next
        if number >= len(self._calls):
            raise ModelError("its code makes more attention calls than in the dry run")
        self._next += 1
        call, kind = self._calls[number], self._kind[number]
        if layer_of(module) != call.layer:
            raise ModelError(f"its code calls attention in another order than in the dry run (call {number})")
        tokens = q.shape[2]
        pool, layer = self._layout.layer(self._kv, number)
        width = pool.shape[-1]
        rows = (self._page, self._offset)
        dtype = pool.dtype
        pool[:, layer, 0][rows] = _widened(k[0].transpose(0, 1), width).to(dtype)
        pool[:, layer, 1][rows] = _widened(v[0].transpose(0, 1), width).to(dtype)
        queries = _widened(q[0].transpose(0, 1), width).contiguous()
        # Padding rows are not written and must stay finite.
        out = queries.new_zeros(tokens, call.heads * width)
        sinks = {"sinks": given["s_aux"]} if call.sinks else {}
        step, backend = self._steps[kind], self.backends[kind]
        backend.decode(queries, pool, layer, step, out=out, **sinks)
        backend.prefill(queries, pool, layer, step, out=out, **sinks)
        return out.view(1, tokens, call.heads, width)[..., : call.value_dim]


def _widened(x: Tensor, width: int) -> Tensor:
    """Pad `[T, H, D]` with zeros up to `width`, which change no score and no sum."""
    return x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2]))
