"""`read_quantization` and `read_integers`: read the `quantization_config` of FP8 and of low-bit integer checkpoints."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.parts import Integers, Quantization

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


def read_integers(config: Config) -> Integers | None:
    """Return the format, or None if the config describes another one. Raises `ModelError`, one line, if unsupported."""
    method = config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else "")
    reader = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _packed_tensors}.get(str(method))
    return None if reader is None else reader(config)


def _awq(config: Config) -> Integers:
    version, bits = str(config.get("version") or "gemm").lower(), _bits(config, ("bits", "w_bit"), (4,), "AWQ")
    if version != "gemm":
        raise ModelError(f"AWQ's version {version!r} is not read: weft reads gemm, the most common one")
    if config.get("zero_point", True) is not True:
        raise ModelError("AWQ without zero points (zero_point: false) is not read")
    return Integers("awq", bits, _group_size(config, ("group_size", "q_group_size")))


def _gptq(config: Config) -> Integers:
    form = str(config.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"GPTQ's checkpoint_format {form!r} is not read: weft reads gptq and gptq_v2")
    if str(config.get("pack_dtype") or "int32") != "int32":
        raise ModelError(f"GPTQ's pack_dtype {config['pack_dtype']!r} is not read: weft reads int32")
    bits = _bits(config, ("bits",), (2, 4, 8), "GPTQ")
    size, act_order = _group_size(config, ("group_size",)), bool(config.get("desc_act"))
    return Integers("gptq", bits, size, act_order=act_order, zeros_less_one=form == "gptq")


def _packed_tensors(config: Config) -> Integers | None:
    _refuse_transforms(config)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or config.get("format") != "pack-quantized":
        return None
    check_groups(groups)
    found = {_packed_group(name, group) for name, group in groups.items()}
    if len(found) > 1:
        raise ModelError("config.json: config_groups of different widths or groups are not supported")
    return next(iter(found), None)


def check_groups(groups: Config) -> None:
    """Raise `ModelError` if config_groups are not made of objects."""
    for name, group in groups.items():
        if not isinstance(group, dict):
            raise ModelError(f"config.json: {name} of its config_groups is not an object")
        for what in ("weights", "input_activations"):
            if not isinstance(group.get(what) or {}, dict):
                raise ModelError(f"config.json: {what} of {name} are not an object")


def _refuse_transforms(config: Config) -> None:
    """Refuse rotations of activations; rotations of weights are already applied in the files."""
    groups = (config.get("transform_config") or {}).get("config_groups") or {}
    rotated = {str(of.get("location")) for group in groups.values() for of in group.get("apply") or ()}
    if rotated := rotated - {"weight_input", "weight_output"}:
        raise ModelError(
            f"config.json: its transform_config rotates activations ({', '.join(sorted(rotated))}): unsupported"
        )


def _packed_group(name: str, group: Config) -> Integers:
    weights = group.get("weights") or {}
    if group.get("input_activations"):
        raise ModelError(f"config.json: {name} quantizes activations of packed weights, which is not supported")
    strategy = weights.get("strategy")
    if weights.get("type") != "int" or strategy not in ("group", "channel"):
        raise ModelError(
            f"config.json: weights of {name} are {weights.get('type')} with the strategy {strategy}; for packed "
            "weights weft reads int with group or channel"
        )
    bits = _bits(weights, ("num_bits",), (4, 8), "compressed-tensors")
    size = _group_size(weights, ("group_size",)) if strategy == "group" else 0
    symmetric, order = bool(weights.get("symmetric", True)), weights.get("actorder")
    return Integers("compressed-tensors", bits, size, symmetric, act_order=order in (True, "group", "dynamic"))


def _bits(config: Config, keys: tuple[str, ...], read: tuple[int, ...], of: str) -> int:
    bits = next((config[key] for key in keys if key in config), None)
    if bits not in read:
        raise ModelError(f"{of} of {bits} bits is not read: weft reads {', '.join(map(str, read))}")
    return int(bits)


def _group_size(config: Config, keys: tuple[str, ...]) -> int:
    size = next((config[key] for key in keys if key in config), 128)
    if size is None or int(size) == -1:
        return 0
    if int(size) < 1:
        raise ModelError(f"config.json: {keys[0]} {size} is neither -1 nor above zero")
    return int(size)
