"""LLaVA: a vision tower before a language model of another family (`model/vision/llava.py`)."""

from __future__ import annotations

from typing import Any

from weft.engine.model.families.family import Config, Family, TensorNames
from weft.engine.model.families.llama import LLAMA
from weft.engine.model.families.mistral import MISTRAL
from weft.engine.model.families.qwen import QWEN2

_LANGUAGES = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2}


def _parts(config: Config) -> dict[str, Any]:
    return _LANGUAGES[config["model_type"]].parts(config)


_COMMON = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}

LLAVA = Family(
    (
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
    ),
    _parts,
    TensorNames(
        other_prefixes=("model.language_model.", "language_model.model."),
        unused=tuple(
            prefix + part
            for prefix in ("", "model.")
            for part in ("vision_tower.", "multi_modal_projector.", "image_newline")
        ),
    ),
    # Published files leave out what equals the defaults of `transformers`.
    languages={
        "llama": {**_COMMON, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
        "mistral": {
            **_COMMON, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 32000,
            "max_position_embeddings": 131072, "sliding_window": 4096,
        },
        "qwen2": {
            **_COMMON, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936,
            "max_position_embeddings": 32768,
        },
    },
)  # fmt: skip
