"""Weights of a model: read from safetensors shards (or made up, for `--load-format dummy`), packed for the kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.spec import ModelSpec
from weft.engine.progress import Progress
from weft.kernels import pack

LOADING = "loading layers"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, in the layout of `kernels.pack`. Norms are folded into qkv and gate_up."""

    qkv: Tensor
    """[(Hq + 2 Hkv) D, H]"""
    qkv_bias: Tensor | None
    o: Tensor
    """[H, Hq D]"""
    o_bias: Tensor | None
    gate_up: Tensor
    """[2 I, H], rows alternate"""
    down: Tensor
    """[H, I]"""


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


class TensorSource(Protocol):
    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


class _Checkpoint:
    """Named tensors of a directory of safetensors files, each checked against the shape the config promises."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        try:
            if index.exists():
                self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            elif single.exists():
                with safe_open(single, "pt") as f:
                    self._files = dict.fromkeys(f.keys(), single.name)
            else:
                raise ModelError(f"{path} has no model.safetensors and no model.safetensors.index.json")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"cannot read the weights in {path}: {error}") from None
        missing = sorted({f for f in self._files.values() if not (path / f).is_file()})
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} shard(s) that its index names: {', '.join(missing[:3])}")
        self._path, self._stack = path, stack
        self._open: dict[str, safe_open] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self._path} has no tensor {name}")
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._path / file, "pt"))
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {name} from {self._path / file}: {error}") from None
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, config.json asks for {shape}")
        return tensor


class _Dummy:
    """Seeded random tensors: matrices of the scale a trained model has, norms near one."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        t = torch.empty(shape, dtype=torch.float32, device=self._generator.device)
        if len(shape) == 1 and not name.endswith("bias"):
            return t.uniform_(0.9, 1.1, generator=self._generator)
        return t.normal_(0.0, 0.02, generator=self._generator)


def _layer(get: TensorSource, spec: ModelSpec, i: int) -> LayerWeights:
    h, d, inter = spec.hidden_size, spec.head_dim, spec.intermediate_size
    hq, hkv = spec.num_heads * d, spec.num_kv_heads * d
    p = f"model.layers.{i}."
    q = pack.interleave_rotary(get(p + "self_attn.q_proj.weight", (hq, h)), d)
    k = pack.interleave_rotary(get(p + "self_attn.k_proj.weight", (hkv, h)), d)
    v = get(p + "self_attn.v_proj.weight", (hkv, h))
    input_norm = get(p + "input_layernorm.weight", (h,))
    qkv_bias = o_bias = None
    if spec.attention_bias:
        qb = pack.interleave_rotary(get(p + "self_attn.q_proj.bias", (hq,)), d)
        kb = pack.interleave_rotary(get(p + "self_attn.k_proj.bias", (hkv,)), d)
        qkv_bias = torch.cat((qb, kb, get(p + "self_attn.v_proj.bias", (hkv,))))
        o_bias = get(p + "self_attn.o_proj.bias", (h,))
    gate, up = get(p + "mlp.gate_proj.weight", (inter, h)), get(p + "mlp.up_proj.weight", (inter, h))
    mlp_norm = get(p + "post_attention_layernorm.weight", (h,))
    return LayerWeights(
        qkv=pack.fold_norm(torch.cat((q, k, v)), input_norm),
        qkv_bias=qkv_bias,
        o=get(p + "self_attn.o_proj.weight", (h, hq)),
        o_bias=o_bias,
        gate_up=pack.fold_norm(pack.interleave_gate_up(gate, up), mlp_norm),
        down=get(p + "mlp.down_proj.weight", (h, inter)),
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

    Raises `ModelError` for a missing shard or tensor and for a shape that does not fit the config.
    """

    if progress is not None:
        progress(LOADING, 0, spec.num_layers)
    with ExitStack() as stack:
        source: TensorSource
        if dummy_seed is not None:
            source, tied = _Dummy(dummy_seed, device), spec.tie_embeddings
        else:
            source = checkpoint = _Checkpoint(path, stack)
            # Some checkpoints say "untied" and ship no lm_head: the file decides.
            tied = spec.tie_embeddings or "lm_head.weight" not in checkpoint

        def get(name: str, shape: tuple[int, ...]) -> Tensor:
            # To the serving dtype first: folding a norm must round once, in that dtype.
            return source(name, shape).to(device=device, dtype=dtype).contiguous()

        embedding = get("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))

        def layers() -> Iterator[LayerWeights]:
            for i in range(spec.num_layers):
                yield _layer(get, spec, i)
                if progress is not None:
                    progress(LOADING, i + 1, spec.num_layers)

        packed = tuple(layers())
        norm = get("model.norm.weight", (spec.hidden_size,))
        head = embedding if tied else get("lm_head.weight", (spec.vocab_size, spec.hidden_size))
    inv_freq, scale = spec.inv_freq()
    rotary = pack.rotary_table(inv_freq.to(device), max_positions, scale)
    return Weights(embedding=embedding, layers=packed, norm=norm, lm_head=head, rotary=rotary)
