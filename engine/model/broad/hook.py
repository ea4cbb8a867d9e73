"""The hook in `transformers`' attention interface: what a model's attention calls are answered by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "weft"
"""no mask function has this name: `transformers` then makes no mask, and hands over None"""


class Attend(Protocol):
    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], /) -> Tensor:
        """Attention of q `[1, Hq, T, Dk]` over k `[1, Hkv, T, Dk]`, v `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`.

        given: everything else that the model passes, by name; a mask as `attention_mask`.
        """
        ...


_attend: ContextVar[Attend] = ContextVar("weft_attend")
positions: ContextVar[Tensor] = ContextVar("weft_positions")
"""`[1, T]` of the forward pass that runs, for modules that are not told theirs"""


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within it the attention calls of this thread's models are answered by `attend`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    return _attend.get()(module, query, key, value, {**given, "attention_mask": attention_mask}), None


AttentionInterface.register(NAME, _attention)
