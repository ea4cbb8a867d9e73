"""Granite: Llama's layer with multipliers; also with experts in stacked tensors, and with Mamba-2 in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.engine.errors import ModelError, UnknownArchitecture
from weft.engine.model.families.family import Config, Family, StateNames, TensorNames
from weft.engine.model.parts import Experts, Layer, Recurrence


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


_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def _number(value: Any) -> float:
    """Read a number of a config, in which `transformers` writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def _granite_hybrid(config: Config) -> dict[str, Any]:
    types = [_KINDS.get(of, of) for of in config.get("layer_types") or config.get("layers_block_type") or ()]
    if unknown := set(types) - set(_KINDS.values()):
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if "attention" not in types:
        raise UnknownArchitecture("weft has no layers for Granite without attention")
    heads, width = int(config["mamba_n_heads"]), int(config["mamba_expand"]) * int(config["hidden_size"])
    least, most = (_number(value) for value in config.get("time_step_limit") or (0.0, float("inf")))
    own = Recurrence(
        "mamba2",
        heads=heads,
        key_heads=int(config["mamba_n_groups"]),
        key_dim=int(config["mamba_d_state"]),
        value_dim=width // heads,
        taps=int(config["mamba_d_conv"]),
        conv_bias=bool(config["mamba_conv_bias"]),
        bias=bool(config["mamba_proj_bias"]),
        least_step=least,
        most_step=most,
        block=int(config["mamba_chunk_size"]),
        conv_dtype=config["dtype"],
    )
    rope = 0 if config.get("position_embedding_type") == "rope" else None
    shared, count = int(config["shared_intermediate_size"]), int(config.get("num_local_experts") or 0)
    recurs, attends = Layer(attention=False, state=own.state, experts=count > 0), Layer(rope=rope, experts=count > 0)
    parts = _granite_moe(config) if count else {**_granite(config), "intermediate_size": shared}
    if count:
        parts["experts"] = replace(parts["experts"], shared_size=shared)
    if rope is None:
        parts["ropes"] = ()
    layers = tuple(recurs if of == "mamba" else attends for of in types)
    return {**parts, "layers": layers, "recurrence": own if "mamba" in types else None}


_MOE_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    experts_gate_up="block_sparse_moe.input_linear.weight",
    experts_down="block_sparse_moe.output_linear.weight",
    # in compressed checkpoints
    expert_gate="block_sparse_moe.experts.{}.gate_proj",
    expert_up="block_sparse_moe.experts.{}.up_proj",
    expert_down="block_sparse_moe.experts.{}.down_proj",
)

GRANITE = Family(("GraniteForCausalLM",), _granite)
GRANITE_MOE = Family(("GraniteMoeForCausalLM",), _granite_moe, _MOE_NAMES)
GRANITE_HYBRID = Family(
    ("GraniteMoeHybridForCausalLM",),
    _granite_hybrid,
    replace(
        _MOE_NAMES,
        gate_up="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
        shared_gate_up="shared_mlp.input_linear",
        shared_down="shared_mlp.output_linear",
        state=StateNames(
            (("mamba.in_proj", "zxBCt"),),
            conv="mamba.conv1d",
            out="mamba.out_proj",
            norm="mamba.norm.weight",
            a_log="mamba.A_log",
            time_bias="mamba.dt_bias",
            skip="mamba.D",
        ),
    ),
    {
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "num_local_experts": 8,
        "shared_intermediate_size": 1024, "intermediate_size": 11008,
    },
)  # fmt: skip
