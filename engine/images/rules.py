"""`rule_of`: the image rule of a model; `read_preprocessor`: the settings of its image processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.images.gemma3 import Gemma3Rule
from weft.engine.images.idefics3 import Idefics3Rule
from weft.engine.images.llava import llava_rule
from weft.engine.images.pixtral import PixtralRule
from weft.engine.images.plan import Encode, ImageRule
from weft.engine.images.qwen_vl import QwenVLRule

_RULES: dict[str, Callable[[dict[str, Any], dict[str, Any], Encode], ImageRule]] = {
    "gemma3": Gemma3Rule,
    "idefics3": Idefics3Rule,
    "llava": llava_rule,
    "llava_next": llava_rule,
    "llava_onevision": llava_rule,
    "mistral3": PixtralRule,
    "qwen2_5_vl": QwenVLRule,
    "qwen2_vl": QwenVLRule,
    "qwen3_5": QwenVLRule,
    "qwen3_5_moe": QwenVLRule,
    "qwen3_vl": QwenVLRule,
    "qwen3_vl_moe": QwenVLRule,
    "smolvlm": Idefics3Rule,
}

FAMILIES = tuple(_RULES)
"""Values of `model_type` with a rule."""


def rule_of(config: dict[str, Any], preprocessor: dict[str, Any] | None, encode: Encode) -> ImageRule | None:
    """The image rule of a checkpoint; None if its family has none. Raises `ValueError` if its files disagree."""
    rule = _RULES.get(str(config.get("model_type")))
    if rule is None or "vision_config" not in config:
        return None
    if preprocessor is None:
        raise ValueError("there is no preprocessor_config.json")
    try:
        return rule(config, preprocessor, encode)
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"its configuration lacks a value or has one of another type: {error}") from error


def serves_images(folder: Path) -> bool:
    """Return whether a model directory is of a family with a rule. Never raises."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and str(config.get("model_type")) in _RULES and "vision_config" in config


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """The image processor's settings, from either file that may hold them. Raises `ValueError`."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if not (path := folder / name).is_file():
            continue
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError(f"{name} is not an object")
        inner = found.get("image_processor")
        if isinstance(inner, dict):
            return inner
        if name == "preprocessor_config.json":
            return found
    return None
