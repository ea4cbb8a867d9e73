"""What lm-eval sends: batches of token ids with echo and logprobs. The oracle is transformers on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from live import Daemon, running
from transformers import AutoModelForCausalLM

import weft.engine

MODEL = Path(weft.engine.__file__).parent / "demo/model"
LENGTHS = (1, 2, 5, 64, 65, 300, 1500)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "--dtype", "float32", "--max-num-batched-tokens", "256") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(6, 2048, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0].log_softmax(-1) for prompt in prompts]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_log_probabilities_are_exact(
    daemon: Daemon, prompts: list[list[int]], expected: list[torch.Tensor], max_tokens: int
) -> None:
    body: dict[str, Any] = {
        "model": "demo", "prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": max_tokens,
        "temperature": 0, "seed": 1234,
    }  # fmt: skip
    answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    for prompt, oracle, choice in zip(prompts, expected, choices, strict=True):
        scores = choice["logprobs"]
        assert len(scores["token_logprobs"]) == len(prompt) + max_tokens
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        rows = torch.arange(len(prompt) - 1)
        own = oracle[rows, torch.tensor(prompt[1:], dtype=torch.int64)]
        got = torch.tensor(scores["token_logprobs"][1 : len(prompt)])
        assert torch.allclose(got, own, atol=2e-4), (got - own).abs().max()
        for i, top in enumerate(scores["top_logprobs"][1 : len(prompt)]):
            assert max(top.values()) == pytest.approx(float(oracle[i].max()), abs=2e-4)
            assert scores["token_logprobs"][i + 1] in top.values(), "the token itself is among the best, identically"


def test_greedy_continuations_are_told_from_others(daemon: Daemon, prompts: list[list[int]]) -> None:
    """lm-eval's `is_greedy`: every token of a continuation is the best at its place."""
    prompt = prompts[2]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "return_token_ids": True,
                            "ignore_eos": True}  # fmt: skip
    ids = httpx.post(daemon.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]["token_ids"]
    scoring = {"prompt": [*prompt, *ids], "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    scores = httpx.post(daemon.url + "/v1/completions", json=scoring, timeout=60).json()["choices"][0]["logprobs"]
    at = slice(len(prompt), len(prompt) + len(ids))
    for value, top in zip(scores["token_logprobs"][at], scores["top_logprobs"][at], strict=True):
        assert value == max(top.values())
