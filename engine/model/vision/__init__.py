"""The vision towers of multimodal models: what an image's tiles give, and how the language model takes it.

Owns: one file per family, and `load_vision`, which builds a tower and its projector with `transformers`' own code.
May import: the files of model/; torch and `transformers` once a tower is loaded.
Never: decodes or resizes a picture, or knows a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.engine.errors import ModelError
from weft.engine.model.directory import WRONG_KIND
from weft.engine.model.vision.family import Vision
from weft.engine.model.vision.gemma3 import Gemma3
from weft.engine.model.vision.idefics3 import Idefics3
from weft.engine.model.vision.llava import llava_of
from weft.engine.model.vision.mistral3 import Mistral3
from weft.engine.model.vision.qwen_vl import QwenVl

FAMILIES: dict[str, Callable[[dict[str, Any]], Vision]] = {
    "Idefics3ForConditionalGeneration": Idefics3.of,
    "SmolVLMForConditionalGeneration": Idefics3.of,
    "Qwen2VLForConditionalGeneration": QwenVl.of,
    "Qwen2_5_VLForConditionalGeneration": QwenVl.of,
    "Qwen3VLForConditionalGeneration": QwenVl.of,
    "Qwen3VLMoeForConditionalGeneration": QwenVl.of,
    "Qwen3_5ForConditionalGeneration": QwenVl.of,
    "Qwen3_5MoeForConditionalGeneration": QwenVl.of,
    "Gemma3ForConditionalGeneration": Gemma3.of,
    "Mistral3ForConditionalGeneration": Mistral3.of,
    "LlavaForConditionalGeneration": llava_of,
    "LlavaNextForConditionalGeneration": llava_of,
    "LlavaOnevisionForConditionalGeneration": llava_of,
}
"""Families by the architecture of a `config.json`."""


def vision_of(config: dict[str, Any]) -> Vision | None:
    """Return the vision part of a model with this `config.json`, or None if it has none that weft serves. Raises
    `ModelError`."""
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    if family is None or not config.get("vision_config"):
        return None
    try:
        return family(config)
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]}") from None
    except WRONG_KIND as error:
        raise ModelError(f"config.json has a value of the wrong kind: {error}") from None
