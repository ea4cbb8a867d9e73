"""Drafts on a GPU: which samples count, and engines whose answers do not depend on drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draft_heads
import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

pytest.importorskip("triton")
from interpreted import interpreted_gpu
from test_draft_equality import ask_all, compare, drafting, make

from weft.engine.model.directory import read_spec
from weft.engine.runner.cuda import cuda_eagle3, cuda_runner
from weft.engine.runner.iteration.batch import Batch, StepResult, Verified
from weft.kernels.sampling.verified import remember_verified

HERE = torch.cuda.is_available()
EXACT: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "batch_invariant": True, "tuning_seconds": 0, "page_size": 16
}  # fmt: skip
SAMPLED: dict[str, Any] = {"temperature": 1.1, "top_p": 0.95}
ASKED: tuple[dict[str, Any], ...] = (
    {**GREEDY, "logprobs": 1},
    {**SAMPLED, "seed": 3, "logprobs": 0},
    {**SAMPLED, "frequency_penalty": 0.8, "presence_penalty": 0.3, "repetition_penalty": 1.2, "seed": 5},
    {**GREEDY, "logit_bias": {17: 3.0, 40: -5.0}, "min_tokens": 4, "stop_token_ids": (17, 23)},
)


@pytest.mark.parametrize("requests", [1, 9, 150])
def test_the_newest_sample_of_each_request_stays(requests: int, device: str) -> None:
    rng = np.random.default_rng(requests)
    length = rng.integers(1, 9, requests)
    rows = np.repeat(np.arange(requests), length)
    samples = len(rows)
    first = np.searchsorted(rows, rows)
    expected = np.where(np.append(rows[1:] == rows[:-1], False), rng.integers(0, 3, samples), -1).astype(np.int32)
    tokens = np.where(rng.random(samples) < 0.8, np.maximum(expected, 0), rng.integers(0, 3, samples))
    bad = rng.random(samples) < 0.1
    verified = Verified(first, expected)
    reached = verified.reached(verified.ends(tokens, bad))
    newest = reached & verified.ends(tokens, bad)
    slots = rng.permutation(requests + 5)[:requests]
    wanted = np.full(requests + 5, -7)
    wanted[slots[rows[newest]]] = tokens[newest]
    assert newest.sum() == requests

    def up(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        padding = np.full(11, 2)  # rows beyond the count
        return torch.from_numpy(np.concatenate((values, padding))).to(dtype).to(device)

    last = torch.full((requests + 5,), -7, device=device)
    counts = torch.zeros(samples + 11, dtype=torch.int32, device=device)
    remember_verified(
        up(tokens, torch.int64), up(bad, torch.int64), up(first, torch.int32), up(expected, torch.int32),
        up(slots[rows], torch.int32), torch.tensor([samples], dtype=torch.int32, device=device), last, reached=counts,
    )  # fmt: skip
    assert last.tolist() == wanted.tolist()
    assert counts[:samples].tolist() == reached.astype(int).tolist()


def _prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, 190, n) for n in (5, 21, 37, 9)]


def _answer(harness: Harness, tokens: int, like: Harness | None = None) -> Harness:
    """Answer every request, with drafts if there are answers to draft from."""
    harness.poison_pages()
    drafter = None if like is None else drafting(harness, like, np.random.default_rng(1))
    for prompt, asked in zip(_prompts(), ASKED, strict=True):
        harness.add(prompt, **{"max_tokens": tokens, "ignore_eos": True, **asked})
    harness.run()
    if drafter is not None:
        assert drafter.accepted > tokens
        assert drafter.accepted < drafter.drafted
    return harness


def _check_equal(path: Path, tokens: int, **options: Any) -> None:
    """Answers are equal with and without drafts, to the bit."""
    sizes = {
        "device": "cuda", "dtype": "bfloat16", "page_size": 16, "num_pages": 60, "max_num_seqs": 4,
        "max_num_batched_tokens": 128, "batch_invariant": True, "tuning_seconds": 0, "speculation": "suffix",
    }  # fmt: skip
    drafted_with = {**sizes, **options}
    plain = _answer(Harness(path, **{**drafted_with, "speculation": "off"}), tokens)
    drafted = _answer(Harness(path, **drafted_with), tokens, plain)
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    assert drafted.logprobs == plain.logprobs


def _head(path: Path) -> Path:
    """A random EAGLE-3 head for a tiny model."""
    spec = read_spec(path)
    shape = {
        "hidden_size": spec.hidden_size, "target_hidden_size": spec.hidden_size, "vocab_size": spec.vocab_size,
        "draft_vocab_size": 150, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    return draft_heads.random_head(path.parent / f"{path.name}-head", **shape)


def _check_model_drafts(path: Path, head: Path, tokens: int, **options: Any) -> tuple[int, int]:
    """Answers are equal with and without drafts of a head, to the bit. Returns drafted and accepted tokens."""
    sizes = {
        "device": "cuda", "dtype": "bfloat16", "page_size": 16, "num_pages": 60, "max_num_seqs": 4,
        "max_num_batched_tokens": 128, "batch_invariant": True, "tuning_seconds": 0, **options,
    }  # fmt: skip
    fixed = {"num_speculative_tokens": 3, "enable_adaptive_verification": False}
    config = {"method": "eagle3", "model": str(head), **fixed}
    plain = _answer(Harness(path, **sizes), tokens)
    drafted = _answer(Harness(path, **sizes, speculative_config=json.dumps(config)), tokens)
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    assert drafted.logprobs == plain.logprobs
    stats = drafted.engine.stats().speculation
    return stats.draft_tokens["model"], stats.accepted_tokens["model"]


@pytest.mark.nightly
@pytest.mark.skipif(HERE, reason="a GPU runs all of them")
def test_an_interpreted_engine_answers_alike_with_a_head(
    device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device == "cpu"
    path = tiny_model("llama3.1")
    with interpreted_gpu(monkeypatch):
        drafted, _ = _check_model_drafts(path, _head(path), 9, dtype="float16")
    assert drafted > 20


@pytest.mark.nightly
@pytest.mark.skipif(HERE, reason="a GPU runs all of them")
def test_an_interpreted_engine_answers_alike_with_drafts(
    device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device == "cpu"
    with interpreted_gpu(monkeypatch):
        _check_equal(tiny_model("llama3.1"), 9, dtype="float16")


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma3", "qwen3", "gpt-oss", "qwen3-moe"])
def test_each_family_answers_alike_with_drafts(family: str, tiny_model: Callable[[str], Path]) -> None:
    _check_equal(tiny_model(family), 48)


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"enforce_eager": True}, {"async_scheduling": False},
        {"dtype": "float16"}, {"page_size": 64},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_the_engine_with_drafts(options: dict[str, Any], tiny_model: Callable[[str], Path]) -> None:
    _check_equal(tiny_model("qwen3"), 48, **options)


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
def test_every_sampling_field_gives_the_same_tokens_and_log_probabilities() -> None:
    plain = make(**EXACT)
    ask_all(plain)
    drafted = make(**EXACT, speculation="suffix")
    drafter = drafting(drafted, plain, np.random.default_rng(0))
    ask_all(drafted)
    compare(drafted, plain)
    assert drafter.accepted > 100


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize("speculation", ["suffix", "ngram", "auto"])
def test_drafts_of_text_change_no_token(speculation: str) -> None:
    answers = []
    for how in ("off", speculation):
        harness = make(**EXACT, speculation=how)
        for i in range(12):
            harness.add([5, 60, 70, 80] * (3 + i), max_tokens=60, ignore_eos=True, **({} if i % 2 else GREEDY), seed=i)
        harness.run()
        answers.append(harness.tokens)
    assert answers[0] == answers[1]


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama2", "qwen3", "qwen3-moe"])
def test_each_family_answers_alike_with_a_head(family: str, tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model(family)
    drafted, _ = _check_model_drafts(path, _head(path), 48)
    assert drafted > 200


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [{"quantization": "fp8"}, {"enforce_eager": True}, {"page_size": 64}],
    ids=lambda given: next(iter(given)),
)
def test_options_of_the_engine_with_a_head(options: dict[str, Any], tiny_model: Callable[[str], Path]) -> None:
    path = tiny_model("qwen3")
    drafted, _ = _check_model_drafts(path, _head(path), 48, **options)
    assert drafted > 200


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
def test_drafts_made_ahead_are_those_made_at_once(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen3")
    head = _head(path)
    wait, seen = cuda_runner.CudaInFlight.wait, list[list[int]]()

    def noted(in_flight: cuda_runner.CudaInFlight) -> StepResult:
        result = wait(in_flight)
        seen.append(result.batch.token_ids.tolist())
        return result

    monkeypatch.setattr(cuda_runner.CudaInFlight, "wait", noted)
    _check_model_drafts(path, head, 20, page_size=64)
    ahead, seen[:] = list(seen), []

    def not_ahead(drafter: cuda_eagle3.CudaEagle3, batch: Batch) -> None:
        drafter._made[batch.slots] = 0

    monkeypatch.setattr(cuda_eagle3.CudaEagle3, "draft_ahead", not_ahead)
    _check_model_drafts(path, head, 20, page_size=64)
    assert seen == ahead
