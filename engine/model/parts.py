"""The parts that a `ModelSpec` is made of: norm, placement, layer, experts. Data; no part knows a family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""those of `kernels.reference.ACTIVATIONS`, which reading a config need not load"""
GATED_ACTIVATIONS = (*ACTIVATIONS, "swiglu_oai")


@dataclass(frozen=True, slots=True)
class Norm:
    """The norms of the residual stream. All are computed in float32 and rounded once."""

    eps: float
    centred: bool = False
    """LayerNorm: the mean is taken off first; else RMS norm"""
    weight: bool = True
    bias: bool = False
    unit_offset: bool = False
    """its weight, and that of the norms over heads, is one plus what the checkpoint has"""


class Placement(Enum):
    """Where the norms of a layer stand."""

    PRE = "pre"
    """before attention and before the MLP"""
    POST = "post"
    """behind each, before the sum"""
    SANDWICH = "sandwich"
    """before and behind each"""
    PARALLEL = "parallel"
    """attention and MLP read the same stream, one norm for both"""
    PARALLEL_TWO = "parallel, two norms"
    """the same with a norm for each"""

    @property
    def before(self) -> bool:
        return self is not Placement.POST

    @property
    def behind(self) -> bool:
        return self in (Placement.POST, Placement.SANDWICH)

    @property
    def parallel(self) -> bool:
        return self in (Placement.PARALLEL, Placement.PARALLEL_TWO)

    @property
    def norms(self) -> int:
        """Norms of a layer's residual stream."""
        return {Placement.SANDWICH: 4, Placement.PARALLEL: 1}.get(self, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer has of its own."""

    window: int | None = None
    """positions that a query sees, its own included; None: all before it"""
    rope: int | None = 0
    """which of `ModelSpec.ropes`; None: q and k are not rotated"""
    experts: bool = False
    """its MLP is `ModelSpec.experts`"""


RouterKind = Literal["softmax", "top_softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Experts:
    """An MLP of which each token takes a few of many. The router's options: see `kernels.experts_reference.route`."""

    count: int
    top: int
    """experts of one token"""
    intermediate_size: int
    """of one expert"""
    router: RouterKind = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    choice_bias: bool = False
    router_bias: bool = False
    bias: bool = False
    """of the experts' matrices"""
    shared_size: int = 0
    """columns of an MLP that every token takes beside them; 0: there is none"""
    shared_gate: bool = False
    """what it gives is multiplied by the sigmoid of a product of its own"""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of products are kept in FP8 (e4m3 with scales). Embedding, head, routers and norms are not."""

    method: str
    """as a `config.json` names it"""
    activations: Literal["dynamic", "static", "none"] = "dynamic"
    """what becomes of a product's input: see `kernels.fp8_matrix.Activations`"""
    at_load: bool = False
    """matrices that the checkpoint has in 16 bits become FP8, a scale for each output channel"""
    weights: tuple[str, ...] = ("channel",)
    """what has a scale of its own, in a word: tensor, channel or block; several, where modules differ"""
    kept: int = 0
    """modules that the config leaves in 16 bits"""


@dataclass(frozen=True, slots=True)
class Integers:
    """How a checkpoint has matrices in whole numbers of a few bits, which become 16 bits while they load."""

    method: Literal["awq", "gptq", "compressed-tensors"]
    bits: int
    """of a code: 2, 4 or 8"""
    group: int
    """columns that share a scale; 0: all"""
    symmetric: bool = False
    """no zeros are written: it is the middle of the codes"""
    act_order: bool = False
    """groups are not in the order of columns: which one a column has is written"""
    zeros_less_one: bool = False
    """as GPTQ writes them, but for its second version"""
