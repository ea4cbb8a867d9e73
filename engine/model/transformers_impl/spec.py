"""`TransformersSpec`: the properties of a model that `transformers`' code computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec


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

    @property
    def width(self) -> int:
        """Values stored per head for keys and for values; the narrower of the two is padded with zeros."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class TransformersSpec(ModelSpec):
    """Shapes from a dry run of the model's code.

    `num_layers` is the number of attention calls; `num_heads`, `num_kv_heads` and `head_dim` are the largest of them.
    """

    calls: tuple[AttentionCall, ...] = ()  # In the order of a forward pass.
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
        return tuple((call.kv_heads, call.width) for call in self.calls)
