"""`SingleRequests`: runs a `transformers` model on one request after another, with a cache made from its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.transformers_impl.cache import (
    joined,
    separate,
    set_states,
    set_tokens,
    state_tensors,
    token_rows,
)
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.runner.device.transformers_attention import Context, read_rows, write_rows
from weft.engine.runner.device.transformers_states import Piece, States, pieces_of
from weft.engine.runner.iteration.batch import Batch

Run = Callable[[Tensor, Tensor, Tensor, Any, int], tuple[Tensor, ...]]
"""Token ids and positions `[T]`, rows `[S]` among them, the cache and the tokens in it -> tensors `[S, ...]`."""


class SingleRequests:
    """For models whose code cannot compute several requests in a row. It copies a request's context in each step."""

    def __init__(self, spec: TransformersSpec, layout: KvLayout) -> None:
        self._spec, self._layout = spec, layout
        # A layer with a window forgets the tokens of a longer chunk before they reach their pages.
        self._longest = min((call.window - 1 for call in spec.calls if call.window), default=None)

    def forward(
        self, run: Run, kv: Tensor, batch: Batch, states: States | None, contexts: list[Context],
        tokens: tuple[Tensor, Tensor], slot_mapping: Tensor, rows: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return what `run` does for all rows `[S]`, ascending. tokens: ids and positions `[T]`."""
        pages = torch.div(slot_mapping, self._layout.page_size, rounding_mode="floor")
        offsets = slot_mapping - pages * self._layout.page_size
        found = []
        for piece in self._pieces(batch):
            part = slice(piece.begin, piece.end)
            ids, positions = tokens[0][part], tokens[1][part]
            past = int(batch.positions[piece.begin])
            cache = DynamicCache(config=self._spec.config)
            context = contexts[piece.row]._replace(length=past + len(ids), begin=piece.begin, end=piece.end)
            if past:
                self._fill(cache, kv, states, context, piece, past)
            own = rows[(rows >= piece.begin) & (rows < piece.end)] - piece.begin
            result = run(ids, positions, own if len(own) else own.new_zeros(1), cache, past)
            found.append([x[: len(own)] for x in result])
            for number, call in enumerate(self._spec.calls):
                pool, layer = self._layout.layer(kv, number)
                kept = joined(token_rows(cache.layers[call.layer], len(ids)))
                write_rows(pool, layer, pages[part], offsets[part], kept)
            for number, mixer in enumerate(self._spec.mixers):
                assert states is not None
                states.put(number, piece.row, piece.checkpoint, state_tensors(cache.layers[mixer.layer]))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def _pieces(self, batch: Batch) -> Iterator[Piece]:
        for piece in pieces_of(batch):
            step = self._longest or piece.end - piece.begin
            for begin in range(piece.begin, piece.end, step):
                end = min(begin + step, piece.end)
                yield Piece(
                    piece.row, begin, end, piece.fresh and begin == piece.begin,
                    piece.checkpoint if end == piece.end else -1,
                )  # fmt: skip

    def _fill(self, cache: Any, kv: Tensor, states: States | None, context: Context, piece: Piece, past: int) -> None:
        """Put what the pages hold of the tokens before a piece into a new cache."""
        for number, call in enumerate(self._spec.calls):
            pool, layer = self._layout.layer(kv, number)
            seen, first = read_rows(pool, layer, context, call)
            known = seen.new_zeros(past, seen.shape[1])
            known[first:] = seen[: past - first]
            set_tokens(cache.layers[call.layer], separate(known, call.row))
        for number, mixer in enumerate(self._spec.mixers):
            assert states is not None
            values = states.values[number]
            set_states(cache.layers[mixer.layer], {k: v[piece.row : piece.row + 1] for k, v in values.items()})
