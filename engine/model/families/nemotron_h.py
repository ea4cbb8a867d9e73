"""Nemotron-H: a layer is a Mamba-2 mixer, attention without positions, an MLP of squared ReLUs or experts of them."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError, UnknownArchitecture
from weft.engine.model.families.family import Config, Family, StateNames, TensorNames
from weft.engine.model.parts import Experts, Layer, Norm, Recurrence

_KINDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}


def _nemotron_h(config: Config) -> dict[str, Any]:
    listed = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types") or ()
    types = [_KINDS.get(of, of) for of in listed]
    if unknown := set(types) - set(_KINDS.values()):
        raise ModelError(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if config.get("moe_latent_size") is not None or not {"mamba", "attention"} <= set(types):
        raise UnknownArchitecture(
            "weft has no layers for moe_latent_size, or for Nemotron-H without attention or Mamba-2"
        )
    if config["mamba_hidden_act"] != "silu" or (config.get("mlp_bias") and "moe" in types):
        raise ModelError("config.json: mamba_hidden_act must be silu, and mlp_bias needs layers without experts")
    own = Recurrence(
        "mamba2",
        heads=int(config["mamba_num_heads"]),
        key_heads=int(config["n_groups"]),
        key_dim=int(config["ssm_state_size"]),
        value_dim=int(config["mamba_head_dim"]),
        taps=int(config["conv_kernel"]),
        conv_bias=bool(config["use_conv_bias"]),
        bias=bool(config["use_bias"]),
        least_step=float(config["time_step_min"]),
        block=int(config["chunk_size"]),
        conv_dtype=config["dtype"],
    )
    layers = {
        "mamba": Layer(attention=False, state=own.state, mlp=False),
        "attention": Layer(rope=None, mlp=False),
        "mlp": Layer(attention=False),
        "moe": Layer(attention=False, experts=True),
    }
    experts = None
    if "moe" in types:
        experts = Experts(
            count=int(config["n_routed_experts"]),
            top=int(config["num_experts_per_tok"]),
            intermediate_size=int(config["moe_intermediate_size"]),
            router="sigmoid",
            normalise=bool(config["norm_topk_prob"]),
            scaling=float(config["routed_scaling_factor"]),
            groups=int(config["n_group"]),
            top_groups=int(config["topk_group"]),
            choice_bias=True,
            shared_size=int(config["moe_shared_expert_intermediate_size"]),
        )
    return {
        "num_layers": len(types),
        "norm": Norm(float(config["layer_norm_epsilon"])),
        "ropes": (),
        "qkv_bias": False,
        "o_bias": False,
        "activation": str(config["mlp_hidden_act"]),
        "gated": False,
        "layers": tuple(layers[of] for of in types),
        "recurrence": own,
        "experts": experts,
    }


NEMOTRON_H = Family(
    ("NemotronHForCausalLM",),
    _nemotron_h,
    TensorNames(
        embedding="backbone.embeddings",
        norm="backbone.norm_f",
        layer="backbone.layers.{}.",
        q="mixer.q_proj",
        k="mixer.k_proj",
        v="mixer.v_proj",
        o="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        attention_norm="norm",
        mlp_norm="norm",
        router="mixer.gate",
        choice_bias="mixer.gate.e_score_correction_bias",
        expert_up="mixer.experts.{}.up_proj",
        expert_down="mixer.experts.{}.down_proj",
        shared_up="mixer.shared_experts.up_proj",
        shared_down="mixer.shared_experts.down_proj",
        state=StateNames(
            (("mixer.in_proj", "zxBCt"),),
            conv="mixer.conv1d",
            out="mixer.out_proj",
            norm="mixer.norm.weight",
            a_log="mixer.A_log",
            time_bias="mixer.dt_bias",
            skip="mixer.D",
        ),
        prefix="backbone.",
        unused=("mtp.",),
    ),
    {
        "num_hidden_layers": 0, "intermediate_size": 21504, "head_dim": 128, "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_head_dim": 64,
        "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "use_conv_bias": True,
        "use_bias": False, "time_step_min": 0.001, "layer_norm_epsilon": 1e-5, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    {"head_dim": "attention_head_dim"},
)  # fmt: skip
