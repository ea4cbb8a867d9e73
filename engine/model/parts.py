"""The parts of a `ModelSpec`: norm, placement, layer, experts. They are data, independent of families."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""The names in `kernels.reference.layer.ACTIVATIONS`, repeated here so that reading a config does not load it."""
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oai")


@dataclass(frozen=True, slots=True)
class Norm:
    """The norms of the residual stream, computed in float32 and rounded once."""

    eps: float
    centred: bool = False  # LayerNorm, which subtracts the mean; else RMS norm.
    weight: bool = True
    bias: bool = False
    unit_offset: bool = False  # Its weight, and that of the norms over heads, is one plus the checkpoint's.


class Placement(Enum):
    """Where a layer has its norms."""

    PRE = "pre"  # Before attention and before the MLP.
    POST = "post"  # After each, before the residual sum.
    SANDWICH = "sandwich"  # Before and after each.
    PARALLEL = "parallel"  # Attention and MLP read the same stream through one norm.
    PARALLEL_TWO = "parallel, two norms"  # The same with a norm for each.

    @property
    def before(self) -> bool:
        return self is not Placement.POST

    @property
    def after(self) -> bool:
        return self in (Placement.POST, Placement.SANDWICH)

    @property
    def parallel(self) -> bool:
        return self in (Placement.PARALLEL, Placement.PARALLEL_TWO)

    @property
    def norms(self) -> int:
        """Number of norms of a layer's residual stream."""
        return {Placement.SANDWICH: 4, Placement.PARALLEL: 1}.get(self, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ between layers."""

    window: int | None = None  # Positions that a query sees, including its own; None: all earlier ones.
    rope: int | None = 0  # Index into `ModelSpec.ropes`; None: q and k are not rotated.
    experts: bool = False  # Whether its MLP is `ModelSpec.experts`.


RouterKind = Literal["softmax", "top_softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture-of-experts MLP. Router options: see `kernels.reference.experts.route`."""

    count: int
    top: int  # Experts per token.
    intermediate_size: int  # Intermediate size of one expert.
    router: RouterKind = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    choice_bias: bool = False
    router_bias: bool = False
    bias: bool = False  # Whether expert matrices have biases.
    shared_size: int = 0  # Columns of an MLP that every token passes in addition; 0: none.
    shared_gate: bool = False  # Its output is multiplied by the sigmoid of a separate projection.


@dataclass(frozen=True, slots=True)
class Quantization:
    """How projection matrices are stored in FP8 (e4m3 with scales). Embedding, head, routers and norms are not."""

    method: str  # Its name in `config.json`.
    activations: Literal["dynamic", "static", "none"] = "dynamic"
    """How a projection's input is quantized: see `kernels.formats.fp8_matrix.Activations`."""
    at_load: bool = False  # Quantize 16-bit matrices while loading, with one scale per output channel.
    weights: tuple[str, ...] = ("channel",)
    """Granularity of scales: tensor, channel or block; several if modules differ."""
    kept: int = 0  # Modules that the config leaves in 16 bits.


@dataclass(frozen=True, slots=True)
class Integers:
    """How a checkpoint stores matrices as low-bit integers, which become 16 bits while loading."""

    method: Literal["awq", "gptq", "compressed-tensors"]
    bits: int  # Bits per code: 2, 4 or 8.
    group: int  # Columns that share a scale; 0: all.
    symmetric: bool = False  # No zeros are stored: zero is the middle of the code range.
    act_order: bool = False  # Groups are not in column order: the group of each column is stored.
    zeros_less_one: bool = False  # Zeros are stored minus one, as in the first version of GPTQ's format.
