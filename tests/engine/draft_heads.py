"""Random EAGLE-3 heads in both formats, and what a head drafts, computed for a whole text at once from the paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 1, "vocab_size": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "max_position_embeddings": 2048,
}  # fmt: skip


def config_of(kind: str = "plain", **changed: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"draft_vocab_size": 500}
    if kind == "plain":
        given = {**SHAPE, **own, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    else:
        layer = {**SHAPE, "model_type": kind}
        given = {
            **own, "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
            "norm_before_residual": True,
            "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        }  # fmt: skip
    return {**given, **changed}


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return random tensors. Those of a Qwen 3 layer have norms of heads, and their names begin with `layers.0`."""
    own = {**config, **config.get("transformer_layer_config", {})}
    random = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = own["hidden_size"], own["intermediate_size"], own["head_dim"]
    queries, keys = own["num_attention_heads"] * head_dim, own["num_key_value_heads"] * head_dim
    drafts = own["draft_vocab_size"]
    layer = "midlayer" if "transformer_layer_config" not in config else "layers.0"
    shapes = {
        "fc.weight": (hidden, 3 * own.get("target_hidden_size", 256)), "norm.weight": (hidden,),
        "lm_head.weight": (drafts, hidden), f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.hidden_norm.weight": (hidden,), f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (keys, 2 * hidden), f"{layer}.self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries), f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden), f"{layer}.mlp.down_proj.weight": (hidden, inner),
    }  # fmt: skip
    if own["model_type"] == "qwen3":
        shapes |= {f"{layer}.self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    made = {
        name: torch.rand(shape, generator=random) + 0.5
        if len(shape) == 1
        else torch.randn(shape, generator=random) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    ids = torch.randperm(own["vocab_size"], generator=random)[:drafts].sort().values
    made["d2t"] = ids - torch.arange(drafts)
    return made


def write(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), path / "model.safetensors")
    return path


def random_head(path: Path, kind: str = "plain", **changed: Any) -> Path:
    config = config_of(kind, **changed)
    return write(path, config, tensors_of(config))


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _turned(x: Tensor, first: int) -> Tensor:
    """Rotate `[T, heads, D]` at positions from `first` on, as complex numbers of both halves."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(first, first + len(x)), 10000.0 ** (-torch.arange(half) / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def drafted(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], embedding: Tensor, states: Sequence[Tensor],
    text: Sequence[int], count: int,
) -> list[int]:  # fmt: skip
    """Return the `count` tokens that a head drafts after `text`. `states[i]`: the target's stream `[T, H]` that enters
    layer i, for all tokens but the last."""
    own = {**config, **config.get("transformer_layer_config", {})}
    w = {name.replace("midlayer.", "layers.0.").removesuffix(".weight"): t for name, t in tensors.items()}
    taps = own.get("eagle_aux_hidden_state_layer_ids") or (2, 3, 4)
    hidden = torch.cat([states[i] for i in taps], -1) @ w["fc"].T  # [T - 1, H], of all tokens but the last
    tokens, found = list(text[1:]), []
    heads, keys = own["num_attention_heads"], own["num_key_value_heads"]
    for _ in range(count):
        state = _rms(hidden, w["layers.0.hidden_norm"])
        residual = state if own.get("norm_before_residual") else hidden
        both = torch.cat((_rms(embedding[tokens], w["layers.0.input_layernorm"]), state), -1)
        q, k, v = (
            (both @ w[f"layers.0.self_attn.{name}_proj"].T).view(len(both), -1, own["head_dim"]) for name in "qkv"
        )
        if own["model_type"] == "qwen3":
            q, k = (_rms(x, w[f"layers.0.self_attn.{name}_norm"]) for x, name in ((q, "q"), (k, "k")))
        q, k = _turned(q, 1), _turned(k, 1)
        k, v = (x.repeat_interleave(heads // keys, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / own["head_dim"] ** 0.5
        scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        after = residual + mixed @ w["layers.0.self_attn.o_proj"].T
        inner = _rms(after, w["layers.0.post_attention_layernorm"])
        gate, up = (inner @ w[f"layers.0.mlp.{name}_proj"].T for name in ("gate", "up"))
        after = after + (torch.nn.functional.silu(gate) * up) @ w["layers.0.mlp.down_proj"].T
        best = int((_rms(after[-1], w["norm"]) @ w["lm_head"].T).argmax())
        found.append(best + int(w["d2t"][best]))
        tokens.append(found[-1])
        hidden = torch.cat((hidden, after[-1:]))
    return found
