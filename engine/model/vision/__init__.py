"""The vision towers of multimodal models: what an image's tiles give, and how the language model takes it.

Owns: one file per family, and `load_vision`, which builds a tower and its projector with `transformers`' own code.
May import: the files of model/; torch and `transformers` once a tower is loaded.
Never: decodes or resizes a picture, or knows a prompt.
"""

from __future__ import annotations

from typing import Any

from weft.engine.model.vision.family import Vision
from weft.engine.model.vision.gemma3 import Gemma3
from weft.engine.model.vision.idefics3 import Idefics3
from weft.engine.model.vision.mistral3 import Mistral3
from weft.engine.model.vision.qwen_vl import QwenVl

FAMILIES: dict[str, type[Vision]] = {
    "Idefics3ForConditionalGeneration": Idefics3,
    "SmolVLMForConditionalGeneration": Idefics3,
    "Qwen2VLForConditionalGeneration": QwenVl,
    "Qwen2_5_VLForConditionalGeneration": QwenVl,
    "Qwen3VLForConditionalGeneration": QwenVl,
    "Gemma3ForConditionalGeneration": Gemma3,
    "Mistral3ForConditionalGeneration": Mistral3,
}
"""Families by the architecture of a `config.json`."""


def vision_of(config: dict[str, Any]) -> Vision | None:
    """Return the vision part of a model with this `config.json`, or None if it has none that weft serves. Raises
    `ModelError`."""
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    return family.of(config) if family is not None and config.get("vision_config") else None
