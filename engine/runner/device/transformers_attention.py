"""`PagedCalls`: computes the attention calls of a `transformers` model over pages, with weft's back ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.engine.errors import ModelError
from weft.engine.model.transformers_impl.cache import forgetful_cache, joined, separate
from weft.engine.model.transformers_impl.spec import AttentionCall, TransformersSpec
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
        shapes = {
            i: kind.shape(config.kv, config.compute_dtype, config.device, config.max_model_len)
            for i, kind in kinds.items()
        }
        self.shapes = tuple(dict.fromkeys(shapes.values()))  # Shapes of the back ends, each once.
        self.backends: list[AttentionBackend[Any]] = [make(shape) for shape in self.shapes]
        self._kind = {i: self.shapes.index(shape) for i, shape in shapes.items()}
        self._next = 0
        self._absorbed: dict[int, Absorbed] = {}
        latent = any(call.row for call in spec.calls)
        self.cache = forgetful_cache(spec.config, self._note) if latent else None
        """The cache to pass to the model, if weft must see what the model writes to it."""

    def _note(self, keys: Tensor, values: Tensor) -> None:
        self._noted = keys, values

    def begin(self, kv: Tensor, slot_mapping: Tensor, steps: Sequence[Any], contexts: Sequence[Context] = ()) -> None:
        """kv: the pool. slot_mapping `[T]` int64: page * page_size + offset. steps: one for each back end. contexts:
        those of all requests, if any call keeps latents."""
        self._kv, self._steps, self._next, self._contexts = kv, steps, 0, contexts
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
        call = self._calls[number]
        if layer_of(module) != call.layer:
            raise ModelError(f"its code calls attention in another order than in the dry run (call {number})")
        if call.row:
            return self._attend_latents(number, module, q, v.shape[3])
        tokens, kind = q.shape[2], self._kind[number]
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

    def _attend_latents(self, number: int, module: Any, q: Tensor, value_dim: int) -> Tensor:
        call = self._calls[number]
        pool, layer = self._layout.layer(self._kv, number)
        write_rows(pool, layer, self._page, self._offset, joined(self._noted))
        out = q.new_empty(1, q.shape[2], call.heads, value_dim)
        scores = Scores(call.scale, call.window)
        for context in self._contexts:
            rows, _ = read_rows(pool, layer, context, call)
            own = q[0, :, context.begin : context.end]
            (_, rank), (_, rope) = call.row
            width = q.shape[3] + value_dim
            # Expanding a context costs more than longer scores, unless many queries share it.
            if 2 * (rank + rope) * len(own[0]) <= (rank + len(own[0])) * width:
                if number not in self._absorbed:
                    self._absorbed[number] = Absorbed.of(module, call, q)
                result = self._absorbed[number].attend(own, rows, scores)
            else:
                k, v = module.expand_kv(*separate(rows, call.row))
                result = scores.attend(own, k[0], v[0])
            out[0, context.begin : context.end] = result.transpose(0, 1)
        return out


class Context(NamedTuple):
    """The tokens of a request in the pages and in the iteration."""

    pages: Tensor  # `[P]` int64.
    length: int  # Tokens, including those of the iteration.
    begin: int  # Index of its first token in the iteration.
    end: int


def write_rows(pool: Tensor, layer: int, pages: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Write `[T, N]` to a layer `[pages, layers, 2, page_size, 1, W]`: one half to each plane."""
    width = pool.shape[-1]
    halves = F.pad(rows, (0, 2 * width - rows.shape[1])).to(pool.dtype).view(-1, 2, 1, width)
    pool[:, layer, 0][pages, offsets], pool[:, layer, 1][pages, offsets] = halves[:, 0], halves[:, 1]


def read_rows(pool: Tensor, layer: int, context: Context, call: AttentionCall) -> tuple[Tensor, int]:
    """Return the rows `[S, N]` of a context that its queries in the iteration see, and the position of the first."""
    size = pool.shape[3]
    earliest = context.length - (context.end - context.begin) - (call.window or context.length) + 1
    first = max(0, earliest) // size
    pages = context.pages[first : -(-context.length // size)]
    rows = pool[pages, layer].permute(0, 2, 3, 1, 4).reshape(len(pages) * size, -1)
    begin = max(0, earliest)
    count = sum(heads * width for heads, width in call.row)
    return rows[begin - first * size : context.length - first * size, :count], begin


class Scores(NamedTuple):
    """How queries see keys."""

    scale: float
    window: int | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return `[H, T, Dv]` of queries `[H, T, D]` over keys and values `[1 or H, S, D]` of S tokens. The queries are
        those of the last T."""
        tokens, length = q.shape[1], k.shape[1]
        keys = torch.arange(length, device=q.device)
        last = keys[length - tokens :, None]
        seen = keys <= last
        if self.window is not None:
            seen &= keys > last - self.window
        shape = (q.shape[0], -1, -1)
        return F.scaled_dot_product_attention(q, k.expand(shape), v.expand(shape), seen, scale=self.scale)


class Absorbed(NamedTuple):
    """The linear map from a latent and its rope key to keys and values, applied to queries and results instead: the
    latents themselves are then one head of keys and values (DeepSeek-V2, 2405.04434, section 2.1.2)."""

    keys: Tensor  # `[H, N, Dk]`
    values: Tensor  # `[H, N, Dv]`
    value_bias: Tensor  # `[H, 1, Dv]`. That of the keys is the same for all scores of a query.

    @classmethod
    def of(cls, module: Any, call: AttentionCall, like: Tensor) -> Self:
        count = sum(heads * width for heads, width in call.row)
        rows = torch.cat((torch.zeros(1, count), torch.eye(count))).to(like)
        k, v = module.expand_kv(*separate(rows, call.row))
        return cls((k[0, :, 1:] - k[0, :, :1]), (v[0, :, 1:] - v[0, :, :1]), v[0, :, :1])

    def attend(self, q: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        seen = scores.attend(q @ self.keys.transpose(1, 2), rows[None], rows[None])
        return seen @ self.values + self.value_bias


def _widened(x: Tensor, width: int) -> Tensor:
    """Pad `[T, H, D]` with zeros up to `width`, which change no score and no sum."""
    return x if x.shape[2] == width else F.pad(x, (0, width - x.shape[2]))
