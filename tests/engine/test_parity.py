"""Every native family, some in every condition (at night all): each greedy token is that of `transformers`.

One forward of the reference over a prompt and its answer checks all its tokens at once: if each of them is the argmax
after those before it, `generate` gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import FAMILIES, RECURRENT
from transformers import AutoModelForCausalLM

MAX_TOKENS = 14
OPTIONS: dict[str, Any] = {"page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}

BY_DAY = ("llama2", "mistral", "mixtral", "gpt-oss", "gemma3", "qwen3", "phi4", "opt")
"""in every condition: plain, windows in all layers and in some, experts, sinks, norms of heads, positions that depend
on the length, learned ones. The additions of a family are in its layers, not in the path of its pages."""
EVERY = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]

Made = Callable[[str], Path]


def _pages(family: str, number: int) -> int:
    """`number`, and room for the states of all requests, each of which takes more pages than a prompt."""
    return number + 600 * (family in RECURRENT)


@cache
def _reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _prompts(seed: int, *lengths: int) -> list[np.ndarray]:
    """Random prompts. Longer ones exceed the windows of the families that have them (24)."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 199, length) for length in lengths]


def _run(harness: Harness, prompts: list[np.ndarray], max_tokens: int = MAX_TOKENS) -> list[int]:
    """Serve them together and check every token. Returns how many tokens of each came from the cache."""
    handles = [harness.add(p, max_tokens=max_tokens, **GREEDY) for p in prompts]
    harness.run()
    model = _reference(harness.engine.config.model_path)
    for handle, prompt in zip(handles, prompts, strict=True):
        tokens = harness.tokens[handle]
        with torch.inference_mode():
            logits = model(torch.from_numpy(np.concatenate((prompt, tokens)))[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        assert len(tokens) == max_tokens or tokens[-1] in harness.engine.spec.eos_token_ids
    return [harness.cached[h] for h in handles]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_chunks(tiny_model: Made, family: str) -> None:
    in_chunks_of(7, tiny_model(family), _pages(family, 80))


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("chunk", [1, 64])
def test_in_chunks_of_any_size(tiny_model: Made, family: str, chunk: int) -> None:
    in_chunks_of(chunk, tiny_model(family), _pages(family, 80))


def in_chunks_of(chunk: int, model: Path, pages: int = 80) -> None:
    harness = Harness(model, **{**OPTIONS, "max_num_batched_tokens": chunk}, num_pages=pages)
    harness.poison_pages()
    if chunk == 1:
        _run(harness, _prompts(1, 5, 30), 6)
        return
    _run(harness, _prompts(2, 3, 19, 50, 70))
    assert len({t for tokens in harness.tokens.values() for t in tokens}) > 8, "too few tokens to tell anything"


@pytest.mark.parametrize("family", EVERY)
def test_with_a_cached_prefix(tiny_model: Made, family: str) -> None:
    harness = Harness(tiny_model(family), **OPTIONS, num_pages=_pages(family, 80))
    harness.poison_pages()
    (prompt,) = _prompts(3, 61)
    _run(harness, [prompt])
    longer = np.concatenate((prompt, harness.tokens[0], _prompts(4, 5)[0]))
    assert min(_run(harness, [longer, prompt])) >= 60


@pytest.mark.parametrize("family", EVERY)
def test_when_requests_are_preempted(tiny_model: Made, family: str) -> None:
    harness = Harness(tiny_model(family), **OPTIONS, num_pages=22, prefix_caching=family in ("llama2", "mistral"))
    harness.expect_short_outputs()
    harness.poison_pages()
    _run(harness, _prompts(5, 30, 11, 40, 26, 9), 24)
    assert harness.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("family", EVERY)
def test_with_pages_that_return_from_the_host(tiny_model: Made, family: str) -> None:
    harness = Harness(tiny_model(family), **OPTIONS, num_pages=_pages(family, 60), host_kv_gib=0.02)
    tiers, pool = harness.engine.tiers, harness.engine.scheduler.pool
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    prompts = _prompts(6, 45, 33)
    _run(harness, prompts)
    tiers.flush(60)
    pool.evict_all()
    harness.poison_pages()
    assert min(_run(harness, prompts)) >= 32
    assert harness.engine.stats().scheduler.tiers["host"].hit_tokens >= 76
