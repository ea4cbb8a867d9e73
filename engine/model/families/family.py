"""`Family`: how the checkpoints of some architectures become a `ModelSpec` and packed weights.

A family says which parts its models have and what its tensors are called; everything else follows from the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.integer_config import read_integers
from weft.engine.model.parts import Layer, Norm
from weft.engine.model.quantization import read_quantization
from weft.engine.model.rope import read_rope
from weft.engine.model.spec import ModelSpec

Config = dict[str, Any]
"""a `config.json`"""

ACTIVATIONS = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""names in a `config.json` that are not those of `kernels.reference.ACTIVATIONS`"""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in the checkpoint. Those of a layer come behind `layer`, with `.weight` or `.bias` behind them."""

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    """q, k and v in one tensor; "": they lie apart"""
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    """gate, then up in one tensor; "": they lie apart"""
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = "post_feedforward_layernorm"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    expert_gate: str = "mlp.experts.{}.gate_proj"
    expert_up: str = "mlp.experts.{}.up_proj"
    expert_down: str = "mlp.experts.{}.down_proj"
    experts_gate_up: str = ""
    """of all experts in one tensor, gate rows, then up rows; "": they lie apart. Checkpoints that have
    `expert_down` instead are read as well"""
    experts_down: str = ""
    experts_alternate: bool = False
    """those tensors are `[experts, in, out]`, gate and up alternate; or they are MXFP4 blocks"""
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_gate_up: str = ""
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_switch: str = "mlp.shared_expert_gate"
    transposed: bool = False
    """matrices are `[in, out]`"""
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()
    """that some checkpoints have in its place"""
    draft_layers: int = 0
    """layers behind the last that predict further tokens; they are left out"""
    harmless: tuple[str, ...] = ()
    """ends of names that checkpoints carry and nobody needs"""


def windows(config: Config, sliding: Callable[[int], bool] = lambda _: True) -> list[int | None]:
    """The window of each layer: `layer_types` says which have one, or else `sliding`. Raises `ModelError`."""
    types = config.get("layer_types")
    if types and (unknown := set(types) - {"sliding_attention", "full_attention"}):
        raise ModelError(f"layers of the type {', '.join(sorted(unknown))} are not supported")
    number = int(config["num_hidden_layers"])
    which = [t == "sliding_attention" for t in types] if types else [sliding(i) for i in range(number)]
    window = config.get("sliding_window")
    return [int(window) if here and window else None for here in which]


def windowed(config: Config, sliding: Callable[[int], bool] = lambda _: True) -> tuple[Layer, ...]:
    """Layers that differ in their windows alone."""
    return tuple(Layer(window) for window in windows(config, sliding))


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """How a family reads its configs and names its tensors."""

    architectures: tuple[str, ...]
    """what its configs declare"""
    parts: Callable[[Config], dict[str, Any]]
    """fields of the spec that it sets in its own way"""
    names: TensorNames = TensorNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """what a config means that lacks a key"""
    keys: Mapping[str, str] = field(default_factory=dict)
    """its own names of keys: what Llama's config calls it -> what it does"""
    quantizations: tuple[str, ...] = ()
    """`quant_method`s of checkpoints that are unpacked when loading"""

    def spec(self, config: Config, eos_token_ids: tuple[int, ...]) -> ModelSpec:
        """Raises `ModelError` for an option that is not supported, `KeyError`, `TypeError` or `ValueError` for a
        config that is malformed.
        """
        architecture = config["architectures"][0]
        # of a model for text and images
        config = {**self.defaults, **config, **(config.get("text_config") or {})}
        config |= {here: config[there] for here, there in self.keys.items() if config.get(there) is not None}
        quantization = config.get("quantization_config")
        if quantization and not isinstance(quantization, dict):
            raise ModelError("config.json: its quantization_config is no object")
        if quantization and quantization.get("quant_method") in self.quantizations:
            quantization = None
        integers = read_integers(quantization) if quantization else None
        if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
            raise ModelError("its tokens attend to those behind them too: weft serves decoders alone")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        max_positions = int(config.get("max_position_embeddings") or 2048)
        activation = config.get("hidden_act") or "silu"
        fields: dict[str, Any] = {
            "architecture": architecture,
            "vocab_size": int(config["vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or hidden // heads),
            "max_positions": max_positions,
            "norm": Norm(float(config.get("rms_norm_eps", 1e-6))),
            "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
            "qkv_bias": bool(config.get("attention_bias", False)),
            "o_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "activation": ACTIVATIONS.get(activation, activation),
            "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            "eos_token_ids": eos_token_ids,
            "quantization": None if integers or not quantization else read_quantization(quantization),
            "integers": integers,
        }
        parts = self.parts(config)
        if "ropes" not in parts:
            parts["ropes"] = (read_rope(config, max_positions),)
        return ModelSpec(**{**fields, **parts}).checked()
