"""LFM2: short convolutions between two gates, and a few layers of attention; also with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Config, Family, StateNames, TensorNames
from weft.engine.model.parts import Experts, Layer, Norm, Recurrence


def _lfm2(config: Config) -> dict[str, Any]:
    number, attention = int(config["num_hidden_layers"]), config.get("full_attn_idxs")
    types = config.get("layer_types") or [
        "full_attention" if attention is None or i in attention else "conv" for i in range(number)
    ]
    if unknown := set(types) - {"conv", "full_attention"}:
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    own = Recurrence(
        "short_conv",
        heads=int(config["hidden_size"]),
        taps=int(config["conv_L_cache"]),
        conv_bias=bool(config["conv_bias"]),
        bias=bool(config["conv_bias"]),
        conv_dtype=config["dtype"],
    )
    attends, recurs = Layer(), Layer(attention=False, state=own.state)
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    return {
        "norm": Norm(float(config["norm_eps"])),
        "qk_norm": "head",
        "tie_embeddings": bool(tied),
        "layers": tuple(attends if of == "full_attention" else recurs for of in types[:number]),
        "recurrence": own if "conv" in types[:number] else None,
    }


def _dense(config: Config) -> dict[str, Any]:
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if config["block_auto_adjust_ff_dim"]:
        size = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
        multiple = int(config["block_multiple_of"])
        size = multiple * -(-size // multiple)
    return {**_lfm2(config), "intermediate_size": size}


def _moe(config: Config) -> dict[str, Any]:
    parts, dense = _lfm2(config), int(config["num_dense_layers"])
    experts = Experts(
        count=int(config["num_experts"]),
        top=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        router="sigmoid",
        normalise=bool(config["norm_topk_prob"]),
        scaling=float(config["routed_scaling_factor"]),
        choice_bias=bool(config["use_expert_bias"]),
        weight_eps=1e-6,
    )
    layers = tuple(replace(layer, experts=i >= dense) for i, layer in enumerate(parts["layers"]))
    return {**parts, "layers": layers, "experts": experts}


_DEFAULTS = {
    "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True,
    "max_position_embeddings": 128000,
}  # fmt: skip
_NAMES = TensorNames(
    norm="model.embedding_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    expert_gate="feed_forward.experts.{}.w1",
    expert_up="feed_forward.experts.{}.w3",
    expert_down="feed_forward.experts.{}.w2",
    experts_gate_up="feed_forward.experts.gate_up_proj",
    experts_down="feed_forward.experts.down_proj",
    state=StateNames((("conv.in_proj", "BCx"),), conv="conv.conv", out="conv.out_proj"),
)

LFM2 = Family(
    ("Lfm2ForCausalLM",),
    _dense,
    _NAMES,
    {
        **_DEFAULTS,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
)
LFM2_MOE = Family(
    ("Lfm2MoeForCausalLM",),
    _moe,
    _NAMES,
    {**_DEFAULTS, "num_dense_layers": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
)
