"""The dry run: one forward pass on shapes, which records every attention call and every recurrent state of a model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from weft.engine.errors import ModelError
from weft.engine.model.parts import StateTensor
from weft.engine.model.transformers_impl.cache import (
    forgetful_cache,
    one_layer,
    set_states,
    state_layer,
    state_tensors,
    token_rows,
)
from weft.engine.model.transformers_impl.hook import attending
from weft.engine.model.transformers_impl.module import CACHE_NAMES, TransformersModule
from weft.engine.model.transformers_impl.spec import MODEL_DTYPE, AttentionCall, Mixer

TOKENS = 3
KNOWN = {
    "scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_router_logits", "output_attentions", "deterministic", "logits_to_keep",
}  # fmt: skip
"""Arguments of an attention call that are supported or have no effect on generation."""


class NotADecoder(ModelError):
    """Raised for a model whose tokens depend on more than earlier ones: no cache of them is enough."""


def layer_of(module: nn.Module) -> int:
    """Return the layer index of an attention module."""
    return int(getattr(module, "layer_idx", None) or 0)


def call_of(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> AttentionCall:
    """Describe an attention call. Raises `ModelError` if the attention back ends cannot compute it."""
    for name, value in given.items():
        if name not in KNOWN and value is not None and (isinstance(value, Tensor) or name == "position_bias"):
            raise ModelError(f"it passes {name} to its attention, which the attention back ends do not support")
    if q.shape[0] != 1:
        raise ModelError(f"its attention splits one batch into {q.shape[0]}")
    if k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2] or k.shape[3] != q.shape[3]:
        raise ModelError("its attention uses keys and values that are not those of its tokens")
    if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        raise ModelError(f"its attention has {q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads")
    if given.get("is_causal") is False:
        raise NotADecoder("its attention looks ahead: it is not a decoder")
    if getattr(module, "is_cross_attention", False):
        raise NotADecoder("its attention reads an encoder's states")
    scale, window, softcap = given.get("scaling"), given.get("sliding_window"), given.get("softcap")
    if any(isinstance(value, Tensor) for value in (scale, window, softcap)):
        raise ModelError("its attention's scale, window or soft-cap changes from step to step")
    return AttentionCall(
        layer_of(module),
        q.shape[1],
        k.shape[1],
        k.shape[3],
        v.shape[3],
        float(q.shape[3] ** -0.5 if scale is None else scale),
        int(window) if window else None,
        float(softcap or 0.0),
        given.get("s_aux") is not None,
    )


def attention_calls(model: TransformersModule, config: Any) -> tuple[list[AttentionCall], int]:
    """Return the attention calls of one forward pass, in order, and the vocabulary size.

    Raises `ModelError`, and anything that the model raises."""
    seen: list[AttentionCall] = []
    cached: list[tuple[Tensor, Tensor]] = []

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], /) -> Tensor:
        call = call_of(module, q, k, v, given)
        if cached and hasattr(module, "expand_kv"):
            # Keys and values are made from what the cache keeps.
            latents = cached[-1]
            call = call._replace(row=tuple((x.shape[1], x.shape[3]) for x in latents))
        cached.clear()
        seen.append(call)
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])

    with torch.inference_mode(), attending(attend):
        if model.cache_name and any(hasattr(part, "expand_kv") for part in model.module.modules()):
            vocab_size = _pass(model, forgetful_cache(config, lambda k, v: cached.append((k, v))))
        else:
            vocab_size = _pass(model, None)
    return seen, vocab_size


def _pass(model: TransformersModule, cache: Any, past: int | None = None) -> int:
    """Run the model on `TOKENS` tokens. Return the vocabulary size."""
    device = next(model.module.parameters()).device
    ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    return model.logits(ids, torch.arange(TOKENS, device=device), ids[:1], cache, past).shape[-1]


class _Seen:
    """What the dry run learns of a mixer."""

    def __init__(self, path: str, cache: str, layer: int, given: dict[str, Any]) -> None:
        self.path, self.cache, self.layer, self.given = path, cache, layer, given
        self.names: list[str] = []


def mixers(model: TransformersModule, config: Any) -> tuple[Mixer, ...]:
    """Return the modules that keep recurrent states, in the order of a forward pass.

    Raises `ModelError`, and anything that the model raises."""
    cache = DynamicCache(config=config)
    seen: dict[nn.Module, _Seen] = {}
    running: list[tuple[nn.Module, str, dict[str, Any]]] = []  # Modules that take the cache, outermost first.
    paths = {part: path for path, part in model.module.named_modules()}

    def note(kind: str, layer: int, number: int) -> None:
        if not running:
            raise ModelError("its code changes a recurrent state outside of any module that takes the cache")
        part, name, given = running[-1]
        mine = seen.setdefault(part, _Seen(paths[part], name, layer, given))
        if mine.layer != layer:
            raise ModelError(f"{mine.path} keeps states of several layers")
        mine.names.append(f"{kind}{number}")

    def noting(kind: str) -> None:
        own = getattr(cache, f"update_{kind}_state")

        def update(state: Tensor, layer_idx: int, state_idx: int = 0, **given: Any) -> Tensor:
            note(kind, layer_idx, state_idx)
            return own(state, layer_idx, state_idx=state_idx, **given)

        setattr(cache, f"update_{kind}_state", update)

    noting("conv")
    noting("recurrent")
    with torch.inference_mode(), attending(_zeros), _watching(model.module, running):
        _pass(model, cache)
    parents = [mine.path + "." for mine in seen.values()]
    if nested := next((m.path for m in seen.values() if any(m.path.startswith(p) for p in parents)), ""):
        raise ModelError(f"{nested} is a recurrent layer inside another")
    _refuse_elsewhere(cache, {mine.layer for mine in seen.values()})
    return tuple(_mixer(part, mine, cache) for part, mine in seen.items())


def _refuse_elsewhere(cache: Any, known: set[int]) -> None:
    """Raise `ModelError` if the cache has recurrent layers but none of them holds a state.

    `transformers` 5.17 has such layers in the cache for layers without a mixer, too: these may stay empty."""
    kinds = [kind.__name__ for layer in cache.layers for kind in type(layer).__mro__]
    if not known and any("LinearAttention" in kind for kind in kinds):
        raise ModelError("its recurrent layers keep their state outside of the cache")


def _mixer(part: nn.Module, mine: _Seen, cache: Any) -> Mixer:
    kept = state_tensors(cache.layers[mine.layer])
    tensors = [kept[name] for name in dict.fromkeys(mine.names)]
    recurrent = any(name.startswith("recurrent") for name in mine.names)
    stepwise = recurrent and not _reads_state(part, mine, cache)
    own = getattr(part, "chunk_size", None)
    block = int(own) if isinstance(own, int) and own > 0 else 64
    return Mixer(
        mine.path,
        mine.cache,
        mine.layer,
        _numbers(cache.layers[mine.layer]),
        _described(dict(zip(dict.fromkeys(mine.names), tensors, strict=True))),
        block if recurrent and not stepwise else 1,
        stepwise,
    )


def _numbers(layer: Any) -> int:
    return int(getattr(layer, "number_of_states", 1))


def _described(states: dict[str, Tensor]) -> tuple[StateTensor, ...]:
    if name := next((name for name, t in states.items() if not t.is_floating_point()), ""):
        raise ModelError(f"it keeps integers as a recurrent state ({name})")
    # The dry run computes in bfloat16.
    return tuple(
        StateTensor(name, tuple(t.shape[1:]), MODEL_DTYPE if t.dtype == torch.bfloat16 else str(t.dtype)[6:])
        for name, t in states.items()
    )


def _reads_state(part: nn.Module, mine: _Seen, cache: Any) -> bool:
    """Return whether its result depends on an earlier recurrent state if it is given several tokens at once.

    `transformers`' scans of the first Mamba ignore it. A gradient would flow from the state to the result."""
    own = state_tensors(cache.layers[mine.layer])
    states = {name: torch.zeros_like(own[name]) for name in dict.fromkeys(mine.names)}
    layer = state_layer(_numbers(cache.layers[mine.layer]))
    set_states(layer, states)
    for name, state in states.items():
        if name.startswith("recurrent"):
            layer.recurrent_states[int(name.removeprefix("recurrent"))] = state.requires_grad_() * 1
    given = {name: _clone(value) for name, value in mine.given.items()}
    result = part(**given, **{mine.cache: one_layer(mine.layer, layer)})
    results = result if isinstance(result, tuple) else (result,)
    return any(isinstance(x, Tensor) and x.requires_grad for x in results)


