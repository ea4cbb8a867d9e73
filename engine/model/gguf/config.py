"""`to_config`: converts the metadata of a GGUF file to the `config.json` of its model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.gguf.file import GgufFile, architecture_of

Config = dict[str, Any]
Key = Callable[..., Any]  # Returns a value of the architecture's metadata by the end of its name.

_MISSING = object()
_COMMON = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}


def to_config(file: GgufFile) -> Config:
    """Convert the metadata. Raises `ModelError`, one line, for an unsupported architecture or value."""
    arch = file.get("general.architecture")
    if why := _unknown(arch):
        raise ModelError(f"{file.path}: {why}")

    def key(name: str, default: Any = _MISSING) -> Any:
        value = file.get(f"{arch}.{name}", default)
        if value is _MISSING:
            raise ModelError(f"{file.path} lacks {arch}.{name} in its metadata")
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        return value

    config: Config = {name: key(there) for name, there in _COMMON.items()}
    counts = {there: key(there, 1) for there in (*_COMMON.values(), "attention.head_count_kv")}
    for there, count in counts.items():
        if isinstance(count, list):
            raise ModelError(f"{file.path}: layers that differ in {there} are not supported")
        if type(count) is not int or count < 1:
            raise ModelError(f"{file.path}: {arch}.{there} is {count!r}, must be a number above 0")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = key("attention.key_length", hidden // heads)
    if key("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different sizes are not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight")
    epsilon = key("attention.layer_norm_rms_epsilon", None)
    config |= {
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        "torch_dtype": _dtype(file),
        "rope_parameters": _rope(file, key, head_dim),
        **({} if epsilon is None else {"rms_norm_eps": epsilon}),
    }
    return {
        name: value for name, value in (config | ARCHITECTURES[arch](file, key, config)).items() if value is not None
    }


def _unknown(arch: str | None) -> str | None:
    if arch in ARCHITECTURES:
        return None
    return f"GGUF files of the architecture {arch} are not supported; supported: {', '.join(sorted(ARCHITECTURES))}"


def unsupported_reason(path: Path) -> str | None:
    """Return why a file cannot be served, judging by its first bytes."""
    return _unknown(architecture_of(path))


def _dtype(file: GgufFile) -> str:
    """Return the serving dtype; for blocks, that of the models they usually come from."""
    kinds = {entry.kind for entry in file.tensors.values()}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope(file: GgufFile, key: Key, head_dim: int) -> Config:
    rope: Config = {"rope_theta": key("rope.freq_base", 10000.0), "rope_type": "default"}
    if (rotated := key("rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    # Old files have only a factor, which is linear.
    factor = key("rope.scaling.factor", None) or key("rope.scale_linear", None)
    kind = key("rope.scaling.type", "linear" if factor else None)
    original = key("rope.scaling.original_context_length", None)
    if "rope_freqs.weight" in file.tensors:
        # Factors per frequency, for any kind of scaling.
        factors = file.numbers("rope_freqs.weight")
        return rope | {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0
        }  # fmt: skip
    if "rope_factors_long.weight" in file.tensors:
        return rope | {
            "rope_type": "longrope",
            "short_factor": file.numbers("rope_factors_short.weight"),
            "long_factor": file.numbers("rope_factors_long.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": key("rope.scaling.attn_factor", None),
        }
    if kind in (None, "none") or (kind == "linear" and factor in (None, 1)):
        return rope
    if kind == "yarn" and not factor:
        raise ModelError(f"{file.path} has no {file.get('general.architecture')}.rope.scaling.factor in its metadata")
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope |= {
            "original_max_position_embeddings": original,
            "beta_fast": key("rope.scaling.yarn_beta_fast", None),
            "beta_slow": key("rope.scaling.yarn_beta_slow", None),
        }
        if more := key("rope.scaling.attn_factor", None):
            rope["attention_factor"] = more * (0.1 * math.log(factor) + 1)
    return rope


_INTERLEAVED = {"rope_interleaved": True}
"""llama.cpp stores q and k of these models with the two halves of a rotary pair next to each other."""


def _llama(_file: GgufFile, key: Key, _config: Config) -> Config:
    found: Config = {"architectures": ["LlamaForCausalLM"], **_INTERLEAVED}
    if experts := key("expert_count", 0):
        found |= {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": experts,
            "num_experts_per_tok": key("expert_used_count"),
        }
    elif window := key("attention.sliding_window", 0):
        found |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return found


def _plain(architecture: str) -> Callable[[GgufFile, Key, Config], Config]:
    return lambda _file, _key, _config: {"architectures": [architecture]}


def _experts(architecture: str, **options: Any) -> Callable[[GgufFile, Key, Config], Config]:
    def read(_file: GgufFile, key: Key, config: Config) -> Config:
        return {
            "architectures": [architecture],
            "num_experts": key("expert_count"),
            "num_experts_per_tok": key("expert_used_count"),
            "moe_intermediate_size": key("expert_feed_forward_length"),
            "shared_expert_intermediate_size": key("expert_shared_feed_forward_length", None),
            "attention_bias": None if architecture.startswith("Qwen2") else config["attention_bias"],
            **options,
        }

    return read


def _gemma(architecture: str, largest: int = 0) -> Callable[[GgufFile, Key, Config], Config]:
    """largest: layer count of the model that scales scores by hidden size / heads instead of its head dimension."""

    def read(_file: GgufFile, key: Key, config: Config) -> Config:
        width = config["hidden_size"] // config["num_attention_heads"]
        return {
            "architectures": [architecture],
            "query_pre_attn_scalar": width if config["num_hidden_layers"] == largest else config["head_dim"],
            "attn_logit_softcapping": key("attn_logit_softcapping", None),
            "final_logit_softcapping": key("final_logit_softcapping", None),
            "sliding_window": key("attention.sliding_window", None),
        }

    return read


def _gemma3(file: GgufFile, key: Key, config: Config) -> Config:
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": key("rope.freq_base_swa", 10000.0)}
    pattern, types = file.get("gemma3.attention.sliding_window_pattern", 6), None
    if isinstance(pattern, list):
        types = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    return {
        **_gemma("Gemma3ForCausalLM", largest=62)(file, key, config),
        "sliding_window_pattern": pattern if types is None else None,
        "layer_types": types,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _phi3(_file: GgufFile, key: Key, _config: Config) -> Config:
    return {"architectures": ["Phi3ForCausalLM"], "sliding_window": key("attention.sliding_window", None)}


def _granite(_file: GgufFile, key: Key, _config: Config) -> Config:
    return {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": key("attention.scale"),
        "embedding_multiplier": key("embedding_scale", 1.0),
        "residual_multiplier": key("residual_scale", 1.0),
        "logits_scaling": key("logit_scale", 1.0),
        **_INTERLEAVED,
    }


def _smollm3(_file: GgufFile, _key: Key, _config: Config) -> Config:
    return {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 4, **_INTERLEAVED}


ARCHITECTURES: dict[str, Callable[[GgufFile, Key, Config], Config]] = {
    "llama": _llama,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen2moe": _experts("Qwen2MoeForCausalLM", norm_topk_prob=False),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen3moe": _experts("Qwen3MoeForCausalLM", norm_topk_prob=True),
    "gemma": _gemma("GemmaForCausalLM"),
    "gemma2": _gemma("Gemma2ForCausalLM", largest=46),
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _plain("Olmo2ForCausalLM"),
    "granite": _granite,
    "smollm3": _smollm3,
}
OFFSET_NORMS = ("gemma", "gemma2", "gemma3")  # Their files store norm weights plus one.
