"""`AdapterConfig`: reads the `adapter_config.json` of a LoRA adapter in PEFT's format.

It refuses what it cannot serve."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.engine.errors import LONGEST, ModelError, one_line

FILE = "adapter_config.json"
MAX_BYTES = 1 << 20  # Maximum size of the file.
MAX_PATTERNS = 10_000
LARGEST = 1e30  # Largest number in the file.

HARMLESS = frozenset((
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "layers_to_transform",
    "layers_pattern", "target_modules", "exclude_modules", "fan_in_fan_out", "auto_mapping", "peft_version",
    "init_lora_weights", "megatron_core", "qalora_group_size", "runtime_config", "bias", "modules_to_save",
    "target_parameters", "lora_bias", "ensure_weight_tying", "r", "lora_alpha", "use_rslora", "rank_pattern",
    "alpha_pattern", "peft_type", "eva_config", "loftq_config",
))  # fmt: skip
"""Fields that change nothing here, or are read elsewhere: the names of the tensors say which modules are adapted."""
KEPT_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` whose training starts from the unchanged base model."""

# A key that a backtracking matcher could take exponential time for has a repeated group.
_REPEATED_GROUP = re.compile(r"\)[*+{?]|[*+}][*+{]")
_UNBOUNDED = re.compile(r"[*+{]")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Rank and scale of each module of an adapter."""

    rank: int
    alpha: float
    root: bool  # Scale by alpha / sqrt(rank) (rsLoRA), not alpha / rank.
    ranks: tuple[tuple[re.Pattern[str], float], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]

    def of(self, module: str) -> tuple[int, float]:
        """Return (rank, scale) of a module. The first pattern that matches its name counts, as in PEFT."""
        rank = int(_first(self.ranks, module, self.rank))
        alpha = _first(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.root else rank)


def _first(patterns: tuple[tuple[re.Pattern[str], float], ...], module: str, otherwise: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)


def read_adapter_config(path: Path, max_rank: int) -> AdapterConfig:
    """Read the configuration in a directory. Raises `ModelError`, one line, for anything that would be ignored."""
    file = path / FILE
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ModelError(f"{file} is larger than {MAX_BYTES:,} bytes")
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} has no {FILE}: it is no LoRA adapter in PEFT's format") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {one_line(error)}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file} is not a JSON object")
    return _checked(raw, max_rank)


def _checked(raw: dict[str, Any], max_rank: int) -> AdapterConfig:
    if (kind := raw.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"{FILE}: peft_type {_shown(kind)} is not supported; only LORA is")
    if (init := raw.get("init_lora_weights", True)) not in KEPT_BASE:
        raise ModelError(
            f"{FILE}: init_lora_weights {_shown(init)} changed the base model's weights: "
            "convert the adapter to plain LoRA (PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
        )
    active = sorted(
        name for name, value in raw.items() if name not in HARMLESS and value not in (None, False, {}, [], "")
    )
    if active:
        raise ModelError(
            f"{FILE}: {', '.join(active[:3])[:LONGEST]} is not supported; merge the adapter into its base model"
        )
    rank = _number(raw, "r", 8)
    config = AdapterConfig(
        int(rank), _number(raw, "lora_alpha", 8), raw.get("use_rslora") is True,
        _patterns(raw, "rank_pattern"), _patterns(raw, "alpha_pattern"),
    )  # fmt: skip
    for each in (rank, *(value for _, value in config.ranks)):
        if not 1 <= each <= max_rank or each != int(each):
            raise ModelError(f"{FILE}: rank {each:g} is outside 1 to {max_rank} (--max-lora-rank)")
    return config


def _shown(value: Any) -> str:
    return repr(value)[:LONGEST]


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
        raise ModelError(f"{FILE}: {name} is {_shown(value)}, must be a number")
    return float(value)


def _patterns(raw: Mapping[str, Any], name: str) -> tuple[tuple[re.Pattern[str], float], ...]:
    given = raw.get(name) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise ModelError(f"{FILE}: {name} is not an object with at most {MAX_PATTERNS:,} patterns")
    return tuple((_pattern(name, key), _number(given, key, 0)) for key in given)


def _pattern(name: str, key: str) -> re.Pattern[str]:
    """Compile a module pattern as PEFT does. Refuses those that could take long to match."""
    if len(key) > 500 or _REPEATED_GROUP.search(key) or len(_UNBOUNDED.findall(key)) > 3:
        raise ModelError(f"{FILE}: {name} has a pattern too complex to match safely: {_shown(key)}")
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise ModelError(f"{FILE}: {name} has an invalid pattern {_shown(key)}: {error}") from None
