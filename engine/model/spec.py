"""`ModelSpec`: a model as data. The loader, the executors and the search read this; none of them knows a family.

A family (`families/`) makes one from a Hugging Face `config.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from weft.engine.errors import ModelError
from weft.engine.model.operations import Operation, Resource, Role, all_reduce, attention, product
from weft.engine.model.rope import RopeScaling, inv_freq

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """Which of how many ranks a spec describes, and where its KV heads lie among those of the whole model."""

    rank: int = 0
    ranks: int = 1
    kv_part: int = 0
    kv_parts: int = 1
    """fewer than `ranks` where KV heads are replicated"""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of a decoder-only transformer with grouped-query attention and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: tuple[int, ...] = field(default=())
    qk_norm: bool = False
    """RMS norm over each head of q and k"""
    shard_of: Shard = Shard()

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        per_layer = sum(op.parameters for op in self.layer_operations()) + norms
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return per_layer * self.num_layers + embeddings + self.hidden_size

    def layer_operations(self) -> Iterator[Operation]:
        """The operations of one layer in order, with dependencies inside the layer.

        Activations: x the residual stream, q the queries, a what attention gives, h the hidden part of the MLP. On
        several ranks o and down leave partial sums, which an all-reduce adds up.
        """
        hidden, inter, width = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        several = self.shard_of.ranks > 1
        yield product("qkv", (), self.qkv_size, hidden, kernel="qkv", source="x", target="q")
        yield attention("decode", Role.DECODE_ATTENTION, Resource.MEMORY, ("qkv",), width)
        yield attention("prefill", Role.PREFILL_ATTENTION, Resource.COMPUTE, ("qkv",), width)
        yield product("o", ("decode", "prefill"), hidden, width, kernel="residual", source="a", target="x")
        if several:
            yield all_reduce("o_reduce", ("o",), hidden)
        after = ("o_reduce",) if several else ("o",)
        yield product("gate_up", after, 2 * inter, hidden, kernel="gate_up", source="x", target="h")
        yield product("down", ("gate_up",), hidden, inter, kernel="residual", source="h", target="x")
        if several:
            yield all_reduce("down_reduce", ("down",), hidden)

    def inv_freq(self) -> tuple[torch.Tensor, float]:
        """See `rope.inv_freq`."""
        return inv_freq(self.head_dim, self.rope_theta, self.rope_scaling)

    def shard(self, rank: int, ranks: int) -> Self:
        """The part of this model that one of `ranks` GPUs holds: heads and MLP columns are split (NanoFlow §4.1.3).

        Where there are fewer KV heads than ranks, each is held by several. Vocabulary, norms and the residual stream
        stay whole. Raises `ModelError` for a model that cannot be cut so.
        """
        if ranks == 1:
            return self
        if not 0 <= rank < ranks:
            raise ModelError(f"rank {rank} is none of {ranks}")
        kv_parts = min(ranks, self.num_kv_heads)
        sizes = (("attention heads", self.num_heads), ("MLP columns", self.intermediate_size))
        for name, size in sizes:
            if size % ranks:
                raise ModelError(f"{size} {name} cannot be split over {ranks} GPUs")
        if self.num_kv_heads % kv_parts or ranks % kv_parts:
            raise ModelError(f"{self.num_kv_heads} KV heads can be neither split nor replicated over {ranks} GPUs")
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // kv_parts,
            intermediate_size=self.intermediate_size // ranks,
            shard_of=Shard(rank, ranks, rank * kv_parts // ranks, kv_parts),
        )

    def checked(self) -> Self:
        """The spec, if it can be computed. Raises `ModelError`, one line."""
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelError(f"config.json: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        if any(not 0 <= i < self.vocab_size for i in self.eos_token_ids):
            raise ModelError(f"end token {self.eos_token_ids} lies outside the vocabulary of {self.vocab_size}")
        if self.sliding_window is not None and self.sliding_window < self.max_positions:
            # Full attention equals sliding-window attention as long as no context is longer than the window.
            return replace(self, max_positions=self.sliding_window)
        return self
