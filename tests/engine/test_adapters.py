"""LoRA adapters: answers of every family equal those of the base model with the adapter merged in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from lora_files import merged, save_adapter
from tiny import FAMILIES
from transformers import AutoModelForCausalLM

from weft.engine.model.adapter import adapter_digest

Made = Callable[[str], Path]

BY_DAY = ("llama2", "qwen3", "gemma3", "phi4", "granite", "opt", "gpt2", "mixtral")
"""plain, norms of heads, post-norms and windows, fused modules, scaled residuals, norms with bias, transposed, experts"""
EVERY = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
OPTIONS: dict[str, Any] = {"page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
MAX_TOKENS = 8


def _modules(paths: dict[str, Path]) -> list[str]:
    return [f"{name}={path}" for name, path in paths.items()]


def _check(harness: Harness, handle: int, prompt: np.ndarray, model: Any) -> None:
    """Every token is the argmax of the reference after those before it."""
    tokens = harness.tokens[handle]
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate((prompt, tokens)))[None]).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("family", EVERY)
def test_mixed_batches_answer_as_the_merged_models(tiny_model: Made, tmp_path: Path, family: str) -> None:
    path = tiny_model(family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    paths = {
        "one": save_adapter(tmp_path / "one", base, seed=1),
        "two": save_adapter(tmp_path / "two", base, seed=2, rank=8, alpha=16, use_rslora=True),
    }
    models = [base, *merged(base, paths.values())]
    digests = ["", *map(adapter_digest, paths.values())]
    harness = Harness(path, lora_modules=_modules(paths), **OPTIONS)
    harness.poison_pages()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 199, length) for length in (5, 17, 40)]
    for _ in range(2):  # the second time behind cached prefixes
        handles = [
            (harness.add(prompt, adapter=digest, max_tokens=MAX_TOKENS, **GREEDY), prompt, model)
            for prompt in prompts
            for digest, model in zip(digests, models, strict=True)
        ]
        harness.run()
        for handle, prompt, model in handles:
            _check(harness, handle, prompt, model)
        answers = {tuple(harness.tokens[handle]) for handle, prompt, _ in handles if prompt is prompts[-1]}
        assert len(answers) == 3, "the adapters change nothing"
    assert sum(harness.cached[handle] for handle, _, _ in handles) > 0
