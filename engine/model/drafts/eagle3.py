"""EAGLE-3 heads (arXiv 2503.01840) that draft, in the plain format and in that of `speculators`.

A head is one decoder layer. It reads a token's embedding and a state, which is projected from the target's residual
stream at three depths (`taps`), or is the head's own stream at the token before.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.errors import ModelError
from weft.engine.model.checkpoint import Checkpoint
from weft.engine.model.directory import read_json
from weft.engine.model.drafts.spec import Target, check_layers
from weft.engine.model.families.llama import LLAMA
from weft.engine.model.families.qwen import QWEN3
from weft.engine.model.finite import FiniteCheck
from weft.engine.model.spec import ModelSpec

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
"""Switches of some heads that change what they compute. A false one changes nothing."""


class Eagle3Weights(NamedTuple):
    """A head's tensors, in the layout of its checkpoint."""

    embedding: Tensor | None  # `[V, H]`; None: the target's.
    fc: Tensor  # `[H, taps * target's H]`
    input_norm: Tensor  # of the embedding
    hidden_norm: Tensor  # of the state
    q: Tensor  # `[Hq * D, 2 H]`, over the normed embedding and the normed state
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor | None  # `[D]`, Qwen 3
    k_norm: Tensor | None
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor
    head: Tensor  # `[draft vocabulary, H]`
    ids: Tensor  # `[draft vocabulary]` int64: the target's token of each draft token
    rotary: Tensor  # `[positions, D / 2, 2]` float32: cosine and sine

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


@dataclass(frozen=True, slots=True)
class Eagle3Head:
    """See `DraftSpec`."""

    path: Path
    layer: ModelSpec
    taps: tuple[int, ...]  # The target's layers whose input is read.
    tapped_size: int  # Columns of the target's stream.
    vocabulary: int  # Draft tokens.
    target_vocabulary: int
    norm_before_residual: bool

    def load(self, dtype: torch.dtype, max_positions: int, device: torch.device) -> Eagle3Weights:
        with ExitStack() as stack:
            read = _Reader(self, Checkpoint(self.path, stack), dtype).weights(max_positions)
        return Eagle3Weights._make(None if tensor is None else tensor.to(device) for tensor in read)


def read_eagle3(path: Path, target: Target) -> Eagle3Head:
    """Read a head's `config.json`. Raises `ModelError`, one line, if it does not fit the target; `KeyError`
    or one of `WRONG_KIND` if it is malformed."""
    config = read_json(path / "config.json")
    named = (config.get("architectures") or ["(none)"])[0]
    if config.get("speculators_model_type", "eagle3") != "eagle3" or (
        not {"speculators_model_type", "draft_vocab_size"} & config.keys() and named not in ARCHITECTURES
    ):
        raise ModelError(f"{path}: {config.get('speculators_model_type') or named} is not an EAGLE-3 head")
    if asked := next((name for name in UNSUPPORTED if config.get(name)), None):
        raise ModelError(f"{path}: {asked} is not supported")
    own: dict[str, Any] = {**config, **(config.get("transformer_layer_config") or {})}
    if int(own["num_hidden_layers"]) != 1:
        raise ModelError(f"{path}: it has {own['num_hidden_layers']} layers; heads of one layer are supported")
    family, name = (QWEN3, "Qwen3ForCausalLM") if own.get("model_type") == "qwen3" else (LLAMA, "LlamaForCausalLM")
    layer = family.spec({key: value for key, value in own.items() if value is not None} | {"architectures": [name]})
    check_layers(path, layer)
    if layer.ropes[0].dim(layer.head_dim) != layer.head_dim or layer.ropes[0].interleaved:
        raise ModelError(f"{path}: heads that rotate parts or neighbours of their columns are not supported")
    if layer.qkv_bias or layer.o_bias or layer.mlp_bias or layer.activation != "silu":
        raise ModelError(f"{path}: heads with biases, or with another activation than silu, are not supported")
    if layer.vocab_size != target.spec.vocab_size:
        raise ModelError(
            f"{path}: it drafts for a vocabulary of {layer.vocab_size} tokens, the model has {target.spec.vocab_size}"
        )
    width = int(config.get("target_hidden_size") or layer.hidden_size)
    if width != target.spec.hidden_size:
        raise ModelError(f"{path}: it reads states of {width} values, the model has {target.spec.hidden_size}")
    return Eagle3Head(
        path, layer, _taps(path, config, target.spec.num_layers), width,
        int(config.get("draft_vocab_size") or layer.vocab_size), target.spec.vocab_size,
        bool(config.get("norm_before_residual", False)),
    )  # fmt: skip


