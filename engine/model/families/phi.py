"""Phi 1 and 2 (parallel attention and MLP, biases everywhere); Phi 3 and 4 (fused tensors, longrope)."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Config, Family, TensorNames, windowed
from weft.engine.model.parts import Norm, Placement


def _phi(config: Config) -> dict[str, Any]:
    if config.get("qk_layernorm"):
        raise ModelError("qk_layernorm is not supported")
    biases = ("qkv_bias", "o_bias", "mlp_bias", "head_bias")
    return {
        "norm": Norm(float(config.get("layer_norm_eps") or 1e-5), centred=True, bias=True),
        "placement": Placement.PARALLEL,
        "gated": False,
        **dict.fromkeys(biases, True),
    }


PHI = Family(
    ("PhiForCausalLM",),
    _phi,
    TensorNames(norm="model.final_layernorm", o="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
    defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
)
PHI3 = Family(
    ("Phi3ForCausalLM",),
    lambda config: {"layers": windowed(config)},
    TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    defaults={"rms_norm_eps": 1e-5},
)
