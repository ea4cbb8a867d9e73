"""GLM-4: half of each head rotated, in adjacent pairs; from 0414 on pre- and post-norms; GLM-4.5 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine.model.families.family import Config, Family, TensorNames
from weft.engine.model.parts import Experts, Layer, Placement
from weft.engine.model.rope import read_rope


def _glm(config: Config) -> dict[str, Any]:
    rope = read_rope({"partial_rotary_factor": 0.5, **config}, int(config["max_position_embeddings"]))
    return {"o_bias": False, "ropes": (replace(rope, interleaved=True),)}


def _glm4(config: Config) -> dict[str, Any]:
    return {**_glm(config), "placement": Placement.SANDWICH}


def _glm4_moe(config: Config) -> dict[str, Any]:
    dense, number = int(config["first_k_dense_replace"]), int(config["num_hidden_layers"])
    inter = int(config["moe_intermediate_size"])
    experts = Experts(
        count=int(config["n_routed_experts"]),
        top=int(config["num_experts_per_tok"]),
        intermediate_size=inter,
        router="sigmoid",
        normalise=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        groups=int(config.get("n_group") or 1),
        top_groups=int(config.get("topk_group") or 1),
        choice_bias=True,
        shared_size=inter * int(config.get("n_shared_experts") or 0),
    )
    return {
        "o_bias": False,
        "qk_norm": "head" if config.get("use_qk_norm") else "",
        "layers": tuple(Layer(experts=i >= dense) for i in range(number)),
        "experts": experts,
    }


_DEFAULTS = {"rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072}
_FUSED = TensorNames(gate_up="mlp.gate_up_proj", attention_post_norm="post_self_attn_layernorm",
                     mlp_post_norm="post_mlp_layernorm")  # fmt: skip
_SHARED = "mlp.shared_experts."

GLM = Family(("GlmForCausalLM",), _glm, _FUSED, _DEFAULTS)
GLM4 = Family(("Glm4ForCausalLM",), _glm4, _FUSED, _DEFAULTS)
GLM4_MOE = Family(
    ("Glm4MoeForCausalLM",),
    _glm4_moe,
    TensorNames(
        shared_gate=f"{_SHARED}gate_proj", shared_up=f"{_SHARED}up_proj", shared_down=f"{_SHARED}down_proj",
        draft_layers=1,
    ),
    {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
)  # fmt: skip
