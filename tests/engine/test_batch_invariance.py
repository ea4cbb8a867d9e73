"""`--batch-invariant` on a CPU: log-probabilities are bit-identical in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.wire.messages import TokenLogprobs

DTYPES = ("float32", "bfloat16")
Output = tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]


def engine(model: Any, dtype: str, **options: Any) -> Harness:
    return Harness(
        model, **{"dtype": dtype, "num_pages": 300, "prefix_caching": False, "batch_invariant": True, **options}
    )


def ask(harness: Harness, prompt: np.ndarray, i: int = 0) -> int:
    how = GREEDY if i % 2 else {"temperature": 0.8, "seed": i, "top_p": 0.9}
    return harness.add(prompt, max_tokens=6, logprobs=3, ignore_eos=True, **how)


def output(harness: Harness, handle: int) -> Output:
    return harness.tokens[handle], harness.logprobs[handle], harness.prompt_logprobs[handle]


def prompts_of(count: int, longest: int, vocabulary: int = 2000) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(6, vocabulary, int(rng.integers(2, longest))) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_four_requests_in_a_batch_answer_as_each_alone(dtype: str) -> None:
    prompts = prompts_of(24, 200)
    alone, together = engine("demo", dtype), engine("demo", dtype)
    one_by_one = []
    for i, prompt in enumerate(prompts):
        one_by_one.append(ask(alone, prompt, i))
        alone.run()
    handles = [ask(together, prompt, i) for i, prompt in enumerate(prompts)]
    together.run()
    assert [output(together, h) for h in handles] == [output(alone, h) for h in one_by_one]


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3", "qwen3-moe", "gpt-oss", "gemma3", "phi3", "gpt2"])
def test_it_holds_for_each_kind_of_layer_and_for_scored_prompts(tiny_model: Callable[[str], Path], family: str) -> None:
    prompts = prompts_of(9, 120, 190)
    alone, together = (engine(tiny_model(family), "float32", page_size=8) for _ in range(2))

    def scored(harness: Harness, prompt: np.ndarray) -> int:
        return harness.add(prompt, max_tokens=4, logprobs=2, prompt_logprobs=2, ignore_eos=True, **GREEDY)

    one_by_one = []
    for prompt in prompts:
        one_by_one.append(scored(alone, prompt))
        alone.run()
    handles = [scored(together, prompt) for prompt in prompts]
    together.run()
    assert [output(together, h) for h in handles] == [output(alone, h) for h in one_by_one]


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_a_cached_prefix_change_nothing(dtype: str) -> None:
    prompt = np.random.default_rng(2).integers(6, 2000, 400)
    whole = engine("demo", dtype, max_num_batched_tokens=1024)
    chunks = engine("demo", dtype, max_num_batched_tokens=128)
    cached = engine("demo", dtype, prefix_caching=True)
    cached.add(prompt[:200], max_tokens=1)
    cached.run()
    handles = [ask(harness, prompt, 1) for harness in (whole, chunks, cached)]
    for harness in (whole, chunks, cached):
        harness.run()
    first, *others = (output(harness, handle) for harness, handle in zip((whole, chunks, cached), handles, strict=True))
    assert others == [first, first]
    assert cached.cached[handles[2]] == 192


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"prefix_caching": True},
        pytest.param({"speculation": "suffix"}, marks=pytest.mark.nightly),
        pytest.param({"prefix_caching": True, "host_kv_gib": 0.01}, marks=pytest.mark.nightly),
    ],
    ids=["recomputed", "cached", "drafts", "host"],
)
def test_a_preempted_request_answers_as_alone(options: dict[str, Any]) -> None:
    """Some answers are random, penalized or without some words."""
    prompts, many = prompts_of(4, 40), {"max_tokens": 18, "ignore_eos": True, "logprobs": 2}
    hows: list[dict[str, Any]] = [
        GREEDY, {"temperature": 0.8, "seed": 3}, {"temperature": 0.9, "seed": 4, "presence_penalty": 1.0},
        {"temperature": 1.0, "seed": 5, "bad_words": ("a", "12")},
    ]  # fmt: skip

    def add(harness: Harness, i: int) -> int:
        return harness.add(prompts[i], **many, **hows[i % len(hows)])

    alone = engine("demo", "bfloat16", **options)
    together = engine("demo", "bfloat16", **{"num_pages": 40, "page_size": 16, **options})
    one_by_one = []
    for i in range(len(prompts)):
        one_by_one.append(add(alone, i))
        alone.run()
    handles = [add(together, i) for i in range(len(prompts))]
    scheduler = together.engine.scheduler

    def preempt(step: int) -> None:
        if step in (8, 17):
            for slot in scheduler.slots.decoding()[-2:].tolist():
                scheduler._preempt(slot)

    together.run(preempt)
    assert scheduler.preemptions > 3
    assert [output(together, h) for h in handles] == [output(alone, h) for h in one_by_one]


def test_an_answer_in_the_next_turns_prompt_is_read_as_a_prompt() -> None:
    first, more = prompts_of(1, 100)[0], list(range(50, 60))
    cold, warm = (engine("demo", "float32", prefix_caching=True, page_size=8) for _ in range(2))
    handle = warm.add(first, max_tokens=40, ignore_eos=True, **GREEDY)
    warm.run()
    turn = [*first, *warm.tokens[handle], *more]
    handles = [ask(harness, np.array(turn, np.int32), 1) for harness in (cold, warm)]
    for harness in (cold, warm):
        harness.run()
    assert output(warm, handles[1]) == output(cold, handles[0])
    assert warm.cached[handles[1]] == len(first) // 8 * 8


def test_position_dependent_blocks_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, requested = CpuExecutor._probe, []

    def odd(self: CpuExecutor, token_ids: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        requested.append(len(token_ids))
        made = probe(self, token_ids, attended)
        if len(token_ids) > 4:
            made[-1, 0] = torch.nextafter(made[-1, 0], torch.tensor(9e9))
        return made

    monkeypatch.setattr(CpuExecutor, "_probe", odd)
    harness = engine("demo", "float32")
    harness.add(range(10, 20), max_tokens=1)
    harness.run()
    assert harness.engine.runner._executor.block_rows == 4
    assert sorted(set(requested), reverse=True) == [32, 16, 8, 4]


def test_without_the_option_all_rows_run_at_once() -> None:
    harness = engine("demo", "float32", batch_invariant=False)
    harness.add(range(10, 20), max_tokens=1)
    harness.run()
    assert harness.engine.runner._executor.block_rows == 0
