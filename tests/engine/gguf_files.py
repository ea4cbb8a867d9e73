"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes those of real ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

Kind = gguf.GGMLQuantizationType
PERMUTED = ("llama", "granite", "smollm3")
"""architectures whose q and k are stored with neighbour pairs"""
GEMMA = ("gemma", "gemma2", "gemma3")


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, in float32."""
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return {name: t.float().numpy() for name, t in found.items()}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The halves of each head's rotary pairs become neighbours."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def ggml_tensors(path: Path, arch: str) -> dict[str, np.ndarray]:
    """The tensors by their names in the file."""
    config = AutoConfig.from_pretrained(path)
    which = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(which, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors_of(path).items():
        value = tensor
        if arch in PERMUTED and "q_proj" in name:
            value = permuted(value, config.num_attention_heads)
        if arch in PERMUTED and "k_proj" in name:
            value = permuted(value, config.num_key_value_heads)
        if arch in GEMMA and name.endswith("norm.weight"):
            value = value + 1
        if "shared_expert_gate" in name:
            value = value[0]
        expert = re.search(r"\.experts\.(\d+)\.", name)
        plain = name if expert is None else name.replace(expert[0], ".experts.")
        there = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        if expert is None:
            found[there] = value
        else:
            stacked.setdefault(there, {})[int(expert[1])] = value
    return found | {name: np.stack([each[i] for i in range(len(each))]) for name, each in stacked.items()}


def write_gguf(
    path: Path,
    file: Path,
    arch: str,
    *,
    kinds: dict[str, Kind] | None = None,
    kind: Kind = Kind.F32,
    tokenizer: dict[str, Any] | None = None,
    parts: int = 1,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """`kind`: of all matrices; vectors stay in float32. `tokenizer`: metadata of `tokenizer.`."""
    raw = json.loads((path / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), arch, split_max_tensors=0)
    if parts > 1:
        tensors = ggml_tensors(path, arch)
        writer = gguf.GGUFWriter(str(file), arch, split_max_tensors=-(-len(tensors) // parts))
    rope = raw.get("rope_parameters") or {}
    full = rope.get("full_attention") or rope
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(full["rope_theta"])
    if raw.get("head_dim"):
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if full["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(1.0)
    if "partial_rotary_factor" in full:
        head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        writer.add_rope_dimension_count(int(head * full["partial_rotary_factor"]))
    if raw.get("sliding_window"):
        writer.add_sliding_window(raw["sliding_window"])
    experts = raw.get("num_local_experts") or raw.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(raw["num_experts_per_tok"])
    if raw.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    if raw.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    if raw.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(raw["attn_logit_softcapping"])
    if raw.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(raw["final_logit_softcapping"])
    if arch == "gemma3":
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in raw["layer_types"]])
    if arch == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    for key, value in (tokenizer or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[
            type(value)
        ]
        add(f"tokenizer.{key}", value)
    if tokenizer is None:
        writer.add_eos_token_id(1)
    for name, value in {**ggml_tensors(path, arch), **(extra or {})}.items():
        how = (kinds or {}).get(name, kind if value.ndim > 1 else Kind.F32)
        if how in (Kind.F32, Kind.F16):
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32 if how == Kind.F32 else np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value, np.float32), how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
