"""Random tiny checkpoints of every architecture that `transformers` generates text with, by its `model_type`."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

_LAYERS = 4
COMMON: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), 199),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "emb_dim"), 64),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), _LAYERS
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_attention_groups", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "n_inner", "ffn_hidden_size"), 96
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
            "expert_dim",
            "intermediate_size_mlp",
        ),
        40,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 256),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv", "swa_head_dim", "swa_v_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "mla_kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 24),
    **dict.fromkeys(("attention_chunk_size",), 128),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), 1),
    **dict.fromkeys(("pad_token_id",), 2),
    **dict.fromkeys(("initializer_range", "init_std"), 0.25),
    **dict.fromkeys(("is_decoder",), True),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "tie_word_embeddings"), False),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("type_vocab_size",), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "index_head_dim"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "index_topk"), 8),
    **dict.fromkeys(("mamba_d_ssm",), 128),
    **dict.fromkeys(("index_n_heads",), 16),
    **dict.fromkeys(("sliding_window_size", "rel_extent"), 24),
}
"""value of every configuration field with such a name"""

_ALTERNATING = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_HYBRID = ["linear_attention", "full_attention"] * (_LAYERS // 2)

OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": _ALTERNATING},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": _ROPE,
    },
    "fuyu": {"text_config": "persimmon"},
    "gemma3": {"vision_config": _VISION},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _ALTERNATING},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _ALTERNATING, "global_head_dim": 32},
    "gemma4_unified": {
        "vision_config": {"patch_size": 8, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32}
    },
    "granitemoehybrid": {"layer_types": _HYBRID},
    "got_ocr2": {"text_config": "qwen2"},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _HYBRID},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "longcat_flash": {"zero_expert_num": 2},
    "moshi": {"audio_vocab_size": 199, "ffn_dim": 96, "num_codebooks": 2, "sliding_window": 256},
    "moss_transcribe_diarize": {"text_config": "qwen3"},
    "nemotron_h": {"layer_types": ["linear_attention", "full_attention", "linear_attention", "moe"], "n_groups": 2},
    "olmo_hybrid": {"layer_types": _HYBRID},
    "phimoe": {"sliding_window": 256},
    **{kind: {"layer_types": _HYBRID} for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    **{kind: {"text_config": {"layer_types": _HYBRID}} for kind in ("qwen3_5", "qwen3_5_moe")},
    "roc_bert": {"eos_token_id": 198},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}
"""by `model_type`; for a nested configuration, a dictionary, or its `model_type`"""

SCALE = {"hrm_text": 0.1}
"""scale of random matrices, for a model whose many layers amplify rounding"""


def tiny_config(kind: str) -> Any:
    """A configuration of `model_type` kind. Raises the error of `transformers` if it is invalid."""
    return _tiny(CONFIG_MAPPING[kind], OWN.get(kind, {}))


def _tiny(cls: Any, own: dict[str, Any]) -> Any:
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    given = {k: v for k, v in COMMON.items() if k in fields}
    if "qk_rope_head_dim" in fields:
        given.pop("head_dim", None)  # latent attention has another name for this size
        if "num_key_value_heads" in fields:
            given["num_key_value_heads"] = given["num_attention_heads"]
        if "head_dim" in fields:
            given["head_dim"] = given["qk_rope_head_dim"]
    for name, sub in getattr(cls, "sub_configs", {}).items():
        if name not in own and isinstance(sub, type) and "Auto" not in sub.__name__:
            given[name] = _tiny(sub, {}).to_dict()
    for name, value in own.items():
        sub = getattr(cls, "sub_configs", {}).get(name)
        if isinstance(value, str) and sub is not None:
            value = tiny_config(value).to_dict()
        elif isinstance(value, dict) and sub is not None and "Auto" not in sub.__name__:
            value = _tiny(sub, value).to_dict()
        given[name] = value
    return cls(**copy.deepcopy(given))


def make_architecture(kind: str) -> Any:
    """A seeded random model, in float32, whose tokens vary."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.float32)
    tied = model.get_output_embeddings()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or "inv_freq" in name or tensor.numel() < 2:
                continue
            if tensor.ndim == 1:
                if name.endswith("bias") or "sink" in name:
                    tensor.normal_(0, 0.1)
                # Norms that add one to their weight have zeros.
                elif ("norm" in name.lower() or "ln" in name) and float(tensor.abs().max()) > 0:
                    tensor.uniform_(0.5, 1.5)
            elif tensor.ndim >= 2 and "position" not in name.lower():
                scale = 0.5 if tied is not None and tensor is tied.weight else SCALE.get(kind, 0.25)
                tensor.normal_(0, scale)
    return model.eval()


def save_architecture(kind: str, path: Path) -> Path:
    """Write a seeded random checkpoint to `path`."""
    model = make_architecture(kind)
    model.save_pretrained(path)
    if model.config.model_type not in CLASSES:  # the text part of a multimodal model: known by the whole
        whole = tiny_config(kind)
        whole.architectures = [CLASSES[kind]]
        whole.save_pretrained(path)
    return path


__all__ = ["CLASSES", "make_architecture", "save_architecture", "tiny_config"]
