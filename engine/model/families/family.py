"""`Family`: maps the checkpoints of some architectures to a `ModelSpec` and packed weights.

A family defines the parts of its models and the names of their tensors; everything else follows from the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.engine.errors import ModelError, UnknownArchitecture
from weft.engine.model.parts import Layer, Norm
from weft.engine.model.quantization import read_integers, read_quantization
from weft.engine.model.rope import read_rope
from weft.engine.model.spec import ModelSpec

Config = dict[str, Any]  # A `config.json`.

ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names in a `config.json` that differ from those of `kernels.reference.layer.ACTIVATIONS`."""


@dataclass(frozen=True, slots=True)
class StateNames:
    """Names of a recurrence's tensors in a layer."""

    inputs: tuple[tuple[str, str], ...]
    """Modules that project the stream, and the sections of `Recurrence` in each, in the order of its rows."""
    conv: str
    out: str
    norm: str = ""  # Weight of the norm of the output.
    a_log: str = ""
    time_bias: str = ""
    skip: str = ""  # Factor of a mamba2's input in its output.
    by_key_head: bool = False  # Rows of a module are ordered by key head, then by section.


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names in the checkpoint. Those of a layer are prefixed with `layer` and end in `.weight` or `.bias`."""

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}."
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""  # Fused q, k and v; "": separate.
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""  # Fused gate, then up; "": separate.
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
    """All experts stacked, gate rows, then up rows; "": separate. Checkpoints with `expert_down` are read as well."""
    experts_down: str = ""
    experts_alternate: bool = False
    """Stacked tensors are `[experts, in, out]` with alternating gate and up, or MXFP4 blocks."""
    experts_turned: bool = False
    """Stacked tensors are `[experts, in, out]` unless their shape is that of `[experts, out, in]`."""
    shared_gate: str = "mlp.shared_expert.gate_proj"
    shared_up: str = "mlp.shared_expert.up_proj"
    shared_gate_up: str = ""
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_switch: str = "mlp.shared_expert_gate"
    state: StateNames | None = None
    query_down: str = "self_attn.q_a_proj"  # This and the next ones belong to latent attention.
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    transposed: bool = False  # Matrices are `[in, out]`.
    prefix: str = "model."
    other_prefixes: tuple[str, ...] = ()  # Prefixes of some checkpoints instead of `prefix`.
    draft_layers: int = 0  # Layers after the last one that predict further tokens (see `drafts.mtp`).
    harmless: tuple[str, ...] = ()  # Endings of checkpoint names that are not needed.
    unused: tuple[str, ...] = ()  # Beginnings of checkpoint names that are not needed.


def windows(config: Config, sliding: Callable[[int], bool] = lambda _: True) -> list[int | None]:
    """Return the window of each layer, by `layer_types` or else by `sliding`. Raises `ModelError`."""
    types = config.get("layer_types")
    if types and (unknown := set(types) - {"sliding_attention", "full_attention"}):
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    number = int(config["num_hidden_layers"])
    which = [t == "sliding_attention" for t in types] if types else [sliding(i) for i in range(number)]
    window = config.get("sliding_window")
    return [int(window) if here and window else None for here in which]


def windowed(config: Config, sliding: Callable[[int], bool] = lambda _: True) -> tuple[Layer, ...]:
    """Return layers that differ only in their windows."""
    return tuple(Layer(window) for window in windows(config, sliding))


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A family's configuration and tensor names."""

    architectures: tuple[str, ...]  # The `architectures` of its configs.
    parts: Callable[[Config], dict[str, Any]] = lambda _config: {}
    """Returns the fields of the spec that differ from the common ones."""
    names: TensorNames = TensorNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # Values of missing keys.
    keys: Mapping[str, str] = field(default_factory=dict)  # Llama's config key -> this family's key.
    quantizations: tuple[str, ...] = ()  # `quant_method`s whose matrices are unpacked while loading.
    languages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """If not empty: the `model_type`s that a `text_config` may have, and the values of its missing keys."""

    def spec(self, config: Config) -> ModelSpec:
        """Read a config, except its end tokens. Raises `ModelError` for an unsupported option;
        `KeyError` or one of `directory.WRONG_KIND` for a malformed config."""
        architecture = config["architectures"][0]
        text = config.get("text_config") or {}  # of a multimodal model
        kind = str(text.get("model_type"))
        if self.languages and kind not in self.languages:
            raise UnknownArchitecture(f"{architecture} with a language model of type {kind} is not supported")
        config = {**self.defaults, **self.languages.get(kind, {}), **config, **text}
        config |= {here: config[there] for here, there in self.keys.items() if config.get(there) is not None}
        quantization = config.get("quantization_config")
        if quantization and not isinstance(quantization, dict):
            raise ModelError("config.json: its quantization_config is not an object")
        if quantization and quantization.get("quant_method") in self.quantizations:
            quantization = None
        integers = read_integers(quantization) if quantization else None
        if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
            raise ModelError("its tokens also attend to later ones: weft serves only decoders")
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        max_positions = int(config.get("max_position_embeddings") or 2048)
        activation = config.get("hidden_act") or "silu"
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        config["dtype"] = str(dtype).removeprefix("torch.")
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
            "dtype": config["dtype"],
            "quantization": None if integers or not quantization else read_quantization(quantization),
            "integers": integers,
        }
        parts = self.parts(config)
        if "ropes" not in parts:
            parts["ropes"] = (read_rope(config, max_positions),)
        return ModelSpec(**{**fields, **parts}).checked()