def _taps(path: Path, config: dict[str, Any], layers: int) -> tuple[int, ...]:
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise ModelError(f"{path}: use_aux_hidden_state false is not supported")
    given = eagle.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(int(i) for i in given or (2, layers // 2, layers - 3))
    if len(set(taps)) != 3 or len(taps) != 3 or not all(0 <= tap < layers for tap in taps):
        raise ModelError(f"{path}: it reads the inputs of layers {list(taps)}, but the model has {layers} layers")
    return taps


class _Reader:
    """Reads the tensors of a head, each checked: its shape at once, its values at the end."""

    def __init__(self, spec: Eagle3Head, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._spec, self._checkpoint, self._dtype = spec, checkpoint, dtype
        self._finite = FiniteCheck()
        self._layer = "midlayer" if "midlayer.hidden_norm.weight" in checkpoint else "layers.0"

    def _get(self, name: str, *shape: int) -> Tensor:
        stored = self._checkpoint(name, shape)
        # A copy, because the checkpoint's tensor is the mapped file.
        tensor = stored.raw.to(self._dtype, copy=True).contiguous()
        self._finite.add(name, tensor)
        return tensor

    def _own(self, name: str, *shape: int) -> Tensor:
        return self._get(f"{self._layer}.{name}.weight", *shape)

    def weights(self, max_positions: int) -> Eagle3Weights:
        spec, layer = self._spec, self._spec.layer
        hidden, inner, head_dim = layer.hidden_size, layer.intermediate_size, layer.head_dim
        queries, keys = layer.num_heads * head_dim, layer.num_kv_heads * head_dim
        embedding, rows = None, layer.vocab_size
        if "embed_tokens.weight" in self._checkpoint:
            embedding = self._get("embed_tokens.weight", rows, hidden)
        elif hidden != spec.tapped_size:
            raise ModelError(f"{spec.path} has no tensor embed_tokens.weight, and the model's has other columns")
        heads = {name: self._own(f"self_attn.{name}", head_dim) for name in ("q_norm", "k_norm") if layer.qk_norm}
        (freq, scale), *_ = layer.rotary(max_positions)
        angles = torch.outer(torch.arange(max_positions).float(), freq.float())
        read = Eagle3Weights(
            embedding=embedding,
            fc=self._get("fc.weight", hidden, len(spec.taps) * spec.tapped_size),
            input_norm=self._own("input_layernorm", hidden),
            hidden_norm=self._own("hidden_norm", hidden),
            q=self._own("self_attn.q_proj", queries, 2 * hidden),
            k=self._own("self_attn.k_proj", keys, 2 * hidden),
            v=self._own("self_attn.v_proj", keys, 2 * hidden),
            o=self._own("self_attn.o_proj", hidden, queries),
            q_norm=heads.get("q_norm"),
            k_norm=heads.get("k_norm"),
            post_norm=self._own("post_attention_layernorm", hidden),
            gate=self._own("mlp.gate_proj", inner, hidden),
            up=self._own("mlp.up_proj", inner, hidden),
            down=self._own("mlp.down_proj", hidden, inner),
            norm=self._get("norm.weight", hidden),
            head=self._get("lm_head.weight", spec.vocabulary, hidden),
            ids=self._ids(),
            rotary=torch.stack((angles.cos(), angles.sin()), -1) * scale,
        )
        self._finite.end(self._dtype)
        return read

    def _ids(self) -> Tensor:
        """Return the target's token of each draft token. Raises `ModelError`."""
        spec = self._spec
        own = torch.arange(spec.vocabulary)
        if "d2t" not in self._checkpoint:
            if spec.vocabulary != spec.target_vocabulary:
                raise ModelError(f"{spec.path} has no tensor d2t, which a smaller draft vocabulary requires")
            return own
        ids = own + self._checkpoint("d2t", (spec.vocabulary,)).raw.long()
        if not bool(((ids >= 0) & (ids < spec.target_vocabulary)).all()):
            raise ModelError(
                f"{spec.path}: d2t names tokens outside the model's vocabulary of {spec.target_vocabulary}"
            )
        return ids
