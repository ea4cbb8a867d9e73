"""GPT-2 and OPT: LayerNorm, learned positions, biases, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.families.family import Config, Family, TensorNames
from weft.engine.model.parts import Layer, Norm


def _parts(config: Config, offset: int, bias: bool = True) -> dict[str, Any]:
    return {
        "norm": Norm(float(config.get("layer_norm_epsilon") or 1e-5), centred=True, bias=True),
        "ropes": (),
        "layers": (Layer(rope=None),),
        "learned_positions": offset,
        "gated": False,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), bias),
    }


def _gpt2(config: Config) -> dict[str, Any]:
    if config.get("scale_attn_by_inverse_layer_idx") or not config.get("scale_attn_weights", True):
        raise ModelError("scale_attn_by_inverse_layer_idx and unscaled attention are not supported")
    inner = config.get("n_inner") or 4 * int(config["hidden_size"])
    return {**_parts(config, 0), "intermediate_size": int(inner)}


def _opt(config: Config) -> dict[str, Any]:
    if config.get("word_embed_proj_dim", config["hidden_size"]) != config["hidden_size"]:
        raise ModelError("an embedding with another width than the layers is not supported (word_embed_proj_dim)")
    if not config.get("do_layer_norm_before", True) or config.get("_remove_final_layer_norm"):
        raise ModelError("norms after the residual sum are not supported (do_layer_norm_before)")
    if not config.get("layer_norm_elementwise_affine", True):
        raise ModelError("norms without weights are not supported (layer_norm_elementwise_affine)")
    return _parts(config, 2, bool(config.get("enable_bias", True)))


GPT2 = Family(
    ("GPT2LMHeadModel",),
    _gpt2,
    TensorNames(
        embedding="transformer.wte", positions="transformer.wpe", norm="transformer.ln_f", layer="transformer.h.{}.",
        qkv="attn.c_attn", o="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj", attention_norm="ln_1", mlp_norm="ln_2",
        transposed=True, harmless=(".attn.bias", ".attn.masked_bias"), prefix="transformer.", other_prefixes=("",),
    ),
    {"hidden_act": "gelu_new", "tie_word_embeddings": True, "intermediate_size": 0},
    {
        "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions", "hidden_act": "activation_function",
    },
)  # fmt: skip
OPT = Family(
    ("OPTForCausalLM",),
    _opt,
    TensorNames(
        embedding="model.decoder.embed_tokens", positions="model.decoder.embed_positions",
        norm="model.decoder.final_layer_norm", layer="model.decoder.layers.{}.", o="self_attn.out_proj", up="fc1",
        down="fc2", attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm",
        prefix="model.decoder.", other_prefixes=("decoder.",),
    ),
    {"hidden_act": "relu", "tie_word_embeddings": True},
    {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
)  # fmt: skip
