"""`read_integers`: reads the `quantization_config` of a checkpoint with low-bit integer matrices."""

from __future__ import annotations

from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.parts import Integers

Config = dict[str, Any]


def read_integers(config: Config) -> Integers | None:
    """Return the format, or None if the config describes another one. Raises `ModelError`, one line, if unsupported."""
    method = config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else "")
    reader = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}.get(str(method))
    return None if reader is None else reader(config)


def _awq(config: Config) -> Integers:
    version, bits = str(config.get("version") or "gemm").lower(), _bits(config, ("bits", "w_bit"), (4,), "AWQ")
    if version != "gemm":
        raise ModelError(f"AWQ's version {version!r} is not read: weft reads gemm, the most common one")
    if config.get("zero_point", True) is not True:
        raise ModelError("AWQ without zero points (zero_point: false) is not read")
    return Integers("awq", bits, _group(config, ("group_size", "q_group_size")))


def _gptq(config: Config) -> Integers:
    form = str(config.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(f"GPTQ's checkpoint_format {form!r} is not read: weft reads gptq and gptq_v2")
    if str(config.get("pack_dtype") or "int32") != "int32":
        raise ModelError(f"GPTQ's pack_dtype {config['pack_dtype']!r} is not read: weft reads int32")
    bits = _bits(config, ("bits",), (2, 4, 8), "GPTQ")
    size, act_order = _group(config, ("group_size",)), bool(config.get("desc_act"))
    return Integers("gptq", bits, size, act_order=act_order, zeros_less_one=form == "gptq")


def _compressed_tensors(config: Config) -> Integers | None:
    _refuse_transforms(config)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or config.get("format") != "pack-quantized":
        return None
    check_groups(groups)
    found = {_packed(name, group) for name, group in groups.items()}
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


def _packed(name: str, group: Config) -> Integers:
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
    size = _group(weights, ("group_size",)) if strategy == "group" else 0
    symmetric, order = bool(weights.get("symmetric", True)), weights.get("actorder")
    return Integers("compressed-tensors", bits, size, symmetric, act_order=order in (True, "group", "dynamic"))


def _bits(config: Config, keys: tuple[str, ...], read: tuple[int, ...], of: str) -> int:
    bits = next((config[key] for key in keys if key in config), None)
    if bits not in read:
        raise ModelError(f"{of} of {bits} bits is not read: weft reads {', '.join(map(str, read))}")
    return int(bits)


def _group(config: Config, keys: tuple[str, ...]) -> int:
    size = next((config[key] for key in keys if key in config), 128)
    if size is None or int(size) == -1:
        return 0
    if int(size) < 1:
        raise ModelError(f"config.json: {keys[0]} {size} is neither -1 nor above zero")
    return int(size)
