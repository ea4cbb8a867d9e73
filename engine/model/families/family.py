"""`Family`: how the checkpoints of some architectures become a `ModelSpec` and packed weights.

A family says which parts its models have and what its tensors are called; everything else follows from the spec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.rope import read_rope
from weft.engine.model.spec import ModelSpec

Config = dict[str, Any]
"""a `config.json`"""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in the checkpoint. Those of a layer come behind `layer`, with `.weight` or `.bias` behind them."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"


@dataclass(frozen=True, slots=True)
class Family:
    """architectures: what its configs declare. parts: fields of the spec that it sets in its own way."""

    architectures: tuple[str, ...]
    parts: Callable[[Config], dict[str, Any]]
    names: TensorNames = TensorNames()

    def spec(self, config: Config, eos_token_ids: tuple[int, ...]) -> ModelSpec:
        """Raises `ModelError` for an option that is not supported, `KeyError`, `TypeError` or `ValueError` for a
        config that is malformed.
        """
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ModelError(f"activation {activation!r} is not supported (silu is)")
        if config.get("mlp_bias"):
            raise ModelError("mlp_bias is not supported")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        max_positions = int(config.get("max_position_embeddings") or 2048)
        theta, scaling = read_rope(config, max_positions)
        fields: dict[str, Any] = {
            "architecture": config["architectures"][0],
            "vocab_size": int(config["vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or hidden // heads),
            "max_positions": max_positions,
            "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            "qkv_bias": False,
            "o_bias": False,
            "sliding_window": None,
            "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            "eos_token_ids": eos_token_ids,
        }
        return ModelSpec(**{**fields, **self.parts(config)}).checked()
