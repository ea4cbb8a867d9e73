"""Qwen2 and Qwen2.5 (biases on q, k and v), Qwen3 (norms over the heads of q and k instead); both with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine.model.families.family import Config, Family, TensorNames, windowed
from weft.engine.model.parts import Experts, Layer


def _layers(config: Config) -> tuple[Layer, ...]:
    """Return layers, with windows only if enabled: most configs contain an unused window length."""
    if not config.get("use_sliding_window"):
        config = {**config, "sliding_window": None}
    first = int(config.get("max_window_layers") or 0)
    return windowed(config, lambda i: i >= first)


def _qwen3(config: Config) -> dict[str, Any]:
    return {"head_dim": int(config.get("head_dim") or 128), "qk_norm": "head", "layers": _layers(config)}


def _experts(config: Config, **parts: Any) -> dict[str, Any]:
    """Return layers and experts, on every layer except those that the config excludes."""
    dense, step = config.get("mlp_only_layers") or [], int(config.get("decoder_sparse_step") or 1)
    layers = tuple(
        replace(layer, experts=i not in dense and (i + 1) % step == 0) for i, layer in enumerate(_layers(config))
    )
    experts = Experts(
        count=int(config["num_experts"]),
        top=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        normalise=bool(config.get("norm_topk_prob", False)),
        **parts,
    )
    return {"layers": layers, "experts": experts}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    size = int(config.get("shared_expert_intermediate_size") or 5632)
    bias = bool(config.get("qkv_bias", True))
    return {"qkv_bias": bias, "o_bias": False, **_experts(config, shared_size=size, shared_gate=True)}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return {**_qwen3(config), "head_dim": head_dim, **_experts(config)}


def _qwen3_vl_moe(config: Config) -> dict[str, Any]:
    return _qwen3_moe({"mlp_only_layers": [], **config, "norm_topk_prob": True})


def _qwen_vl(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "o_bias": False, "layers": _layers(config)}


_KEYS = {"num_experts": "num_local_experts"}

_VISUAL = TensorNames(
    other_prefixes=("model.language_model.", "language_model.model."), unused=("visual.", "model.visual.")
)

QWEN2 = Family(("Qwen2ForCausalLM",), lambda config: {"qkv_bias": True, "o_bias": False, "layers": _layers(config)})
QWEN2_VL = Family(
    ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"), _qwen_vl, _VISUAL,
    {"rms_norm_eps": 1e-5},
)  # fmt: skip
"""Vision-language models (`model/vision/qwen_vl.py`)."""
QWEN3_VL = Family(("Qwen3VLForConditionalGeneration",), _qwen3, _VISUAL)
QWEN3_VL_MOE = Family(
    ("Qwen3VLMoeForConditionalGeneration",),
    _qwen3_vl_moe,
    replace(
        _VISUAL, experts_gate_up="mlp.experts.gate_up_proj", experts_down="mlp.experts.down_proj",
        experts_turned=True,
    ),
    {"norm_topk_prob": True},
    _KEYS,
)  # fmt: skip
QWEN3 = Family(("Qwen3ForCausalLM",), _qwen3)
QWEN2_MOE = Family(("Qwen2MoeForCausalLM",), _qwen2_moe, keys=_KEYS)
QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), _qwen3_moe, keys=_KEYS)
