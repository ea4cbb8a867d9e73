"""`ModelSpec`: a model as data, for the loader, the executors and the search. They are independent of model families.

A family (`families/`) creates one from a Hugging Face `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from weft.engine.errors import ModelError
from weft.engine.model.operations import Operation, Resource, Role, all_reduce, attention, projection, state
from weft.engine.model.operations import experts as _experts
from weft.engine.model.parts import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    Experts,
    Integers,
    Latent,
    Layer,
    Norm,
    Packed,
    Placement,
    Quantization,
    Recurrence,
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
    output_gate: bool = False  # Attention's output is multiplied by the sigmoid of a separate projection.
    latent: Latent | None = None
    """Attention keeps latents: one KV head of `latent.width` columns, in one plane instead of two."""
    recurrence: Recurrence | None = None  # The mixer of all layers that have a state.
    learned_positions: int | None = None  # Positions are rows of a table, starting at this offset; None: no table.
    embedding_scale: float = 1.0  # Rounded to the dtype of the weights.
    residual_scale: float = 1.0  # Factor on what attention and MLP add to the stream; folded into the matrices.
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    experts: Experts | None = None
    quantization: Quantization | None = None  # FP8 format of the matrices; None: 16 or 32 bits.
    widened: bool = False  # FP8 matrices of the checkpoint become 16 bits while loading; `quantization` is then None.
    integers: Integers | None = None
    """Low-bit integer matrices of the checkpoint, which become 16 bits while loading unless they are `packed`."""
    packed: Packed | None = None  # Matrices in 4 and 8 bits stay as the checkpoint has them.
    shard_of: Shard = Shard()
    sums: tuple[tuple[str, Reduction], ...] = ()  # Replaced all-reduces (see `Reduction`), by name.

    native: ClassVar[bool] = True  # Computed by weft's own operations; else see `TransformersSpec`.

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """(Hkv, D) of the keys and values of each layer that keeps them."""
        return ((self.num_kv_heads, self.head_dim),) * self.kv_layer(self.num_layers)

    @property
    def kv_planes(self) -> int:
        """Rows that a token has in a page, for each layer and KV head: K and V, or one latent."""
        return 2 if self.latent is None else 1

    @property
    def rotary_width(self) -> int:
        """Columns of a head that a rope may rotate."""
        return self.head_dim if self.latent is None else self.latent.rotated

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
        every = norm
        for i in range(self.num_layers):
            layer = self.layer(i)
            norms = self.placement.norms if layer.mlp and (layer.attention or layer.state) else 1
            every += norms * norm + (heads * self.head_dim if layer.attention else 0)
            if self.latent is not None and layer.attention:
                every += self.latent.query_rank + self.latent.rank
            every += sum(op.parameters for op in self.layer_operations(i))
            if layer.state is not None and self.recurrence is not None:
                every += self.recurrence.small_parameters
            if self.experts is not None and self.experts.shared_gate and self.layer(i).experts:
                every += self.hidden_size
        tables = len(self.vocabulary) * (1 if self.tie_embeddings else 2)
        if self.learned_positions is not None:
            tables += self.max_positions + self.learned_positions
        return every + tables * self.hidden_size

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of `num_parameters` at `itemsize` bytes each, or fewer in quantized matrices."""
        if self.packed is not None:
            return self._packed_bytes(self.packed, itemsize)
        small = 0
        if self.quantization is not None:
            operations = (op for i in range(self.num_layers) for op in self.layer_operations(i))
            small = sum(op.parameters for op in operations if op.kernel != "router")
        return self.num_parameters * itemsize - small * (itemsize - 1)

    def _packed_bytes(self, own: Packed, itemsize: int) -> int:
        operations = [op for i in range(self.num_layers) for op in self.layer_operations(i)]
        small = sum(op.parameters for op in operations if op.role is not Role.EXPERTS and op.kernel != "router")
        tables = len(self.vocabulary) * (1 if self.tie_embeddings else 2) * self.hidden_size
        others = self.num_parameters - small - tables
        layer_bytes, table_bytes = (
            values * (packed + plain * itemsize)
            for values, packed, plain in (
                (small, own.layer_bytes, own.layer_plain), (tables, own.table_bytes, own.table_plain),
            )
        )  # fmt: skip
        return int(layer_bytes + table_bytes) + others * itemsize

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

        Activations: x residual stream, q queries or a recurrence's inputs, g gate of attention's output, a attention
        output, l latents, p queries made from one, v values made from one, m a recurrence's output, h hidden part of
        the MLP, r router choice, s hidden part of a shared expert. With several ranks, projections with target x leave
        partial sums; an all-reduce adds them up, applies the post-norm if any, and adds the result to x. `sums` selects
        other collectives. Raises `ModelError` if they are impossible.
        """
        operations = self._operations(layer)
        return with_reductions(operations, dict(self.sums), self.shard_of.ranks) if self.sums else operations

    def _operations(self, layer: int) -> Iterator[Operation]:
        hidden = self.hidden_size
        ranks, parallel, own = self.shard_of.ranks, self.placement.parallel, self.layer(layer % self.num_layers)
        experts = self.experts if own.experts else None
        reads: tuple[Operation, ...] = ()
        after: tuple[str, ...] = ()
        if own.attention or own.state is not None:
            *before, into = self._mixer(own)
            yield before[0]
            # In a parallel layer the MLP reads the stream before attention adds to it.
            reads = tuple(self._mlp_reads((before[0].name,), experts)) if parallel else ()
            yield from reads
            yield from before[1:]
            yield replace(into, parents=(*into.parents, *(op.name for op in reads)))
            after = (into.name,)
            if ranks > 1 and not parallel:  # a parallel layer adds up attention and MLP at once
                yield all_reduce(f"{into.name}_reduce", after, hidden, ranks)
                after = (f"{into.name}_reduce",)
        if not own.mlp:
            return
        if not parallel:
            reads = tuple(self._mlp_reads(after, experts))
            yield from reads
        # A projection that adds to the stream waits for all operations that read it.
        parents = (*(after if parallel else ()), *(op.name for op in reads))
        if experts is None:
            yield projection("down", parents, hidden, self.intermediate_size, kernel="residual", source="h", target="x")
            last = "down"
        else:
            yield _experts(
                "experts_down", parents, hidden, experts.intermediate_size, experts.count, experts.top,
                kernel="experts_residual", source="h", target="x",
            )  # fmt: skip
            last = "experts_down"
            if experts.shared_size:
                yield projection(
                    "shared_down", (last,), hidden, experts.shared_size, kernel="residual", source="s", target="x"
                )
                last = "shared_down"
        if ranks > 1:
            yield all_reduce("down_reduce", (last,), hidden, ranks)

    def _mixer(self, layer: Layer) -> Iterator[Operation]:
        """Yield the operations of attention or a recurrence; the first reads the stream, the last adds to it."""
        hidden, width, own = self.hidden_size, self.num_heads * self.head_dim, self.recurrence
        if layer.attention and self.latent is not None:
            yield from self._latent_attention(self.latent)
            return
        if layer.attention:
            yield projection("qkv", (), self.qkv_size, hidden, kernel="qkv", source="x", target="q")
            gate: tuple[str, ...] = ()
            if self.output_gate:
                gate = ("output_gate",)
                yield projection(gate[0], (), width, hidden, kernel="output_gate", source="x", target="g")
            yield attention("decode", Role.DECODE_ATTENTION, Resource.MEMORY, ("qkv",), width)
            yield attention("prefill", Role.PREFILL_ATTENTION, Resource.COMPUTE, ("qkv",), width)
            kernel = "gated_residual" if self.output_gate else "residual"
            yield projection("o", ("decode", "prefill", *gate), hidden, width, kernel=kernel, source="a", target="x")
            return
        assert own is not None  # ensured by `checked`
        values = own.heads * own.key_dim * own.value_dim
        yield projection("state_in", (), own.inner, hidden, kernel="state_in", source="x", target="q")
        for name, role, resource in (
            ("state_step", Role.STATE_STEP, Resource.MEMORY), ("state_scan", Role.STATE_SCAN, Resource.COMPUTE)
        ):  # fmt: skip
            yield state(name, role, resource, ("state_in",), own.inner, own.width, values)
        parents = ("state_step", "state_scan")
        yield projection("state_out", parents, hidden, own.width, kernel="residual", source="m", target="x")

    def _latent_attention(self, own: Latent) -> Iterator[Operation]:
        hidden, heads = self.hidden_size, self.num_heads
        queries, rows = heads * own.query_dim, heads * own.rank
        inner = own.width + (own.query_rank or queries)
        yield projection("latent_in", (), inner, hidden, kernel="latent_in", source="x", target="l")
        before = "latent_in"
        if own.query_rank:
            before = "query_up"
            yield projection(before, ("latent_in",), queries, own.query_rank, kernel="query_up", source="l", target="p")
        absorbed = projection("latent_queries", (before,), rows, own.plain, kernel="latent_queries", target="q")
        yield replace(absorbed, source="p" if own.query_rank else "l")
        width = heads * own.width
        yield attention("decode", Role.DECODE_ATTENTION, Resource.MEMORY, ("latent_queries",), width)
        yield attention("prefill", Role.PREFILL_ATTENTION, Resource.COMPUTE, ("latent_queries",), width)
        values = heads * own.value_dim
        yield projection(
            "latent_values", ("decode", "prefill"), values, own.rank, kernel="latent_values", source="a", target="v"
        )
        yield projection("o", ("latent_values",), hidden, values, kernel="residual", source="v", target="x")

    def _mlp_reads(self, parents: tuple[str, ...], experts: Experts | None) -> Iterator[Operation]:
        """Yield the operations of an MLP that read the stream."""
        hidden, inter = self.hidden_size, self.intermediate_size
        kernel, halves = ("gate_up", 2) if self.gated else ("up", 1)
        if experts is None:
            yield projection(kernel, parents, halves * inter, hidden, kernel=kernel, source="x", target="h")
            return
        yield projection("router", parents, experts.count, hidden, kernel="router", source="x", target="r")
        yield _experts(
            f"experts_{kernel}", ("router",), halves * experts.intermediate_size, hidden, experts.count, experts.top,
            kernel=f"experts_{kernel}", source="x", target="h",
        )  # fmt: skip
        if experts.shared_size:
            yield projection(
                f"shared_{kernel}", parents, halves * experts.shared_size, hidden, kernel=kernel, source="x", target="s"
            )

    def rotary(self, max_positions: int) -> list[tuple[torch.Tensor, float]]:
        """Return `rope.inv_freq` of each of `ropes`, and an empty table if some layers have no rope."""
        import torch

        tables = [inv_freq(self.rotary_width, rope, max_positions) for rope in self.ropes]
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
        if any(layer.mlp and not layer.experts for layer in self.layers):
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
        recurrence = None if self.recurrence is None else self.recurrence.shard(ranks)
        layers = self.layers
        if recurrence is not None:
            layers = tuple(
                replace(layer, state=layer.state and layer.state.resized(recurrence.state)) for layer in layers
            )
        return replace(
            self,
            recurrence=recurrence,
            layers=layers,
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
        if self.head_dim % 2 or any(rope.dim(self.rotary_width) % 2 for rope in self.ropes):
            raise ModelError(f"head_dim {self.head_dim}: rotary embedding needs pairs")
        known = GATED_ACTIVATIONS if self.gated else ACTIVATIONS
        if self.activation not in known:
            raise ModelError(f"activation {self.activation!r} is not supported ({', '.join(known)} are)")
        if self.experts is not None and not 1 <= self.experts.top <= self.experts.count:
            raise ModelError(f"config.json: a token uses {self.experts.top} of {self.experts.count} experts")
        if any(layer.state is not None for layer in self.layers) != (self.recurrence is not None):
            raise ModelError("config.json: it describes a recurrence that no layer has")
        if self.placement is not Placement.PRE and not all(layer.mlp and layer.attention for layer in self.layers):
            raise ModelError(f"layers without attention or MLP need norms placed {Placement.PRE.value}")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError("config.json: a sliding window must be at least 1")
        return self
