"""Llama 2, 3 and 3.1+; Yi and DeepSeek LLM declare themselves as Llama."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family


def _parts(config: Config) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias}


LLAMA = Family(("LlamaForCausalLM",), _parts)
