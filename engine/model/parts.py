"""The parts of a `ModelSpec`: norm, placement, layer, experts. They are data, independent of families."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from weft.engine.errors import ModelError

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
class StateTensor:
    """One tensor of a layer's recurrent state, for one request."""

    name: str  # "conv" or "recurrent"; for `transformers`' code, the name in its cache layer. Convolutions: "conv…".
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16" or "float16".


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a recurrent layer keeps of all earlier tokens: tensors of fixed size, instead of K and V of each token."""

    tensors: tuple[StateTensor, ...]
    block: int = 64  # Cutting a prompt at multiples of this many tokens changes no bits.

    @property
    def nbytes(self) -> int:
        """Bytes of one request's state."""
        return sum(math.prod(t.shape) * (4 if t.dtype == "float32" else 2) for t in self.tensors)

    def resized(self, like: StateSpec) -> StateSpec:
        """Return this state with the shapes of another."""
        pairs = zip(self.tensors, like.tensors, strict=True)
        return replace(self, tensors=tuple(replace(own, shape=other.shape) for own, other in pairs))


@dataclass(frozen=True, slots=True)
class Latent:
    """Latent attention: a token keeps a latent and a rotated key for all heads, instead of keys and values of each. See
    `kernels.reference.latent`."""

    rank: int  # Numbers of the latent.
    rotated: int  # Columns of the rotated key, and of the rotated part of a query.
    plain: int  # Columns of a head's key without rotation, which are made from the latent.
    value_dim: int
    query_rank: int = 0  # Numbers of a token's latent for queries; 0: queries are made from the stream.
    eps: float = 1e-6  # Epsilon of the norms of latents.

    @property
    def width(self) -> int:
        """Values that a token keeps in a layer."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Columns of a head's query."""
        return self.plain + self.rotated


RecurrenceKind = Literal["gated_delta", "mamba2", "short_conv"]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A mixer that keeps a state instead of keys and values: a causal convolution of each channel over the last tokens,
    then (but not in `short_conv`) a recurrence whose state is a matrix for each head. See `kernels.reference.states`.

    gated_delta: a matrix has a row for each key column and a column for each value column. mamba2: a row for each value
    column and a column for each key column. short_conv: its channels are `heads`."""

    kind: RecurrenceKind
    heads: int  # Value heads.
    key_heads: int = 0  # Each serves `heads / key_heads` value heads in a row; of mamba2, groups of B and C.
    key_dim: int = 0
    value_dim: int = 1
    taps: int = 4  # Tokens that the convolution covers, including the current one.
    conv_bias: bool = False
    bias: bool = False  # Biases of the projections before and after.
    least_step: float = 0.0  # mamba2: lower limit of a time step.
    most_step: float = float("inf")
    block: int = 64  # Tokens of a block of the scan.
    conv_dtype: str = "float32"  # Dtype of the convolution's state.
    key_parts: int = 1  # Parts that the key heads of all ranks are split into; several ranks may hold one.

    @property
    def width(self) -> int:
        """Columns of its output."""
        return self.heads * self.value_dim

    @property
    def sections(self) -> dict[str, int]:
        """Columns of its input projection, by meaning. The convolution covers the first three, or for short_conv the
        product of B and x.

        gated_delta: q, k, v and z, the output gate. mamba2: x, B, C and z. short_conv: B, C (the gates) and x."""
        keys, width = self.key_heads * self.key_dim, self.width
        match self.kind:
            case "gated_delta":
                return {"q": keys, "k": keys, "v": width, "z": width}
            case "mamba2":
                return {"x": width, "B": keys, "C": keys, "z": width}
        return {"B": width, "C": width, "x": width}

    @property
    def scalars(self) -> dict[str, int]:
        """Columns of its input projection with one number a head. gated_delta: b (the share that is overwritten) and a
        (decay); mamba2: t (time steps)."""
        return dict.fromkeys({"gated_delta": "ba", "mamba2": "t", "short_conv": ""}[self.kind], self.heads)

    @property
    def keyed(self) -> str:
        """The sections that belong to key heads."""
        return {"gated_delta": "qk", "mamba2": "BC", "short_conv": ""}[self.kind]

    @property
    def inner(self) -> int:
        """Columns of its input projection."""
        return sum(self.sections.values()) + sum(self.scalars.values())

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.heads if self.kind == "short_conv" else sum(list(self.sections.values())[:3])

    @property
    def state(self) -> StateSpec:
        conv = StateTensor("conv", (self.channels, self.taps - 1), self.conv_dtype)
        if self.kind == "short_conv":
            return StateSpec((conv,), block=1)
        matrix = (self.key_dim, self.value_dim) if self.kind == "gated_delta" else (self.value_dim, self.key_dim)
        return StateSpec((conv, StateTensor("recurrent", (self.heads, *matrix), "float32")), self.block)

    @property
    def small_parameters(self) -> int:
        """Values in its vectors and its convolution, without biases."""
        vectors = {"gated_delta": self.heads + self.value_dim, "mamba2": 2 * self.heads + self.width}
        return self.channels * self.taps + vectors.get(self.kind, 0)

    def shard(self, ranks: int) -> Recurrence:
        """Return the part of one of `ranks`: value heads are split with their key heads, which several ranks hold if
        there are fewer. Raises `ModelError`."""
        if self.heads % ranks:
            raise ModelError(f"{self.heads} heads of recurrent states cannot be split over {ranks} ranks")
        if self.kind == "short_conv":
            return replace(self, heads=self.heads // ranks)
        if self.key_heads % ranks and ranks % self.key_heads:
            raise ModelError(
                f"{self.key_heads} key heads of recurrent states can be neither split nor replicated over {ranks} ranks"
            )
        key_parts = min(ranks, self.key_heads)
        return replace(self, heads=self.heads // ranks, key_heads=self.key_heads // key_parts, key_parts=key_parts)


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ between layers."""

    window: int | None = None  # Positions that a query sees, including its own; None: all earlier ones.
    rope: int | None = 0  # Index into `ModelSpec.ropes`; None: q and k are not rotated.
    experts: bool = False  # Whether its MLP is `ModelSpec.experts`.
    state: StateSpec | None = None  # Its recurrent state; None: it keeps none.
    attention: bool = True  # Whether it has attention, and so keeps K and V.
    mlp: bool = True  # Whether it has an MLP or experts.


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
    group_best: int = 2  # Experts whose scores are added up to choose groups.
    weight_eps: float = 0.0  # Added to the sum that `normalise` divides by.


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
class Packed:
    """Matrices that stay in 4 and 8 bits in memory: see `kernels.formats.packed_matrix`."""

    layer_bytes: float  # Bytes of all packed matrices of the layers, per value of all matrices.
    layer_plain: float  # Share of these values whose matrices are in 16 or 32 bits.
    table_bytes: float  # The same two of the embedding and the head.
    table_plain: float
    formats: str  # The checkpoint's formats, with their shares.


@dataclass(frozen=True, slots=True)
class Integers:
    """How a checkpoint stores matrices as low-bit integers, which become 16 bits while loading."""

    method: Literal["awq", "gptq", "compressed-tensors"]
    bits: int  # Bits per code: 2, 4 or 8.
    group: int  # Columns that share a scale; 0: all.
    symmetric: bool = False  # No zeros are stored: zero is the middle of the code range.
    act_order: bool = False  # Groups are not in column order: the group of each column is stored.
    zeros_less_one: bool = False  # Zeros are stored minus one, as in the first version of GPTQ's format.
