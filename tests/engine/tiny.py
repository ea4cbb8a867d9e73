"""Random tiny checkpoints of each supported family, and `transformers` as the oracle for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.25,
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama2": (LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama3.1": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "eos_token_id": [1, 2],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "mistral": (
        MistralConfig,
        MistralForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 256},
    ),
    "yi": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
        },
    ),
    "deepseek-llm": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    ),
}


def save_tiny(family: str, path: Path, **overrides: Any) -> Path:
    """Write a seeded random checkpoint of the family to `path`."""
    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**_BASE, **options, **overrides}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(path, max_shard_size="100KB")
    return path


def reference_tokens(model: Any, prompt: np.ndarray, max_tokens: int) -> list[int]:
    """Greedy continuation by `transformers.generate` in fp32, the end token included."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return [int(t) for t in out[0, len(prompt) :]]
