"""The hooks through which weft computes a `transformers` model's attention and hands states to its mixers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "weft"  # No mask function has this name, so `transformers` creates no mask and passes None.


class Attend(Protocol):
    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], /) -> Tensor:
        """Compute attention of q `[1, Hq, T, Dk]` over k `[1, Hkv, T, Dk]`, v `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`.

        given: all other arguments of the model by name; a mask as `attention_mask`."""
        ...


_attend: ContextVar[Attend] = ContextVar("weft_attend")
positions: ContextVar[Tensor] = ContextVar("weft_positions")
"""`[1, T]` of the current forward pass, for modules that do not receive positions."""


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Compute attention calls of this thread's models with `attend` inside `with`."""
    token = _attend.set(attend)
    try:
        yield
    finally:
        _attend.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    return _attend.get()(module, query, key, value, {**given, "attention_mask": attention_mask}), None


class Mix(Protocol):
    def __call__(self, number: int, own: Callable[..., Any], given: dict[str, Any], /) -> Any:
        """Compute a mixer. number: its index in the spec. own: its forward function. given: its arguments by name."""
        ...


_mix: ContextVar[Mix] = ContextVar("weft_mix")


@contextmanager
def mixing(mix: Mix) -> Iterator[None]:
    """Compute the mixers of this thread's models with `mix` inside `with`. See `hook_mixer`."""
    token = _mix.set(mix)
    try:
        yield
    finally:
        _mix.reset(token)


def hook_mixer(part: nn.Module, number: int) -> None:
    """Replace the forward function of a mixer."""
    own = part.forward
    names = list(inspect.signature(own).parameters)

    def forward(*arguments: Any, **named: Any) -> Any:
        if (mix := _mix.get(None)) is None:
            return own(*arguments, **named)
        return mix(number, own, dict(zip(names, arguments, strict=False)) | named)

    part.forward = forward


AttentionInterface.register(NAME, _attention)
