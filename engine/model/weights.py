"""`Weights` of a model, packed for the kernels: read from a checkpoint, or made up for `--load-format dummy`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.model.checkpoint import WHOLE, Checkpoint, Dummy, Part, TensorSource
from weft.engine.model.families import family_of
from weft.engine.model.families.family import TensorNames
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import Progress
from weft.kernels import pack

LOADING = "loading layers"
HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""ends of names that checkpoints carry and nobody needs: tables that follow from the config"""


@dataclass(frozen=True, slots=True)
class ProductWeights:
    """What one product of a layer reads, in the layout of `kernels.pack`; the norm before it is folded in."""

    weight: Tensor
    """[out, inner]"""
    bias: Tensor | None = None
    """[out]"""
    q_norm: Tensor | None = None
    """[D]"""
    k_norm: Tensor | None = None
    """[D]"""


LayerWeights = Mapping[str, ProductWeights]
"""by operation"""


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """[V, H]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[H]"""
    lm_head: Tensor
    """[V, H]; the embedding itself when tied"""
    rotary: Tensor
    """[positions, D/2, 2] float32"""

    @property
    def num_bytes(self) -> int:
        products = (product for layer in self.layers for product in layer.values())
        parts = (t for p in products for t in (p.weight, p.bias, p.q_norm, p.k_norm) if t is not None)
        tensors = (self.embedding, self.norm, self.lm_head, self.rotary, *parts)
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def pack_layer(get: TensorSource, spec: ModelSpec, names: TensorNames, i: int) -> LayerWeights:
    """Layer `i` of a model with grouped-query attention and a gated MLP, or the part of it that a shard has."""
    h, d, inter = spec.hidden_size, spec.head_dim, spec.intermediate_size
    hq, hkv = spec.num_heads * d, spec.num_kv_heads * d
    own = spec.shard_of
    # column-parallel products give each rank rows of their weights, row-parallel ones (o, down) columns
    rows, columns = Part(0, own.rank, own.ranks), Part(1, own.rank, own.ranks)
    kv_rows = Part(0, own.kv_part, own.kv_parts)
    prefix = names.layer.format(i)

    def tensor(name: str, shape: tuple[int, ...], part: Part = WHOLE, kind: str = "weight") -> Tensor:
        return get(f"{prefix}{name}.{kind}", shape, part)

    q = pack.interleave_rotary(tensor(names.q, (hq, h), rows), d)
    k = pack.interleave_rotary(tensor(names.k, (hkv, h), kv_rows), d)
    v = tensor(names.v, (hkv, h), kv_rows)
    input_norm = tensor(names.attention_norm, (h,))
    qkv_bias = o_bias = q_norm = k_norm = None
    if spec.qkv_bias:
        qb = pack.interleave_rotary(tensor(names.q, (hq,), rows, "bias"), d)
        kb = pack.interleave_rotary(tensor(names.k, (hkv,), kv_rows, "bias"), d)
        qkv_bias = torch.cat((qb, kb, tensor(names.v, (hkv,), kv_rows, "bias")))
    if spec.o_bias:
        bias = tensor(names.o, (h,), WHOLE, "bias")
        o_bias = bias if own.rank == 0 else None  # once in the sum over ranks
    if spec.qk_norm:
        q_norm = pack.interleave_rotary(tensor(names.q_norm, (d,)), d)
        k_norm = pack.interleave_rotary(tensor(names.k_norm, (d,)), d)
    gate, up = tensor(names.gate, (inter, h), rows), tensor(names.up, (inter, h), rows)
    mlp_norm = tensor(names.mlp_norm, (h,))
    return {
        "qkv": ProductWeights(pack.fold_norm(torch.cat((q, k, v)), input_norm), qkv_bias, q_norm, k_norm),
        "o": ProductWeights(tensor(names.o, (h, hq), columns), o_bias),
        "gate_up": ProductWeights(pack.fold_norm(pack.interleave_gate_up(gate, up), mlp_norm)),
        "down": ProductWeights(tensor(names.down, (h, inter), columns)),
    }


def _warn_of(surplus: list[str]) -> None:
    if surplus:
        named = ", ".join(surplus[:3]) + (" …" if len(surplus) > 3 else "")
        print(
            f"weft: {len(surplus)} tensor(s) of the checkpoint are not used, for config.json does not ask for them: "
            f"{named}",
            file=sys.stderr,
            flush=True,
        )


def load_weights(
    spec: ModelSpec,
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int,
    dummy_seed: int | None = None,
    progress: Progress | None = None,
) -> Weights:
    """Load and pack. `dummy_seed` makes weights up instead of reading `path`.

    What is returned is a copy: nothing that happens to the files later changes it. Raises `ModelError` for a missing
    shard or tensor, a shape that does not fit the config, layers beyond it, and values that are not finite. Tensors of
    other names that the config does not ask for are told in one line.
    """

    if progress is not None:
        progress(LOADING, 0, spec.num_layers)
    names = family_of(spec.architecture).names
    head_name = f"{names.lm_head}.weight"
    with ExitStack() as stack:
        source: TensorSource
        checkpoint, finite = None, FiniteCheck()
        if dummy_seed is not None:
            source, tied = Dummy(dummy_seed, device), spec.tie_embeddings
        else:
            source = checkpoint = Checkpoint(path, stack)
            # Some checkpoints say "untied" and ship no lm_head: the file decides.
            tied = spec.tie_embeddings or head_name not in checkpoint
            checkpoint.refuse_further_layers(names.layer, spec.num_layers)

        def get(name: str, shape: tuple[int, ...], part: Part = WHOLE) -> Tensor:
            # To the serving dtype first: folding a norm must round once, in that dtype. And always a copy: what a
            # checkpoint gives is the mapped file, which somebody may write to or cut off while it is served.
            tensor = source(name, shape, part).to(device=device, dtype=dtype, copy=True).contiguous()
            if checkpoint is not None:
                finite.add(name, tensor)
            return tensor

        embedding = get(f"{names.embedding}.weight", (spec.vocab_size, spec.hidden_size))

        def layers() -> Iterator[LayerWeights]:
            for i in range(spec.num_layers):
                yield pack_layer(get, spec, names, i)
                if progress is not None:
                    progress(LOADING, i + 1, spec.num_layers)

        packed = tuple(layers())
        norm = get(f"{names.norm}.weight", (spec.hidden_size,))
        head = embedding if tied else get(head_name, (spec.vocab_size, spec.hidden_size))
        finite.end(dtype)
        if checkpoint is not None:
            _warn_of(checkpoint.surplus((*HARMLESS, head_name) if tied else HARMLESS))
    inv_freq, scale = spec.inv_freq()
    rotary = pack.rotary_table(inv_freq.to(device), max_positions, scale)
    return Weights(embedding=embedding, layers=packed, norm=norm, lm_head=head, rotary=rotary)