def _clone(value: Any) -> Any:
    """Return a copy of tensors of inference mode, which no gradient can pass."""
    if isinstance(value, tuple | list):
        return type(value)(_clone(x) for x in value)
    return value.clone() if isinstance(value, Tensor) else value


def _zeros(_module: nn.Module, q: Tensor, _k: Tensor, v: Tensor, _given: dict[str, Any], /) -> Tensor:
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


@contextmanager
def _watching(module: nn.Module, running: list[tuple[nn.Module, str, dict[str, Any]]]) -> Iterator[None]:
    """Keep in `running` the modules that take a cache and run now, with their other arguments by name."""
    handles = []

    def watch(part: nn.Module, known: list[str], cache: str) -> None:
        def enter(_part: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = dict(zip(known, arguments, strict=False)) | named
            running.append((part, cache, {k: v for k, v in given.items() if k != cache}))

        handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.register_forward_hook(lambda *_: (running.pop(), None)[1], always_call=True))

    for part in module.modules():
        known = list(inspect.signature(part.forward).parameters)
        if cache := next((name for name in CACHE_NAMES if name in known), ""):
            watch(part, known, cache)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kept_layers(model: TransformersModule, config: Any) -> tuple[list[AttentionCall], tuple[Mixer, ...], int]:
    """Return what each layer of the cache keeps of every token and of all tokens, and the vocabulary size, for a model
    that requests pass one by one.

    Raises `ModelError`, and anything that the model raises."""
    if not model.cache_name:
        raise ModelError("its code takes no cache")
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        vocab_size = _pass(model, cache, past=0)
    _refuse_elsewhere(cache, {i for i, layer in enumerate(cache.layers) if state_tensors(layer)})
    calls, states = [], []
    for index, layer in enumerate(cache.layers):
        if rows := token_rows(layer, TOKENS):
            shapes = tuple((x.shape[1], x.shape[3]) for x in rows)
            window = getattr(layer, "sliding_window", None)
            calls.append(AttentionCall(index, 1, 1, 1, 1, 1.0, window, row=shapes))
        if tensors := state_tensors(layer):
            block = 64 if any(name.startswith("recurrent") for name in tensors) else 1
            states.append(Mixer("", "", index, _numbers(layer), _described(tensors), block, stepwise=False))
    if not calls and not states:
        raise ModelError("its code leaves nothing in the cache")
    return calls, tuple(states), vocab_size
