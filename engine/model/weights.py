"""`Weights` of a model, packed for the kernels: read from a checkpoint, or made up for `--load-format dummy`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.model.checkpoint import WHOLE, Checkpoint, Dummy, Part, TensorSource
from weft.engine.model.families import family_of
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.layer_weights import LayerWeights, Tensors, norm_weight, pack_layer
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import Progress
from weft.kernels import pack

LOADING = "loading layers"
HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""ends of names that checkpoints carry and nobody needs: tables that follow from the config"""


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Tensor
    """[V, H]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    """[H]"""
    lm_head: Tensor
    """[V, H]; the embedding itself when tied"""
    rotary: tuple[Tensor, ...]
    """[positions, D/2, 2] float32 each; see `ModelSpec.rotary_table` for a layer's"""
    norm_bias: Tensor | None = None
    """[H]"""
    head_bias: Tensor | None = None
    """[V]"""
    places: Tensor | None = None
    """[positions, H], learned: added to the embedding"""

    @property
    def num_bytes(self) -> int:
        products = (product for layer in self.layers for product in layer.values())
        own = (self.embedding, self.norm, self.lm_head, self.norm_bias, self.head_bias, self.places)
        tensors = (*own, *self.rotary, *(tensor for product in products for tensor in product.tensors()))
        return sum({t.data_ptr(): t.nbytes for t in tensors if t is not None}.values())


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
            checkpoint.rename(f"{names.embedding}.weight", names.prefix, names.other_prefixes)
            # Some checkpoints say "untied" and ship no lm_head: the file decides.
            tied = spec.tie_embeddings or head_name not in checkpoint
            checkpoint.refuse_further_layers(names.layer, spec.num_layers + names.draft_layers)

        def get(name: str, shape: tuple[int, ...], part: Part = WHOLE, kind: torch.dtype = dtype) -> Tensor:
            # To the serving dtype first: folding a norm must round once, in that dtype. And always a copy: what a
            # checkpoint gives is the mapped file, which somebody may write to or cut off while it is served.
            tensor = source(name, shape, part).to(device=device, dtype=kind, copy=True).contiguous()
            if checkpoint is not None and kind.is_floating_point:
                finite.add(name, tensor)
            return tensor

        tensors = Tensors(get, checkpoint.__contains__ if checkpoint is not None else None, dtype)
        embedding = get(f"{names.embedding}.weight", (spec.vocab_size, spec.hidden_size))

        def layers() -> Iterator[LayerWeights]:
            for i in range(spec.num_layers):
                yield pack_layer(tensors, spec, names, i)
                if progress is not None:
                    progress(LOADING, i + 1, spec.num_layers)

        packed = tuple(layers())
        norm = norm_weight(tensors, spec, names.norm, spec.hidden_size)
        if norm is None:
            norm = torch.ones(spec.hidden_size, dtype=dtype, device=device)
        norm_bias = get(f"{names.norm}.bias", (spec.hidden_size,)) if spec.norm.bias else None
        head = embedding if tied else get(head_name, (spec.vocab_size, spec.hidden_size))
        head_bias = get(f"{names.lm_head}.bias", (spec.vocab_size,)) if spec.head_bias else None
        places = None
        if (offset := spec.learned_positions) is not None:
            places = get(f"{names.positions}.weight", (spec.max_positions + offset, spec.hidden_size))[offset:]
        finite.end(dtype)
        if checkpoint is not None:
            harmless = (*HARMLESS, *names.harmless)
            _warn_of(checkpoint.surplus((*harmless, head_name) if tied else harmless))
    rotary = tuple(
        pack.rotary_table(inv_freq.to(device), max_positions, scale, spec.head_dim // 2)
        for inv_freq, scale in spec.rotary(max_positions)
    )
    return Weights(embedding, packed, norm, head, rotary, norm_bias, head_bias, places)
