"""DeepSeek-V2 and V3 (also R1 and Kimi-K2), GLM-4.7 Flash: latent attention, experts with shared ones after a few dense
layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from weft.engine.errors import UnknownArchitecture
from weft.engine.model.families.family import Config, Family, TensorNames
from weft.engine.model.parts import Experts, Latent, Layer, RouterKind
from weft.engine.model.rope import read_rope


def _latent(config: Config, router: RouterKind, **parts: Any) -> dict[str, Any]:
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise UnknownArchitecture("weft has no layers for latent attention with biases")
    own = Latent(
        rank=int(config["kv_lora_rank"]),
        rotated=int(config["qk_rope_head_dim"]),
        plain=int(config["qk_nope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
    )
    rope, scale = read_rope(config, int(config["max_position_embeddings"])), own.query_dim**-0.5
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    every = float(raw.get("mscale_all_dim") or 0.0)
    if rope.scaling.kind != "default" and every and rope.scaling.factor > 1:
        scale *= (0.1 * every * math.log(rope.scaling.factor) + 1.0) ** 2
    number, dense = int(config["num_hidden_layers"]), int(config.get("first_k_dense_replace") or 0)
    inter = int(config["moe_intermediate_size"])
    experts = Experts(
        count=int(config["n_routed_experts"]),
        top=int(config["num_experts_per_tok"]),
        intermediate_size=inter,
        router=router,
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        shared_size=inter * int(config.get("n_shared_experts") or 0),
    )
    return {
        "num_kv_heads": 1,
        "head_dim": own.width,
        "latent": own,
        "attention_scale": scale,
        "ropes": (replace(rope, interleaved=bool(config["rope_interleave"])),),
        "layers": tuple(Layer(experts=i >= dense) for i in range(number)),
        "experts": replace(experts, **parts),
    }


def _v2(config: Config) -> dict[str, Any]:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnknownArchitecture(f"weft has no layers for topk_method {method}")
    if method == "greedy":
        config = {**config, "n_group": 1, "topk_group": 1}
    return _latent(config, "softmax", normalise=False, group_best=1)


def _v3(config: Config) -> dict[str, Any]:
    return _latent(config, "sigmoid", normalise=bool(config.get("norm_topk_prob", True)), choice_bias=True)


def _glm_lite(config: Config) -> dict[str, Any]:
    types = config.get("mlp_layer_types") or ()
    dense = types.index("sparse") if "sparse" in types else 1
    if "dense" in types[dense:]:
        raise UnknownArchitecture("weft has no layers for dense layers after layers with experts")
    return _v3({**config, "first_k_dense_replace": dense})


_SHARED = "mlp.shared_experts."
_NAMES = TensorNames(
    shared_gate=f"{_SHARED}gate_proj", shared_up=f"{_SHARED}up_proj", shared_down=f"{_SHARED}down_proj", draft_layers=1
)
_DEFAULTS = {"rope_interleave": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}

DEEPSEEK_V2 = Family(("DeepseekV2ForCausalLM",), _v2, _NAMES, {**_DEFAULTS, "v_head_dim": 128})
DEEPSEEK_V3 = Family(
    ("DeepseekV3ForCausalLM",),
    _v3,
    _NAMES,
    {**_DEFAULTS, "v_head_dim": 128, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
)
GLM_LITE = Family(("Glm4MoeLiteForCausalLM",), _glm_lite, _NAMES, _DEFAULTS)
