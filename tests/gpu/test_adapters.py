"""LoRA adapters on a GPU: answers are those of the base model with the adapter merged in. Four families interpreted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from interpreted import interpreted_gpu
from lora_files import merged, save_adapter
from transformers import AutoModelForCausalLM

from weft.engine.model.adapter import adapter_digest

Made = Callable[[str], Path]
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float16", "page_size": 16, "max_num_seqs": 8}
MAX_TOKENS = 8


def _adapters(path: Path, tmp_path: Path) -> tuple[dict[str, Path], list[Any]]:
    """Three adapters, and the merged models: base, one, two, three."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    paths = {
        "one": save_adapter(tmp_path / "one", base, seed=1),
        "two": save_adapter(tmp_path / "two", base, seed=2, rank=24, alpha=16, use_rslora=True),
        "three": save_adapter(tmp_path / "three", base, seed=3, rank=8, rank_pattern={"o_proj|dense|c_proj": 3}),
    }
    return paths, [base, *merged(base, paths.values())]


def _errors(harness: Harness, handle: int, prompt: np.ndarray, model: Any, rounded: Any) -> tuple[list[float], ...]:
    """Return the errors of the tokens' log-probabilities, how much likelier the likeliest were, and what the errors of
    the `rounded` model are."""
    tokens = harness.tokens[handle]
    ids = torch.from_numpy(np.concatenate((prompt, tokens)))[None]
    at = torch.arange(len(tokens)), torch.tensor(tokens)
    with torch.inference_mode():
        exact = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        near = rounded(ids.to(rounded.device)).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
    served = torch.tensor([float(entry.values[0]) for entry in harness.logprobs[handle]])
    errors = (served - exact[at]).abs(), exact.amax(-1) - exact[at], (near - exact)[at].abs()
    return tuple(error.tolist() for error in errors)


def _check(
    harness: Harness, requests: list[tuple[np.ndarray, str, Any]], tokens: int, rounded: dict[int, Any]
) -> str:  # fmt: skip
    """Errors are about those of the merged models in 16 bits. rounded: these, by the id of the exact model."""
    handles = [
        harness.add(prompt, adapter=digest, max_tokens=tokens, logprobs=1, ignore_eos=True, **GREEDY)
        for prompt, digest, _ in requests
    ]
    harness.run()
    found: list[list[float]] = [[], [], []]
    for handle, (prompt, _, model) in zip(handles, requests, strict=True):
        for all_of, own in zip(found, _errors(harness, handle, prompt, model, rounded[id(model)]), strict=True):
            all_of += own
    errors, regrets, expected = (np.array(values) for values in found)
    text = f"errors {errors.mean():.4f}, at most {errors.max():.4f}; of 16 bits {expected.mean():.4f}, at most "
    text += f"{expected.max():.4f}; likeliest {(regrets == 0).mean():.3f}, at most {regrets.max():.4f}"
    assert errors.mean() < 2 * expected.mean() + 0.005, text
    assert errors.max() < 3 * expected.max() + 0.05, text
    assert regrets.max() < 3 * expected.max() + 0.05, text
    return text


def _rounded(models: list[Any], device: str) -> dict[int, Any]:
    dtype = torch.float16 if device == "cuda" else torch.bfloat16  # a CPU may not multiply float16
    return {id(model): copy.deepcopy(model).to(device, dtype) for model in models}


INTERPRETED = {"llama2": (5, 32), "opt": (5, 32), "gemma3": (5, 32), "granite": (140, 160)}
"""Tokens of a prompt and of an iteration. 140 tokens reach a bucket whose last layer drops rows."""


@pytest.mark.nightly
@pytest.mark.parametrize("family", INTERPRETED)
def test_interpreted_answers_are_those_of_the_merged_models(
    tiny_model: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    if torch.cuda.is_available():
        pytest.skip("the next test runs on the GPU")
    path = tiny_model(family)
    paths, models = _adapters(path, tmp_path)
    digests = ["", *map(adapter_digest, paths.values())]
    rng, (length, batched) = np.random.default_rng(3), INTERPRETED[family]
    requests = [(rng.integers(3, 199, length), digest, model) for digest, model in zip(digests, models, strict=True)]
    with interpreted_gpu(monkeypatch):
        modules = [f"{name}={path}" for name, path in paths.items()]
        options = {**OPTIONS, "num_pages": 40, "max_num_seqs": 4, "max_num_batched_tokens": batched}
        harness = Harness(path, lora_modules=modules, max_lora_rank=24, prefix_caching=False, **options)
        harness.poison_pages()
        rounded = _rounded(models, "cpu")
        _check(harness, requests[2:] if length > 100 else requests, 2, rounded)
        _check(harness, requests[:1], 2, rounded)


@pytest.mark.parametrize(
    "family", ["llama2", "gemma3", "opt", "qwen3", "phi4", "granite", "gpt2", "olmo2", "starcoder2"]
)
def test_answers_are_those_of_the_merged_models(tiny_model: Made, tmp_path: Path, family: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = tiny_model(family)
    paths, models = _adapters(path, tmp_path)
    digests = ["", *map(adapter_digest, paths.values())]
    modules = [f"{name}={path}" for name, path in paths.items()]
    # Two slots for three adapters, which replace each other. Buckets from 129 tokens on drop rows.
    harness = Harness(path, lora_modules=modules, max_loras=2, num_pages=400, max_num_batched_tokens=320, **OPTIONS)
    harness.poison_pages()
    rng = np.random.default_rng(3)
    mixed = [
        (rng.integers(3, 199, length), digest, model)
        for length in (5, 17, 60)
        for digest, model in zip(digests, models, strict=True)
    ]
    rounded = _rounded(models, "cuda")
    print(family, _check(harness, mixed, MAX_TOKENS, rounded))
    print(family, "with prefix hits", _check(harness, mixed, MAX_TOKENS, rounded))
    print(family, "without adapters", _check(harness, mixed[:1], MAX_TOKENS, rounded))
