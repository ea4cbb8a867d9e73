"""Llama 2, 3 and 3.1+; Yi and DeepSeek LLM declare themselves as Llama. The spec's defaults are its parts."""

from __future__ import annotations

from weft.engine.model.families.family import Family

LLAMA = Family(("LlamaForCausalLM",))
