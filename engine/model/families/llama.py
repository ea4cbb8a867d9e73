"""Llama 2, 3 and 3.1+; Yi and DeepSeek LLM declare themselves as Llama. The spec's defaults are its parts."""

from __future__ import annotations

from weft.engine.model.families.family import Family, TensorNames

LLAMA = Family(("LlamaForCausalLM",))
IDEFICS3 = Family(
    ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
    names=TensorNames(other_prefixes=("model.text_model.",), unused=("model.vision_model.", "model.connector.")),
)
"""Vision-language models (`model/vision/idefics3.py`) whose language model is a Llama."""
