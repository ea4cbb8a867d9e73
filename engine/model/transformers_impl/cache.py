"""`transformers`' caches: what their layers hold, and how to make one that holds what weft's pages do.

Only methods that all versions have in common are called: a cache or layer is always one of `transformers`' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

STATES = ("conv", "recurrent")
"""Kinds of recurrent states. A layer may have several of each: `conv0`, `conv1`."""


def state_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the recurrent states `[B, ...]` that a layer of a cache holds, by name."""
    return {
        f"{kind}{number}": state
        for kind in STATES
        for number, state in getattr(layer, f"{kind}_states", {}).items()
        if state is not None
    }


def set_states(layer: Any, states: Mapping[str, Tensor]) -> None:
    """Make a new layer hold copies of these states `[B, ...]`."""
    for name, state in states.items():
        kind = name.rstrip("0123456789")
        # A layer counts as filled once its convolution was updated.
        getattr(layer, f"update_{kind}_state")(state, int(name[len(kind) :]))


def one_layer(index: int, layer: Any) -> Any:
    """Return a cache that has only this layer."""
    cache = DynamicCache()
    cache.layers = [None] * index + [layer]
    return cache


def state_layer(numbers: int) -> Any:
    """Return an empty layer with this many states."""
    return LinearAttentionLayer(number_of_states=numbers) if numbers > 1 else LinearAttentionLayer()


def forgetful_cache(config: Any, note: Callable[[Tensor, Tensor], None]) -> Any:
    """Return a cache that stays empty, and calls `note` with the keys and values given to `update`."""
    cache = DynamicCache(config=config)

    def update(keys: Tensor, values: Tensor, *_arguments: Any, **_named: Any) -> tuple[Tensor, Tensor]:
        note(keys, values)
        return keys, values

    cache.update = update
    return cache


def token_rows(layer: Any, tokens: int) -> list[Tensor]:
    """Return what a layer holds of its last tokens: keys and values, indexer keys; each `[1, H, tokens, D]`."""
    rows = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None and x.numel()]
    if (keys := getattr(layer, "indexer_keys", None)) is not None:
        rows.append(keys[:, None])
    return [x[:, :, -tokens:] for x in rows]


def set_tokens(layer: Any, rows: Sequence[Tensor]) -> None:
    """Make a new layer hold the rows `[1, H, S, D]` of all earlier tokens."""
    layer.update(rows[0], rows[1])
    if len(rows) > 2:
        layer.update_indexer(rows[2][:, 0])


def joined(rows: Sequence[Tensor]) -> Tensor:
    """Return `[T, N]`: the numbers of each token of tensors `[1, H, T, D]`, one tensor after the other."""
    return torch.cat([x[0].transpose(0, 1).flatten(1) for x in rows], 1)


def separate(rows: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Undo `joined`. shapes: (H, D) of each tensor."""
    parts = rows.split([heads * width for heads, width in shapes], 1)
    return [x.view(len(x), *shape).transpose(0, 1)[None] for x, shape in zip(parts, shapes, strict=True)]
