"""`read_quantization`: reads the `quantization_config` of an FP8 checkpoint."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.integer_config import check_groups
from weft.engine.model.parts import Quantization

Config = dict[str, Any]
FP8_ALGORITHMS = {"FP8": "static", "FP8_PER_CHANNEL_PER_TOKEN": "dynamic"}
"""ModelOpt's algorithm names -> activations."""
BLOCK = [128, 128]


def read_quantization(config: Config) -> Quantization | None:
    """Return the quantization, or None if only K and V are FP8. Raises `ModelError`, one line, if unsupported."""
    method = str(config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else ""))
    reader = _READERS.get(method)
    if reader is None:
        raise ModelError(
            f"checkpoints quantized by {method or 'no quant_method'} are not supported: use one in FP8 "
            f"({', '.join(_READERS)}), in 4 bits (awq, gptq, compressed-tensors), or a bf16, fp16 or fp32 one"
        )
    return reader(config)


def of_modelopt_file(file: Config) -> Config:
    """Return the `quantization_config` equivalent of an `hf_quant_config.json`."""
    given = file.get("quantization")
    return {**(given if isinstance(given, dict) else {}), "quant_method": "modelopt"}


def _compressed_tensors(config: Config) -> Quantization | None:
    groups, pages = config.get("config_groups") or {}, config.get("kv_cache_scheme")
    if groups == {} and isinstance(pages, dict) and (pages.get("type"), pages.get("num_bits")) == ("float", 8):
        return None
    if not isinstance(groups, dict) or not groups:
        raise ModelError("config.json: its quantization_config has no config_groups, or none that are objects")
    check_groups(groups)
    kinds = sorted({_group(name, group) for name, group in groups.items()})
    if len({activations for _, activations in kinds}) > 1:
        raise ModelError("config.json: config_groups that quantize activations in different ways are not supported")
    weights, kept = tuple(weights for weights, _ in kinds), len(config.get("ignore") or ())
    return Quantization("compressed-tensors", kinds[0][1], weights=weights, kept=kept)


def _group(name: str, group: Config) -> tuple[str, Any]:
    """Return what has a scale and how activations are quantized."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    for what, scheme in (("weights", weights), ("input_activations", inputs)):
        if scheme is None:
            continue
        kind = f"{scheme.get('type')}{scheme.get('num_bits')}"
        if kind != "float8" or not scheme.get("symmetric", True):
            raise ModelError(f"config.json: {what} of {name} are {kind}; weft reads only symmetric float8")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block") or (
        strategy == "block" and weights.get("block_structure") not in (BLOCK, "128x128")
    ):
        raise ModelError(
            f"config.json: weights of {name} have the strategy {strategy}; weft reads tensor, channel and block "
            f"of {BLOCK[0]} x {BLOCK[1]}"
        )
    if inputs is None:
        return strategy, "none"
    return strategy, "dynamic" if inputs.get("dynamic") else "static"


def _modelopt(config: Config) -> Quantization | None:
    if config.get("quant_algo") is None and config.get("kv_cache_quant_algo") == "FP8":
        return None
    algorithm = str(config.get("quant_algo"))
    if algorithm not in FP8_ALGORITHMS:
        raise ModelError(f"ModelOpt's {algorithm} is not supported: weft reads {' and '.join(FP8_ALGORITHMS)}")
    activations: Any = FP8_ALGORITHMS[algorithm]
    weights = ("tensor",) if algorithm == "FP8" else ("channel",)
    kept = config.get("ignore") or config.get("exclude_modules") or ()
    return Quantization("modelopt", activations, weights=weights, kept=len(kept))


def _fbgemm(config: Config) -> Quantization:
    return Quantization(
        "fbgemm_fp8", "dynamic", weights=("channel",), kept=len(config.get("modules_to_not_convert") or ())
    )


def _fp8(config: Config) -> Quantization:
    block = config.get("weight_block_size")
    if block is not None and list(block) != BLOCK:
        raise ModelError(f"config.json: weight_block_size {block} is not supported: weft reads {BLOCK}")
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise ModelError(f"config.json: activation_scheme {scheme!r} is neither dynamic nor static")
    if config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelError(f"config.json: fmt {config['fmt']!r} is not supported: weft reads e4m3")
    weights = ("tensor",) if block is None else ("block",)
    kept = len(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
    return Quantization("fp8", scheme, weights=weights, kept=kept)


_READERS = {"compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "fbgemm_fp8": _fbgemm, "fp8": _fp8}
