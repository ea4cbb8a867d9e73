"""`ModelSpec`: a model as data, for the loader, the executors and the search. They are independent of model families.

A family (`families/`) creates one from a Hugging Face `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from weft.engine.errors import ModelError
from weft.engine.model.operations import Operation, Resource, Role, all_reduce, attention, projection
from weft.engine.model.operations import experts as _experts
from weft.engine.model.parts import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Experts,
    Integers,
    Layer,
    Norm,
    Placement,
    Quantization,
    StateSpec,
)
from weft.engine.model.reductions import Reduction, with_reductions
from weft.engine.model.rope import Rope, inv_freq

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """The rank that a spec describes, and the position of its KV heads among those of the unsharded model."""

    rank: int = 0
    ranks: int = 1
    kv_part: int = 0
    kv_parts: int = 1  # Less than `ranks` if KV heads are replicated.


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and parts of a decoder-only transformer with grouped-query attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # Columns of a dense MLP.
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm: Norm
    ropes: tuple[Rope, ...] = ()  # Each layer uses one of them, or none.
    dtype: str = "float32"  # Dtype of the checkpoint.
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False  # Bias of the vocabulary projection.
    eos_token_ids: tuple[int, ...] = ()
    placement: Placement = Placement.PRE
    layers: tuple[Layer, ...] = (Layer(),)  # A pattern that repeats over the layers.
    qk_norm: Literal["", "head", "projection"] = ""
    """RMS norm over each head of q and k, or over all heads of q and all of k; before the rotation."""
    activation: str = "silu"  # See `kernels.reference.layer.ACTIVATIONS`.
    gated: bool = True  # Whether the MLP multiplies two projections (gate and up) or has one.
    attention_scale: float | None = None  # Scale of the scores; None: head_dim ** -0.5.
    attention_softcap: float = 0.0
    sinks: bool = False  # Each head has an extra logit in the softmax of its scores.
    learned_positions: int | None = None  # Positions are rows of a table, starting at this offset; None: no table.
    embedding_scale: float = 1.0  # Rounded to the dtype of the weights.
    residual_scale: float = 1.0  # Factor on what attention and MLP add to the stream; folded into the matrices.
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    experts: Experts | None = None
    quantization: Quantization | None = None  # FP8 format of the matrices; None: 16 or 32 bits.
    widened: bool = False  # FP8 matrices of the checkpoint become 16 bits while loading; `quantization` is then None.
    integers: Integers | None = None
    """Low-bit integer matrices of the checkpoint, which become 16 bits while loading."""
    shard_of: Shard = Shard()
    sums: tuple[tuple[str, Reduction], ...] = ()  # Replaced all-reduces (see `Reduction`), by name.

    native: ClassVar[bool] = True  # Computed by weft's own operations; else see `TransformersSpec`.

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """(Hkv, D) of the keys and values of each layer that keeps them."""
        return ((self.num_kv_heads, self.head_dim),) * self.kv_layer(self.num_layers)

    def kv_layer(self, layer: int) -> int:
        """Return the index of a layer among those that keep K and V: how many earlier layers do."""
        return sum(self.layer(i).attention for i in range(layer))

    @property
    def states(self) -> tuple[StateSpec | None, ...]:
        """The recurrent state of each layer; None for layers without one."""
        return tuple(self.layer(i).state for i in range(self.num_layers))

    @property
    def recurrent(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(self.states)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def vocabulary(self) -> range:
        """Token ids whose rows of the embedding and the vocabulary projection this rank holds."""
        own = self.shard_of
        return range(own.rank * self.vocab_size // own.ranks, (own.rank + 1) * self.vocab_size // own.ranks)

    @property
    def rms_norm_eps(self) -> float:
        return self.norm.eps

    def layer(self, index: int) -> Layer:
        return self.layers[index % len(self.layers)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer that keeps K and V."""
        layers = [self.layer(i) for i in range(self.num_layers)]
        return tuple(layer.window for layer in layers if layer.attention)

    @property
    def kv_window(self) -> int | None:
        """The widest window: no layer looks further back; None: some layer sees all positions."""
        widths = [window for window in self.windows if window is not None]
        return max(widths) if widths and len(widths) == len(self.windows) else None

    @property
    def num_parameters(self) -> int:
        """Values in all matrices, norms and tables, without biases and sinks."""
        heads = {"": 0, "head": 2, "projection": self.num_heads + self.num_kv_heads}[self.qk_norm]
        norm = self.hidden_size if self.norm.weight else 0
        every = self.num_layers * (self.placement.norms * norm + heads * self.head_dim) + norm
        for i in range(self.num_layers):
            every += sum(op.parameters for op in self.layer_operations(i))
            if self.experts is not None and self.experts.shared_gate and self.layer(i).experts:
                every += self.hidden_size
        tables = len(self.vocabulary) * (1 if self.tie_embeddings else 2)
        if self.learned_positions is not None:
            tables += self.max_positions + self.learned_positions
        return every + tables * self.hidden_size

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of `num_parameters` at `itemsize` bytes each, or one byte each in quantized matrices."""
        small = 0
        if self.quantization is not None:
            operations = (op for i in range(self.num_layers) for op in self.layer_operations(i))
            small = sum(op.parameters for op in operations if op.kernel != "router")
        return self.num_parameters * itemsize - small * (itemsize - 1)

    @property
    def active_parameters(self) -> int:
        """Parameters used per token: all but the experts that it does not use (counted by Equation 5)."""
        if self.experts is None:
            return self.num_parameters
        idle = sum(
            op.parameters - op.flops // 2
            for i in range(self.num_layers)
            for op in self.layer_operations(i)
            if op.role is Role.EXPERTS
        )
        return self.num_parameters - idle

    def layer_operations(self, layer: int = -1) -> Iterator[Operation]:
        """Return the operations of a layer in order, with dependencies inside it; plans describe the last layer.

        Activations: x residual stream, q queries, a attention output, h hidden part of the MLP, r router choice, s
        hidden part of a shared expert. With several ranks, projections with target x leave partial sums; an all-reduce
        adds them up, applies the post-norm if any, and adds the result to x. `sums` selects other collectives. Raises
        `ModelError` if they are impossible.
        """
        operations = self._operations(layer)
        return with_reductions(operations, dict(self.sums), self.shard_of.ranks) if self.sums else operations

    def _operations(self, layer: int) -> Iterator[Operation]:
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        ranks, parallel = self.shard_of.ranks, self.placement.parallel
        experts = self.experts if self.layer(layer % self.num_layers).experts else None
        yield projection("qkv", (), self.qkv_size, hidden, kernel="qkv", source="x", target="q")
        # In a parallel layer the MLP reads the stream before attention adds to it.
        reads = tuple(self._mlp_reads(("qkv",), experts)) if parallel else ()
        yield from reads
        yield attention("decode", Role.DECODE_ATTENTION, Resource.MEMORY, ("qkv",), width)
        yield attention("prefill", Role.PREFILL_ATTENTION, Resource.COMPUTE, ("qkv",), width)
        before = ("decode", "prefill", *(op.name for op in reads))
        yield projection("o", before, hidden, width, kernel="residual", source="a", target="x")
        after = "o"
        if ranks > 1 and not parallel:  # a parallel layer adds up attention and MLP at once
            after = "o_reduce"
            yield all_reduce(after, ("o",), hidden, ranks)
        if not parallel:
            reads = tuple(self._mlp_reads((after,), experts))
            yield from reads
        # A projection that adds to the stream waits for all operations that read it.
        before = (*([after] if parallel else []), *(op.name for op in reads))
        if experts is None:
            yield projection("down", before, hidden, self.intermediate_size, kernel="residual", source="h", target="x")
            after = "down"
        else:
            yield _experts(
                "experts_down", before, hidden, experts.intermediate_size, experts.count, experts.top,
                kernel="experts_residual", source="h", target="x",
            )  # fmt: skip
            after = "experts_down"
            if experts.shared_size:
                yield projection(
                    "shared_down", (after,), hidden, experts.shared_size, kernel="residual", source="s", target="x"
                )
                after = "shared_down"
        if ranks > 1:
            yield all_reduce("down_reduce", (after,), hidden, ranks)

    def _mlp_reads(self, parents: tuple[str, ...], experts: Experts | None) -> Iterator[Operation]:
        """Yield the operations of an MLP that read the stream."""
        hidden, inter = self.hidden_size, self.intermediate_size
        if experts is None and self.gated:
            yield projection("gate_up", parents, 2 * inter, hidden, kernel="gate_up", source="x", target="h")
        elif experts is None:
            yield projection("up", parents, inter, hidden, kernel="up", source="x", target="h")
        else:
            yield projection("router", parents, experts.count, hidden, kernel="router", source="x", target="r")
            yield _experts(
                "experts_gate_up", ("router",), 2 * experts.intermediate_size, hidden, experts.count, experts.top,
                kernel="experts_gate_up", source="x", target="h",
            )  # fmt: skip
            if experts.shared_size:
                yield projection(
                    "shared_gate_up", parents, 2 * experts.shared_size, hidden, kernel="gate_up", source="x", target="s"
                )

    def rotary(self, max_positions: int) -> list[tuple[torch.Tensor, float]]:
        """Return `rope.inv_freq` of each of `ropes`, and an empty table if some layers have no rope."""
        import torch

        tables = [inv_freq(self.head_dim, rope, max_positions) for rope in self.ropes]
        if any(self.layer(i).rope is None for i in range(self.num_layers)):
            tables.append((torch.zeros(0), 1.0))
        return tables

    def rotary_table(self, layer: int) -> int:
        """Return the index of a layer's table in `rotary`."""
        rope = self.layer(layer).rope
        return len(self.ropes) if rope is None else rope

    def shard(self, rank: int, ranks: int) -> Self:
        """Return the shard of one of `ranks`: heads, MLP columns and vocabulary are split (NanoFlow §4.1.3).

        With fewer KV heads than ranks, several ranks hold each KV head. Norms, routers, the residual stream and
        `vocab_size` stay whole. Raises `ModelError` if the model cannot be split.
        """
        if ranks == 1:
            return self
        if not 0 <= rank < ranks:
            raise ModelError(f"rank {rank} is not one of {ranks}")
        kv_parts = min(ranks, self.num_kv_heads)
        sizes = [("attention heads", self.num_heads)]
        experts = self.experts
        if experts is None or not all(self.layer(i).experts for i in range(self.num_layers)):
            sizes += [("MLP columns", self.intermediate_size)]
        if experts is not None:
            sizes += [("expert columns", experts.intermediate_size), ("shared columns", experts.shared_size)]
            experts = replace(
                experts, intermediate_size=experts.intermediate_size // ranks, shared_size=experts.shared_size // ranks
            )
        for name, size in sizes:
            if size % ranks:
                raise ModelError(f"{size} {name} cannot be split over {ranks} ranks")
        if self.num_kv_heads % kv_parts or ranks % kv_parts:
            raise ModelError(f"{self.num_kv_heads} KV heads can be neither split nor replicated over {ranks} ranks")
        if self.vocab_size < ranks:
            raise ModelError(f"a vocabulary of {self.vocab_size} cannot be split over {ranks} ranks")
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // kv_parts,
            intermediate_size=self.intermediate_size // ranks,
            experts=experts,
            shard_of=Shard(rank, ranks, rank * kv_parts // ranks, kv_parts),
        )

    def checked(self) -> Self:
        """Return the spec if it can be computed. Raises `ModelError`, one line."""
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
            "max_positions",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ModelError(f"config.json: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2 or any(rope.dim(self.head_dim) % 2 for rope in self.ropes):
            raise ModelError(f"head_dim {self.head_dim}: rotary embedding needs pairs")
        known = GATED_ACTIVATIONS if self.gated else ACTIVATIONS
        if self.activation not in known:
            raise ModelError(f"activation {self.activation!r} is not supported ({', '.join(known)} are)")
        if self.experts is not None and not 1 <= self.experts.top <= self.experts.count:
            raise ModelError(f"config.json: a token uses {self.experts.top} of {self.experts.count} experts")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError("config.json: a sliding window must be at least 1")
        return self
