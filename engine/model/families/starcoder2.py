"""StarCoder2: LayerNorm, biases, rotary positions, a window, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family, TensorNames, windowed
from weft.engine.model.parts import Norm


def _parts(config: Config) -> dict[str, Any]:
    biases = ("qkv_bias", "o_bias", "mlp_bias")
    return {
        "norm": Norm(float(config.get("norm_epsilon") or 1e-5), centred=True, bias=True),
        "gated": False,
        "layers": windowed(config),
        **dict.fromkeys(biases, bool(config.get("use_bias", True))),
    }


STARCODER2 = Family(
    ("Starcoder2ForCausalLM",),
    _parts,
    TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
    {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
)
