"""Mistral: Llama's layer under a sliding window. weft serves contexts up to the window, where both are the same."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family


def _parts(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "sliding_window": config.get("sliding_window")}


MISTRAL = Family(("MistralForCausalLM",), _parts)
