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


_VISION = ("vision_tower", "multi_modal_projector")

MISTRAL = Family(("MistralForCausalLM", "MinistralForCausalLM"), lambda config: {"layers": windowed(config)})
MISTRAL3 = Family(
    ("Mistral3ForConditionalGeneration",),
    MISTRAL.parts,
    TensorNames(
        other_prefixes=("model.language_model.", "language_model.model."),
        unused=tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in _VISION),
    ),
    languages={"mistral": {"rms_norm_eps": 1e-6}},
)
"""A vision-language model (`model/vision/mistral3.py`) whose language model is a Mistral."""
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
