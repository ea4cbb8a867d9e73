"""gpt-oss: experts, router with biases, attention sinks, a window on every other layer; MXFP4 on disk."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Config, Family, TensorNames, windows
from weft.engine.model.parts import Experts, Layer

_LIMIT, _ALPHA = 7.0, 1.702


def _parts(config: Config) -> dict[str, Any]:
    if (config.get("swiglu_limit", _LIMIT), config.get("swiglu_alpha", _ALPHA)) != (_LIMIT, _ALPHA):
        raise ModelError(f"swiglu_limit and swiglu_alpha other than {_LIMIT} and {_ALPHA} are not supported")
    return {
        "activation": "swiglu_oai",
        "sinks": True,
        "layers": tuple(Layer(window, experts=True) for window in windows(config, lambda i: i % 2 == 0)),
        "experts": Experts(
            count=int(config["num_local_experts"]),
            top=int(config.get("num_experts_per_tok") or config["experts_per_token"]),
            intermediate_size=int(config["intermediate_size"]),
            router="top_softmax",
            router_bias=True,
            bias=True,
        ),
    }


GPT_OSS = Family(
    ("GptOssForCausalLM",),
    _parts,
    TensorNames(
        router="mlp.router",
        experts_gate_up="mlp.experts.gate_up_proj",
        experts_down="mlp.experts.down_proj",
        experts_alternate=True,
    ),
    defaults={"attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "sliding_window": 128},
    quantizations=("mxfp4",),
)
