"""Mistral: Llama's layer with a sliding window on all layers or some. Mixtral: the same with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine.model.families.family import Config, Family, TensorNames, windowed
from weft.engine.model.parts import Experts


def _mixtral(config: Config) -> dict[str, Any]:
    return {
        "layers": tuple(replace(layer, experts=True) for layer in windowed(config)),
        "experts": Experts(
            count=int(config["num_local_experts"]),
            top=int(config.get("num_experts_per_tok") or 2),
            intermediate_size=int(config["intermediate_size"]),
        ),
    }


MISTRAL = Family(("MistralForCausalLM", "MinistralForCausalLM"), lambda config: {"layers": windowed(config)})
MIXTRAL = Family(
    ("MixtralForCausalLM",),
    _mixtral,
    TensorNames(
        router="block_sparse_moe.gate",
        expert_gate="block_sparse_moe.experts.{}.w1",
        expert_up="block_sparse_moe.experts.{}.w3",
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    defaults={"rms_norm_eps": 1e-5},
)
