"""Qwen3-Next and Qwen3.5: three layers of gated delta rule, then one of attention with an output gate.

The vision part of Qwen3.5 is in `model/vision/qwen_vl.py`. Layers that predict further tokens are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Config, Family, StateNames, TensorNames
from weft.engine.model.parts import Experts, Layer, Norm, Recurrence
from weft.engine.model.rope import read_rope


def _hybrid(config: Config) -> dict[str, Any]:
    if config.get("attn_output_gate", True) is not True:
        raise ModelError("config.json: attn_output_gate is not true")
    number, every = int(config["num_hidden_layers"]), int(config.get("full_attention_interval") or 4)
    types = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(number)
    ]
    if unknown := set(types) - {"linear_attention", "full_attention"}:
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    own = Recurrence(
        "gated_delta",
        heads=int(config["linear_num_value_heads"]),
        key_heads=int(config["linear_num_key_heads"]),
        key_dim=int(config["linear_key_head_dim"]),
        value_dim=int(config["linear_value_head_dim"]),
        taps=int(config["linear_conv_kernel_dim"]),
        conv_dtype=config["dtype"],
    )
    attends, recurs = Layer(), Layer(attention=False, state=own.state)
    return {
        "norm": Norm(float(config.get("rms_norm_eps", 1e-6)), unit_offset=True),
        "qk_norm": "head",
        "output_gate": True,
        "layers": tuple(attends if of == "full_attention" else recurs for of in types[:number]),
        "recurrence": own,
        "ropes": (read_rope({"partial_rotary_factor": 0.25, **config}, int(config["max_position_embeddings"])),),
    }


def _moe(config: Config) -> dict[str, Any]:
    parts = _hybrid(config)
    dense, step = config.get("mlp_only_layers") or [], int(config.get("decoder_sparse_step") or 1)
    parts["layers"] = tuple(
        replace(layer, experts=i not in dense and (i + 1) % step == 0) for i, layer in enumerate(parts["layers"])
    )
    parts["experts"] = Experts(
        count=int(config["num_experts"]),
        top=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_size=int(config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    return parts


_DEFAULTS = {
    "head_dim": 256, "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_STATE = StateNames(
    (
        ("linear_attn.in_proj_qkv", "qkv"),
        ("linear_attn.in_proj_z", "z"),
        ("linear_attn.in_proj_b", "b"),
        ("linear_attn.in_proj_a", "a"),
    ),
    conv="linear_attn.conv1d",
    out="linear_attn.out_proj",
    norm="linear_attn.norm.weight",
    a_log="linear_attn.A_log",
    time_bias="linear_attn.dt_bias",
)
_NAMES = TensorNames(
    experts_gate_up="mlp.experts.gate_up_proj",
    experts_down="mlp.experts.down_proj",
    state=_STATE,
    other_prefixes=("model.language_model.",),
    unused=("model.visual.", "mtp."),
)
_INPUTS = (("linear_attn.in_proj_qkvz", "qkvz"), ("linear_attn.in_proj_ba", "ba"))

QWEN3_5 = Family(("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _hybrid, _NAMES, _DEFAULTS)
QWEN3_5_MOE = Family(
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    _moe,
    _NAMES,
    {**_DEFAULTS, "shared_expert_intermediate_size": 512},
    {"intermediate_size": "moe_intermediate_size"},
)
QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",),
    _moe,
    replace(_NAMES, state=replace(_STATE, inputs=_INPUTS, by_key_head=True)),
    {**_DEFAULTS, "intermediate_size": 5632, "shared_expert_intermediate_size": 512},
)
