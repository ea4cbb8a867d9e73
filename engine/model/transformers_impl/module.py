"""`TransformersModule`: a `transformers` model as one call, from tokens and positions of many requests to logits."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.engine.model.transformers_impl.hook import positions as positions_now

CACHE_NAMES = ("past_key_values", "cache_params", "past_key_value")


class TransformersModule:
    """Wraps a `transformers` model, modified in place to take the tokens of many requests in one row."""

    def __init__(self, module: Any) -> None:
        self.module = module.eval().requires_grad_(False)
        takes = inspect.signature(module.forward).parameters
        self._keeps = "logits_to_keep" in takes
        self._takes_positions = "position_ids" in takes
        self.cache_name = next((name for name in CACHE_NAMES if name in takes), "")
        self._states: Tensor | None = None
        self._keeps_states = False
        self.has_hidden_states = False
        """Whether the hidden states after the final norm are available; set by the first forward pass."""
        if (head := module.get_output_embeddings()) is not None:
            head.register_forward_pre_hook(self._note_states)
        if not self._takes_positions:
            for part in module.modules():
                if isinstance(table := getattr(part, "embed_positions", None), nn.Embedding):
                    _look_up_positions(table)

    def logits(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, cache: Any = None, past: int | None = None
    ) -> Tensor:
        """Return `[S, V]` for the rows `[S]` among T tokens; call it inside `hook.attending`.

        token_ids, positions: `[T]` int64. cache: one of `transformers`, or None. past: tokens in the cache, if the T
        tokens are those of one request and the model's own attention computes them."""
        given: dict[str, Any] = {"input_ids": token_ids[None], "use_cache": cache is not None, "return_dict": True}
        if cache is not None:
            given[self.cache_name] = cache
        if past is not None:
            given["attention_mask"] = token_ids.new_ones(1, past + len(token_ids))
        if self._takes_positions:
            given["position_ids"] = positions[None]
        if self._keeps:
            given["logits_to_keep"] = rows
        token = positions_now.set(positions[None])
        try:
            logits: Tensor = self.module(**given).logits[0]
        finally:
            positions_now.reset(token)
        return logits if self._keeps else logits[rows]

    def logits_and_states(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor, cache: Any = None, past: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Like `logits`, plus the hidden states `[S, H]` after the final norm. Needs `has_hidden_states`."""
        self._keeps_states = True
        try:
            logits = self.logits(token_ids, positions, rows, cache, past)
            states = self._states
        finally:
            self._keeps_states, self._states = False, None
        assert states is not None
        return logits, states if self._keeps else states[rows]

    def _note_states(self, _head: nn.Module, given: tuple[Any, ...]) -> None:
        self.has_hidden_states = True
        if self._keeps_states:
            self._states = given[0].flatten(0, -2)

    def tensors(self) -> list[Tensor]:
        """Return all tensors; some may be the same."""
        return [*self.module.parameters(), *self.module.buffers()]

    @property
    def num_bytes(self) -> int:
        return sum({t.data_ptr(): t.nbytes for t in self.tensors()}.values())


def _look_up_positions(table: nn.Embedding) -> None:
    """Make a position table that would derive positions from cache length use the given ones."""
    offset, own = int(getattr(table, "offset", 0)), table.forward

    def forward(*arguments: Any, **named: Any) -> Tensor:
        if (given := positions_now.get(None)) is None:  # called outside `logits`
            return own(*arguments, **named)
        return F.embedding(given + offset, table.weight)

    table.forward = forward  # type: ignore[method-assign]


def pin_rope(module: nn.Module, max_positions: int) -> None:
    """Fix the rope frequencies that `transformers` would choose by the longest position of a batch.

    longrope: the short factors if no context exceeds the original one, else the long ones. dynamic: as trained; the
    caller keeps `max_positions` within the original context."""
    for part in module.modules():
        kinds, config = getattr(part, "rope_type", None), getattr(part, "config", None)
        if kinds is None or config is None:
            continue
        names = dict(kinds) if isinstance(kinds, dict) else {None: kinds}
        for name, kind in names.items():
            if kind != "longrope" and "dynamic" not in str(kind):
                continue
            if kind == "longrope":
                parameters = config.rope_parameters if name is None else config.rope_parameters[name]
                original = parameters["original_max_position_embeddings"]
                buffer: Tensor = getattr(part, "inv_freq" if name is None else f"{name}_inv_freq")
                choice = original + 1 if max_positions > original else original
                extra = {} if name is None else {"layer_type": name}
                inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, buffer.device, seq_len=choice, **extra)
                with torch.no_grad():
                    buffer.copy_(inv_freq)
            if name is None:
                part.rope_type = "pinned"  # type: ignore[assignment]
            else:
                kinds[name] = "pinned"
