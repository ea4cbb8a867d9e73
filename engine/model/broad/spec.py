"""`BroadSpec`: a model that `transformers`' own code computes, as far as the engine needs to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec


class AttentionCall(NamedTuple):
    """One call of the attention function in a forward pass. Every call has K and V of its own in a page."""

    layer: int
    """the index that the model gives; two calls may have the same"""
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    """positions that a query sees, its own included; None: all before it"""
    softcap: float = 0.0
    sinks: bool = False

    @property
    def width(self) -> int:
        """Values that a head keeps of a key, and of a value: the narrower of the two is filled with zeros."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class BroadSpec(ModelSpec):
    """Shapes from a dry run of the model's own code.

    `num_layers` counts the attention calls, `num_heads`, `num_kv_heads` and `head_dim` are the largest among them.
    """

    calls: tuple[AttentionCall, ...] = ()
    """in the order of a forward pass"""
    parameters: int = 0
    active: int = 0
    """of them, those that a token is computed with"""
    config: Any = None
    """`transformers`' configuration"""
    limit: str = ""
    """what bounds `max_positions`, if that is not the model"""

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
        return tuple((call.kv_heads, call.width) for call in self.calls)
