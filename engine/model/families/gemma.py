"""Gemma 1, 2 and 3 (text): unit-offset norm weights, scaled embedding; from 2 on windows, post-norms and soft-caps."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import ACTIVATIONS, Config, Family, TensorNames, windowed, windows
from weft.engine.model.parts import Layer, Norm, Placement
from weft.engine.model.rope import Rope, read_rope, unscaled


def _gemma(config: Config) -> dict[str, Any]:
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    return {
        "norm": Norm(float(config["rms_norm_eps"]), unit_offset=True),
        "activation": ACTIVATIONS.get(activation, activation),
        "embedding_scale": int(config["hidden_size"]) ** 0.5,
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return {
        **_gemma(config),
        "placement": Placement.SANDWICH,
        "attention_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": float(config.get("attn_logit_softcapping") or 0.0),
        "logits_softcap": float(config.get("final_logit_softcapping") or 0.0),
        "layers": windowed(config, lambda i: i % 2 == 0),
    }


def _ropes(config: Config) -> tuple[Rope, Rope]:
    """Return the ropes of full layers and of layers with a window."""
    positions = int(config["max_position_embeddings"])
    if config.get("rope_parameters"):
        return tuple(read_rope(config, positions, kind) for kind in ("full_attention", "sliding_attention"))  # type: ignore[return-value]
    full = read_rope(config, positions)
    return full, unscaled(float(config["rope_local_base_freq"]), full)


def _gemma3(config: Config) -> dict[str, Any]:
    every = int(config.get("sliding_window_pattern") or 6)
    layers = tuple(Layer(w, rope=1 if w else 0) for w in windows(config, lambda i: bool((i + 1) % every)))
    return {**_gemma2(config), "qk_norm": "head", "ropes": _ropes(config), "layers": layers}


_DEFAULTS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256}
_POST_NORMS = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    other_prefixes=("language_model.model.", "model.language_model."),
    unused=tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
)
"""The vision part is `model/vision/gemma3.py`'s."""

GEMMA = Family(("GemmaForCausalLM",), _gemma, defaults=_DEFAULTS)
GEMMA2 = Family(
    ("Gemma2ForCausalLM",), _gemma2, _POST_NORMS,
    _DEFAULTS | {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)  # fmt: skip
GEMMA3 = Family(
    ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _gemma3, _POST_NORMS,
    _DEFAULTS | {
        "query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "vocab_size": 262208,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
)  # fmt: skip
