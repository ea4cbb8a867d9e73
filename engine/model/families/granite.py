"""Granite: Llama's layer with multipliers; also with experts in stacked tensors."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family, TensorNames
from weft.engine.model.parts import Experts, Layer


def _granite(config: Config) -> dict[str, Any]:
    return {
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "attention_scale": float(config.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / float(config.get("logits_scaling", 1.0)),
    }


def _granite_moe(config: Config) -> dict[str, Any]:
    experts = Experts(
        count=int(config["num_local_experts"]),
        top=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["intermediate_size"]),
        router="top_softmax",
    )
    return {**_granite(config), "layers": (Layer(experts=True),), "experts": experts}


GRANITE = Family(("GraniteForCausalLM",), _granite)
GRANITE_MOE = Family(
    ("GraniteMoeForCausalLM",),
    _granite_moe,
    TensorNames(
        router="block_sparse_moe.router.layer",
        experts_gate_up="block_sparse_moe.input_linear.weight",
        experts_down="block_sparse_moe.output_linear.weight",
        # in compressed checkpoints
        expert_gate="block_sparse_moe.experts.{}.gate_proj",
        expert_up="block_sparse_moe.experts.{}.up_proj",
        expert_down="block_sparse_moe.experts.{}.down_proj",
    ),
)
