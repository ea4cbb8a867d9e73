"""Greedy tokens equal those of `transformers`, for any chunk size, neighbours and memory.

As in `test_parity`, one forward of the reference over a prompt and its answer checks all its tokens at once.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import reference_tokens
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from weft.engine.demo import MODEL_PATH
from weft.engine.wire.messages import Finish
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import held_out

MAX_TOKENS = 24
LLAMA_LIKE = ("llama2", "llama3.1", "mistral", "yi", "deepseek-llm", "qwen2", "qwen3")
"""the others: `test_parity`"""
BY_DAY = ("mistral", "yi")
"""one token at a time, which takes as many steps as there are tokens"""


@cache
def _transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _workload(count: int) -> list[np.ndarray]:
    """Prompts of mixed lengths, half of them with a shared beginning."""
    rng = np.random.default_rng(count)
    shared = rng.integers(3, 199, 48)
    prompts = []
    for i in range(count):
        own = rng.integers(3, 199, int(rng.integers(1, 70)))
        prompts.append(np.concatenate((shared[: int(rng.integers(8, 48))], own)) if i % 2 else own)
    return prompts


@cache
def _best(path: Path, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> list[int]:
    """The token that `transformers` chooses at each position, after those before it."""
    with torch.inference_mode():
        logits = _transformers(path)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


def _judge(harness: Harness, path: Path, prompts: list[np.ndarray]) -> None:
    """Each token is the best one after those before it, and the answer ends where it has to, or was aborted."""
    ends = harness.engine.spec.eos_token_ids
    for handle, prompt in enumerate(prompts):
        tokens = harness.tokens[handle]
        assert _best(path, tuple(prompt.tolist()), tuple(tokens)) == tokens
        assert not set(tokens[:-1]) & set(ends)
        if harness.finish[handle] is Finish.ABORT:
            assert len(tokens) <= MAX_TOKENS
        else:
            stopped = tokens[-1] in ends
            assert harness.finish[handle] is (Finish.STOP if stopped else Finish.LENGTH)
            assert stopped or len(tokens) == MAX_TOKENS


@pytest.mark.parametrize(
    ("chunk", "family"),
    [
        pytest.param(chunk, family, marks=pytest.mark.nightly if chunk == 1 and family not in BY_DAY else ())
        for chunk in (1, 7, 64)
        for family in LLAMA_LIKE
    ],
)
def test_tokens_equal_transformers(tiny_model, family: str, chunk: int) -> None:
    path = tiny_model(family)
    prompts = _workload(10)
    harness = Harness(path, max_num_batched_tokens=chunk, page_size=8, num_pages=120)
    harness.poison_pages()
    for prompt in prompts:
        harness.add(prompt, max_tokens=MAX_TOKENS, **GREEDY)
    harness.run()
    assert list(harness.tokens) == list(range(10))
    _judge(harness, path, prompts)


@cache
def _demo_prompts() -> list[np.ndarray]:
    """Real questions of mixed lengths."""
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    examples = [e for skill in ("add", "sort", "copy", "memory", "echo", "story") for e in held_out(skill, 6, 2)]
    examples += held_out("recall", 4, 2, context_tokens=300)
    return [np.array(prompt_ids(tokenizer, e)) for e in examples]


def _of_families_and_chunks() -> list[Any]:
    """Small chunks take as many steps as there are chunks: one or two families stand for the others in the day run."""
    cases = []
    for family in (*LLAMA_LIKE, "demo"):
        one = pytest.mark.slow if family == "mistral" else pytest.mark.nightly
        few = pytest.mark.slow if family in BY_DAY else pytest.mark.nightly
        for chunk, marks in ((1, one), (7, few), (64, ())):
            night = pytest.mark.nightly if family == "demo" else marks  # minutes of CPU time
            cases.append(pytest.param(family, chunk, marks=night, id=f"{family}-{chunk}"))
    return cases


@pytest.mark.parametrize(("family", "chunk"), _of_families_and_chunks())
def test_tokens_survive_preemption_prefix_reuse_and_aborts(tiny_model, family: str, chunk: int) -> None:
    path = MODEL_PATH if family == "demo" else tiny_model(family)
    prompts = _demo_prompts() if family == "demo" else _workload(40)
    assert len(prompts) == 40
    # The longest request needs nearly all pages: only a few of the 40 fit at once.
    pages = max(len(p) for p in prompts) // 4 + MAX_TOKENS // 4 + 3
    harness = Harness(path, max_num_batched_tokens=chunk, page_size=4, num_pages=pages, async_scheduling=chunk != 7)
    harness.expect_short_outputs()
    harness.poison_pages()
    for prompt in prompts:
        harness.add(prompt, max_tokens=MAX_TOKENS, **GREEDY)
    victims = iter(range(0, 40, 3))

    def abort_some(step: int) -> None:
        if step % 6 == 0 and (victim := next(victims, None)) is not None:
            harness.engine.abort(victim)
            harness.engine.abort(victim)

    harness.run(abort_some)
    _judge(harness, path, prompts)
    assert Finish.ABORT in harness.finish.values()
    assert harness.engine.scheduler.stats().prefix_hit_tokens > 0
    if chunk == 64:  # smaller chunks let each request end before many have begun
        assert harness.engine.scheduler.preemptions > 0


def test_the_demo_models_tokens_are_those_of_transformers() -> None:
    """At night forty of them, with little memory."""
    prompts = _demo_prompts()[::6]
    harness = Harness(MODEL_PATH, max_num_batched_tokens=64, page_size=4, num_pages=300)
    handles = [harness.add(prompt, max_tokens=8, **GREEDY) for prompt in prompts]
    harness.run()
    model = _transformers(MODEL_PATH)
    assert [harness.tokens[handle] for handle in handles] == [reference_tokens(model, p, 8) for p in prompts]


def test_second_turn_reuses_the_pages_of_the_first(tiny_model) -> None:
    path = tiny_model("mistral")
    model = _transformers(path)
    prompt = np.random.default_rng(5).integers(3, 199, 60)
    harness = Harness(path, page_size=8, num_pages=64)
    first = harness.add(prompt, max_tokens=20, ignore_eos=True, **GREEDY)
    harness.run()
    follow = np.concatenate((prompt, harness.tokens[first], [9, 10, 11]))
    second = harness.add(follow, max_tokens=10, **GREEDY)
    harness.run()
    # The last sampled token was never fed back: 79 positions were computed, 9 full pages.
    assert harness.cached[second] == 72
    assert harness.tokens[second] == reference_tokens(model, follow, 10)


def test_a_fully_cached_prompt_still_computes_its_last_token(tiny_model) -> None:
    path = tiny_model("yi")
    prompt = np.arange(3, 35)
    harness = Harness(path, page_size=8, num_pages=64)
    for _ in range(2):
        harness.add(prompt, max_tokens=6, **GREEDY)
        harness.run()
    assert harness.tokens[0] == harness.tokens[1]
    assert harness.cached == {0: 0, 1: 24}


def test_tenants_with_different_salts_share_nothing(tiny_model) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64)
    for salt in ("a", "b", "a"):
        harness.add(np.arange(3, 35), salt=salt, max_tokens=2, **GREEDY)
        harness.run()
    assert harness.cached == {0: 0, 1: 0, 2: 24}


def test_prefix_caching_off_reuses_nothing(tiny_model) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64, prefix_caching=False)
    for _ in range(2):
        harness.add(np.arange(3, 35), max_tokens=2, **GREEDY)
        harness.run()
    assert harness.cached == {0: 0, 1: 0}


def test_bfloat16_stays_close_to_transformers(tiny_model) -> None:
    path = tiny_model("llama3.1")
    model = _transformers(path)
    prompt = np.random.default_rng(3).integers(3, 199, 64)
    harness = Harness(path, dtype="bfloat16", page_size=16, num_pages=32, prefix_caching=False)
    handle = harness.add(prompt, max_tokens=0, prompt_logprobs=0)
    harness.run()
    with torch.inference_mode():
        logits = model(torch.from_numpy(prompt)[None]).logits[0].log_softmax(-1)
    exact = logits[torch.arange(63), torch.from_numpy(prompt[1:])]
    got = torch.tensor([entry.values[0] for entry in harness.prompt_logprobs[handle]])
    assert float((got - exact).abs().mean()) < 0.15


def test_aborted_requests_leave_the_queue(tiny_model) -> None:
    harness = Harness(tiny_model("yi"), max_num_seqs=1, page_size=8, num_pages=64)
    harness.add([5], max_tokens=200, ignore_eos=True, **GREEDY)
    harness.step()
    for _ in range(500):
        harness.engine.abort(harness.add([5, 6, 7]))
    assert harness.engine.scheduler.num_waiting == 0
    assert len(harness.engine.scheduler._waiting) <= 65
    harness.run()
