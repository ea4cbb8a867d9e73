"""Random tiny checkpoints of each supported family, and `transformers` as the oracle for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

_BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.25,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_PHI_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 48}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3.1": (
        "Llama",
        {
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
            "eos_token_id": [1, 2],
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 24}),
    "yi": (
        "Llama",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
        },
    ),
    "deepseek-llm": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen2-moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}),
    "qwen3-moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 24,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 48, "attn_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 16, "sliding_window": 24, "layer_types": [_SLIDING, _SLIDING, _FULL], "rope_parameters": _LOCAL},
    ),
    "phi": ("Phi", {"num_key_value_heads": 4}),
    "phi3": ("Phi3", {"sliding_window": 24}),
    "phi4": ("Phi3", {"rope_parameters": _PHI_LONG}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.75, "attention_multiplier": 0.2, "logits_scaling": 4.0},
    ),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "glm4-9b": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": [_LINEAR, _FULL, _LINEAR],
            "position_embedding_type": "rope",
            "residual_multiplier": 0.75,
            "attention_multiplier": 0.2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_d_head": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "num_hidden_layers": 5,
            "layers_block_type": [_LINEAR, "mlp", _FULL, "moe", _LINEAR],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 48,
        },
    ),
    "qwen3.5": ("Qwen3_5Text", _DELTA),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**_DELTA, **_SHARED}),
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_SHARED, "mlp_only_layers": [1]}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", _FULL, "conv"], "block_multiple_of": 16, "conv_bias": True}),
    "lfm2-moe": (
        "Lfm2Moe",
        {**_EXPERTS, "layer_types": ["conv", _FULL, "conv"], "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**_LATENT, "q_lora_rank": 20, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**_LATENT, "q_lora_rank": 20, "rope_interleave": False}),
    "starcoder2": ("Starcoder2", {"sliding_window": 24}),
    "opt": ("OPT", {"ffn_dim": 112, "word_embed_proj_dim": 64, "init_std": 0.25}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}),
}

_SMALL_EMBEDDING = (
    "Gemma", "Gemma2", "Gemma3Text", "Olmo2", "Granite", "GraniteMoe", "Starcoder2", "GraniteMoeHybrid", "NemotronH",
    "Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next", "Lfm2", "Lfm2Moe", "DeepseekV2", "DeepseekV3", "Glm4MoeLite",
)  # fmt: skip
_MODELS = {
    "Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}  # fmt: skip
LATENT = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite")
"""families with latent attention"""
RECURRENT = ("granite-hybrid", "nemotron-h", "qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "lfm2-moe")
"""families with recurrent states"""


def make_tiny(family: str, **overrides: Any) -> Any:
    """A seeded random model of the family, as `transformers` has it, in float32."""
    name, options = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, _MODELS.get(name, f"{name}ForCausalLM"))
    base = {k: v for k, v in _BASE.items() if k not in ("intermediate_size", "num_key_value_heads")}
    torch.manual_seed(7)
    model = model_class(config_class(**{**(base if name in ("OPT", "GPT2") else _BASE), **options, **overrides}))
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("bias") and b.is_floating_point()]
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *biases]:
            if "norm" in tensor_name.rsplit(".", 2)[-2] or "ln_" in tensor_name:
                if tensor_name.endswith("bias"):
                    tensor.normal_(0, 0.1)
                else:
                    tensor.uniform_(0.5, 1.5)
            elif tensor_name.endswith(("bias", "sinks")):
                tensor.normal_(0, 0.1)
            elif "embed_tokens" in tensor_name and name in _SMALL_EMBEDDING:
                tensor.normal_(0, 0.02)  # otherwise a token's own row outweighs what the layers add
            elif tensor_name.endswith("A_log"):
                tensor.uniform_(-2, 1)
            elif "conv" in tensor_name and tensor.ndim == 3:
                tensor.normal_(0, 0.4)
            elif "experts" in tensor_name or "embed_positions" in tensor_name or "wpe" in tensor_name:
                tensor.normal_(0, 0.25)
    return model.eval()


def save_tiny(family: str, path: Path, **overrides: Any) -> Path:
    """Write a seeded random checkpoint of the family to `path`."""
    make_tiny(family, **overrides).save_pretrained(path, max_shard_size="100KB")
    return path


def reference_tokens(model: Any, prompt: np.ndarray, max_tokens: int) -> list[int]:
    """Greedy continuation by `transformers.generate` in fp32, the end token included."""
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return [int(t) for t in out[0, len(prompt) :]]
