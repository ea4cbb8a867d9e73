"""`TransformersSpec`: the properties of a model that `transformers`' code computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from weft.engine.errors import ModelError
from weft.engine.model.parts import StateSpec, StateTensor
from weft.engine.model.spec import ModelSpec

MODEL_DTYPE = "model"
"""As a state's dtype in a `Mixer`: the dtype that the model computes in."""


class AttentionCall(NamedTuple):
    """One call of the attention function in a forward pass. Each call has its own K and V in a page."""

    layer: int  # Layer index from the model; two calls may share one.
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None  # Positions that a query sees, including its own; None: all earlier ones.
    softcap: float = 0.0
    sinks: bool = False
    row: tuple[tuple[int, int], ...] = ()
    """(heads, width) of the tensors that a token leaves in the cache, if that is not the call's K and V: a latent and
    its rope key, or what a `single` model keeps. Empty: K and V."""

    @property
    def kept(self) -> tuple[int, int]:
        """(Hkv, D) of the two planes in a page. Keys or values that are narrower are padded with zeros. The numbers of
        `row` follow each other, one half in each plane."""
        if self.row:
            return 1, -(-sum(heads * width for heads, width in self.row) // 2)
        return self.kv_heads, max(self.key_dim, self.value_dim)


class Mixer(NamedTuple):
    """A module that keeps a recurrent state in the model's cache."""

    path: str  # Its name in the model.
    cache: str  # The parameter of its forward function that takes the cache.
    layer: int  # Its layer in the cache.
    numbers: int  # States that this layer of the cache has.
    tensors: tuple[StateTensor, ...]
    """`conv0` and `recurrent0` are the tensors of the layer's first state. `MODEL_DTYPE` is a possible dtype."""
    block: int  # See `StateSpec`.
    stepwise: (
        bool  # Given several tokens, it ignores the recurrent state: after the first chunk it takes one at a time.
    )


@dataclass(frozen=True, slots=True)
class TransformersSpec(ModelSpec):
    """Shapes from a dry run of the model's code.

    `num_layers` is the number of attention calls; `num_heads`, `num_kv_heads` and `head_dim` are the largest of them.
    """

    calls: tuple[AttentionCall, ...] = ()  # In the order of a forward pass. If `single`: the layers of its cache.
    mixers: tuple[Mixer, ...] = ()
    single: str = ""
    """Why requests cannot share a forward pass: each passes the model alone, with a cache made from its pages. Empty:
    they share one."""
    parameters: int = 0
    active: int = 0  # Parameters used per token.
    config: Any = None  # `transformers`' configuration.
    limit: str = ""  # What limits `max_positions`, if not the model.

    native: ClassVar[bool] = False

    def shard(self, rank: int, ranks: int) -> Self:  # noqa: ARG002
        if ranks == 1:
            return self
        raise ModelError(f"transformers' code computes {self.architecture}: it cannot be split over {ranks} ranks")

    @property
    def num_parameters(self) -> int:
        return self.parameters

    @property
    def active_parameters(self) -> int:
        return self.active

    def weight_bytes(self, itemsize: int) -> int:
        return self.parameters * itemsize

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        return tuple(call.kept for call in self.calls)

    @property
    def states(self) -> tuple[StateSpec | None, ...]:
        """The state of each mixer. The names of tensors in the dtype of activations begin with `conv`."""
        return tuple(
            StateSpec(tuple(_kept(tensor, self.dtype) for tensor in mixer.tensors), mixer.block)
            for mixer in self.mixers
        )

    def expanded(self) -> Self:
        """Return the spec with the K and V of latent attention in pages instead of the latents."""
        if self.single or not any(call.row for call in self.calls):
            return self
        calls = tuple(call._replace(row=()) for call in self.calls)
        return replace(
            self, calls=calls, num_kv_heads=max(c.kv_heads for c in calls), head_dim=max(c.kept[1] for c in calls)
        )


def _kept(tensor: StateTensor, dtype: str) -> StateTensor:
    follows = tensor.dtype == MODEL_DTYPE
    name, kept = (f"conv {tensor.name}", dtype) if follows else (f"kept {tensor.name}", tensor.dtype)
    return replace(tensor, name=name, dtype=kept)
