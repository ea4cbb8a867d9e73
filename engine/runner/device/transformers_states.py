"""`MixerCalls`: computes the recurrent layers of a `transformers` model, request by request, over states in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.parts import StateTensor
from weft.engine.model.transformers_impl.cache import one_layer, set_states, state_layer, state_tensors
from weft.engine.model.transformers_impl.spec import MODEL_DTYPE, Mixer, TransformersSpec
from weft.engine.runner.iteration.batch import Batch, StateRows


class Piece(NamedTuple):
    """Tokens of a request that a recurrent layer computes at once."""

    row: int  # Index in the batch.
    begin: int  # Index among the iteration's tokens.
    end: int
    fresh: bool  # Nothing is before it.
    checkpoint: int  # Index of the checkpoint at its end; -1: none.


def pieces_of(batch: Batch) -> Iterator[Piece]:
    """Yield the pieces of each request in order: a chunk ends at its checkpoints."""
    points: dict[int, dict[int, int]] = {}
    if (states := batch.states) is not None:
        pairs = zip(states.checkpoint_rows.tolist(), states.checkpoint_tokens.tolist(), strict=True)
        for c, (row, tokens) in enumerate(pairs):
            points.setdefault(row, {})[tokens] = c
    start = 0
    for row, (length, kv_len) in enumerate(zip(batch.query_len.tolist(), batch.kv_len.tolist(), strict=True)):
        fresh, begin = kv_len == length, 0
        own = points.get(row, {})
        for end in sorted({*own, length}):
            yield Piece(row, start + begin, start + end, fresh, own.get(end, -1))
            fresh, begin = False, end
        start += length


class States:
    """The states of an iteration's requests, between their pages: read at its begin and written at its end."""

    def __init__(self, spec: TransformersSpec, layout: StateLayout, rows: StateRows, pool: Tensor) -> None:
        """pool: `[pages, page_bytes]` uint8."""
        self._layout, self._pool = layout, pool
        self._states = [state for state in layout.states if state is not None]
        self._write, self._checkpoint_pages = self._table(rows.write), self._table(rows.checkpoint_pages)
        kept = layout.gather(pool, self._table(rows.read))
        self.values = [
            {t.name: _as_computed(of[k.name], t) for k, t in zip(state.tensors, mixer.tensors, strict=True)}
            for of, state, mixer in zip(kept, self._states, spec.mixers, strict=True)
        ]
        """`[R, *shape]` of each tensor of each mixer."""
        count = len(rows.checkpoint_rows)
        self.checkpoints = [{k: v.new_empty(count, *v.shape[1:]) for k, v in of.items()} for of in self.values]

    def _table(self, pages: Any) -> Tensor:
        return torch.from_numpy(pages).to(self._pool.device, torch.int64)

    def put(self, number: int, row: int, checkpoint: int, states: dict[str, Tensor]) -> None:
        """Set a mixer's state of a request, `[1, *shape]` by name."""
        for name, value in self.values[number].items():
            value[row] = states[name][0]
            if checkpoint >= 0:
                self.checkpoints[number][name][checkpoint] = value[row]

    def save(self) -> None:
        """Write the states to their pages."""
        self._save(self._write, self.values)
        if self._checkpoint_pages.numel():
            self._save(self._checkpoint_pages, self.checkpoints)

    def _save(self, table: Tensor, values: list[dict[str, Tensor]]) -> None:
        kept = [
            {k.name: value for k, value in zip(state.tensors, of.values(), strict=True)}
            for of, state in zip(values, self._states, strict=True)
        ]
        self._layout.scatter(self._pool, table, kept)


def _as_computed(state: Tensor, tensor: StateTensor) -> Tensor:
    return state if tensor.dtype == MODEL_DTYPE else state.to(getattr(torch, tensor.dtype))


class MixerCalls:
    """Called for each mixer of a forward pass (`hook.mixing`) with the rows of all requests. Call `begin` before."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._mixers = mixers

    def begin(self, states: States, batch: Batch) -> None:
        self._states = states
        pieces = list(pieces_of(batch))
        # One call computes all requests with one token each.
        self._steps = [piece for piece in pieces[: batch.num_decodes] if not piece.fresh]
        self._pieces = pieces[len(self._steps) :]

    def __call__(self, number: int, own: Callable[..., Any], given: dict[str, Any], /) -> Any:
        mixer = self._mixers[number]
        tokens = self._pieces[-1].end if self._pieces else len(self._steps)
        given.pop(mixer.cache, None)
        found = []
        if n := len(self._steps):
            values = self._states.values[number]
            stacked = {name: _map(x, partial(_batch, tokens=tokens, count=n)) for name, x in given.items()}
            result, after = _run(mixer, own, stacked, {name: value[:n] for name, value in values.items()})
            found.append(_map(result, lambda t: t.transpose(0, 1)))
            for i, piece in enumerate(self._steps):
                self._states.put(number, i, piece.checkpoint, {name: t[i : i + 1] for name, t in after.items()})
        for piece in self._pieces:
            found += self._piece(number, own, given, piece, tokens)
        return _join(found)

    def _piece(
        self, number: int, own: Callable[..., Any], given: dict[str, Any], piece: Piece, tokens: int
    ) -> Iterator[Any]:
        mixer, values = self._mixers[number], self._states.values[number]
        before = {} if piece.fresh else {name: value[piece.row : piece.row + 1] for name, value in values.items()}
        step = 1 if mixer.stepwise and not piece.fresh else piece.end - piece.begin
        for begin in range(piece.begin, piece.end, step):
            end = begin + step
            cut = partial(_cut, tokens=tokens, begin=begin, end=end)
            part = {name: _map(x, cut) for name, x in given.items()}
            result, before = _run(mixer, own, part, before)
            yield result
        self._states.put(number, piece.row, piece.checkpoint, before)


def _run(
    mixer: Mixer, own: Callable[..., Any], given: dict[str, Any], before: dict[str, Tensor]
) -> tuple[Any, dict[str, Tensor]]:
    """Return a mixer's result and the states after it. before: the states `[B, *shape]` by name, or none."""
    layer = state_layer(mixer.numbers)
    set_states(layer, before)
    result = own(**given, **{mixer.cache: one_layer(mixer.layer, layer)})
    return result, state_tensors(layer)


def _map(value: Any, do: Callable[[Tensor], Tensor]) -> Any:
    """Apply `do` to the tensors of a value."""
    if isinstance(value, Tensor):
        return do(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(x, do) for x in value)
    return value


def _has_rows(x: Tensor, tokens: int) -> bool:
    return x.ndim >= 2 and x.shape[:2] == (1, tokens)


def _cut(x: Tensor, tokens: int, begin: int, end: int) -> Tensor:
    """Return some rows of `[1, T, ...]`; other tensors as they are."""
    return x[:, begin:end] if _has_rows(x, tokens) else x


def _batch(x: Tensor, tokens: int, count: int) -> Tensor:
    """Return the first rows of `[1, T, ...]` as `[count, 1, ...]`; other tensors as they are."""
    return x[0, :count, None] if _has_rows(x, tokens) else x


def _join(results: list[Any]) -> Any:
    """Put results of rows `[1, ., ...]` after each other."""
    first = results[0]
    if isinstance(first, Tensor):
        return first if len(results) == 1 else torch.cat(results, 1)
    if isinstance(first, tuple | list):
        return type(first)(_join(list(parts)) for parts in zip(*results, strict=True))
    return first
