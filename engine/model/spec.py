"""`ModelSpec`: a model as data, read from a Hugging Face `config.json`.

The loader, the executor and the search all read this; none of them knows an architecture by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from weft.engine.errors import ModelError

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM")
"""Llama 2 / 3 / 3.1+, Mistral, Yi and DeepSeek LLM all declare one of these."""


class Resource(Enum):
    """What an operation is short of (NanoFlow §3)."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a layer. `out x inner` is its matrix per token (0 x 0 for attention)."""

    name: str
    resource: Resource
    parents: tuple[str, ...]
    out: int = 0
    inner: int = 0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`rope_scaling` of the config: 'default', 'linear', 'dynamic' (NTK by position limit), 'yarn' or 'llama3'."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of a decoder-only transformer with grouped-query attention and a gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    dtype: str
    eos_token_ids: tuple[int, ...] = field(default=())

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        per_layer = sum(op.out * op.inner for op in self.layer_operations()) + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return per_layer * self.num_layers + embeddings + self.hidden_size

    def layer_operations(self) -> Iterator[Operation]:
        """The operations of one layer in order, with dependencies inside the layer."""
        h, i, a = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        yield Operation("qkv", Resource.COMPUTE, (), self.qkv_size, h)
        yield Operation("decode", Resource.MEMORY, ("qkv",))
        yield Operation("prefill", Resource.COMPUTE, ("qkv",))
        yield Operation("o", Resource.COMPUTE, ("decode", "prefill"), h, a)
        yield Operation("gate_up", Resource.COMPUTE, ("o",), 2 * i, h)
        yield Operation("down", Resource.COMPUTE, ("gate_up",), h, i)

    def inv_freq(self) -> tuple[torch.Tensor, float]:
        """Rotary frequencies `[head_dim/2]` float32 and the factor on cos and sin."""
        d, s = self.head_dim, self.rope_scaling
        exponent = torch.arange(0, d, 2, dtype=torch.int64).float() / d
        theta = self.rope_theta
        inv = 1.0 / (theta**exponent)
        match s.kind:
            case "linear":
                return inv / s.factor, 1.0
            case "dynamic":
                # Within the original context the base is unchanged; weft serves no longer than max_positions.
                return inv, 1.0
            case "llama3":
                wavelength = 2 * math.pi / inv
                low, high = s.original_max_positions / s.low_freq_factor, s.original_max_positions / s.high_freq_factor
                smooth = (s.original_max_positions / wavelength - s.low_freq_factor) / (
                    s.high_freq_factor - s.low_freq_factor
                )
                mixed = (1 - smooth) * inv / s.factor + smooth * inv
                scaled = torch.where(wavelength > low, inv / s.factor, inv)
                return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled), 1.0
            case "yarn":

                def bound(rotations: float) -> float:
                    return d * math.log(s.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

                low_dim, high_dim = max(math.floor(bound(s.beta_fast)), 0), min(math.ceil(bound(s.beta_slow)), d - 1)
                ramp = (torch.arange(d // 2).float() - low_dim) / max(high_dim - low_dim, 0.001)
                keep = 1 - ramp.clamp(0, 1)
                factor = s.attention_factor
                if factor is None:
                    factor = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
                return inv / s.factor * (1 - keep) + inv * keep, factor
            case _:
                return inv, 1.0


def _rope(config: dict[str, Any], max_positions: int) -> tuple[float, RopeScaling]:
    # transformers 5 writes `rope_parameters`; earlier checkpoints have `rope_theta` and `rope_scaling`.
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(raw.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise ModelError(f"rope scaling {kind!r} is not supported (default, linear, dynamic, llama3 and yarn are)")
    if float(raw.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    scaling = RopeScaling(
        kind=kind,
        factor=float(raw.get("factor") or 1.0),
        low_freq_factor=float(raw.get("low_freq_factor") or 1.0),
        high_freq_factor=float(raw.get("high_freq_factor") or 4.0),
        original_max_positions=int(
            raw.get("original_max_position_embeddings")
            or config.get("original_max_position_embeddings")
            or max_positions
        ),
        beta_fast=float(raw.get("beta_fast") or 32.0),
        beta_slow=float(raw.get("beta_slow") or 1.0),
        attention_factor=raw.get("attention_factor"),
    )
    if kind == "yarn" and (raw.get("mscale") or raw.get("mscale_all_dim")):
        raise ModelError("yarn rope scaling with mscale is not supported")
    return theta, scaling


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: give a Hugging Face model directory, or 'demo'") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    # generation_config.json wins: Llama 3 lists its end-of-turn token only there.
    ids = config.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.exists():
        ids = _read_json(generation).get("eos_token_id", ids)
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def read_spec(path: Path) -> ModelSpec:
    """Read `config.json` (and `generation_config.json`) of a model directory.

    Raises `ModelError`, one line, for a missing or malformed file, an unsupported architecture or option.
    """
    if not path.is_dir():
        raise ModelError(f"no model directory at {path}: give a Hugging Face model directory, or 'demo'")
    config = _read_json(path / "config.json")
    architectures = config.get("architectures") or ["(none)"]
    if architectures[0] not in SUPPORTED:
        raise ModelError(f"architecture {architectures[0]} is not supported; supported: {', '.join(SUPPORTED)}")
    if config.get("quantization_config"):
        raise ModelError("quantized checkpoints are not supported: use a bf16, fp16 or fp32 one")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"activation {activation!r} is not supported (silu is)")
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        max_positions = int(config.get("max_position_embeddings") or 2048)
        theta, scaling = _rope(config, max_positions)
        window = config.get("sliding_window") if architectures[0] == "MistralForCausalLM" else None
        spec = ModelSpec(
            architecture=architectures[0],
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            max_positions=max_positions,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            sliding_window=window,
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
            eos_token_ids=_eos_ids(path, config),
        )
    except KeyError as error:
        raise ModelError(f"{path / 'config.json'} lacks {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path / 'config.json'} has a value of the wrong kind: {error}") from None
    return _checked(spec)


def _checked(spec: ModelSpec) -> ModelSpec:
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "max_positions",
    )
    for name in sizes:
        if getattr(spec, name) < 1:
            raise ModelError(f"config.json: {name} is {getattr(spec, name)}, must be at least 1")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} KV heads evenly")
    if spec.head_dim % 2:
        raise ModelError(f"head_dim {spec.head_dim} is odd: rotary embedding needs pairs")
    if any(not 0 <= i < spec.vocab_size for i in spec.eos_token_ids):
        raise ModelError(f"end token {spec.eos_token_ids} lies outside the vocabulary of {spec.vocab_size}")
    if spec.mlp_bias:
        raise ModelError("mlp_bias is not supported")
    if spec.sliding_window is not None and spec.sliding_window < spec.max_positions:
        # Full attention equals sliding-window attention as long as no context is longer than the window.
        return replace(spec, max_positions=spec.sliding_window)
    return spec
