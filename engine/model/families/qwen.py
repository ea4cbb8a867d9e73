"""Qwen2 and Qwen2.5 (biases on q, k and v), Qwen3 (norms over the heads of q and k instead)."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family


def _window(config: Config) -> int | None:
    """Only where the config switches it on: most checkpoints carry a length that they do not use."""
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _qwen2(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _window(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        "head_dim": int(config.get("head_dim") or 128),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "sliding_window": _window(config),
    }


QWEN2 = Family(("Qwen2ForCausalLM",), _qwen2)
QWEN3 = Family(("Qwen3ForCausalLM",), _qwen3)
