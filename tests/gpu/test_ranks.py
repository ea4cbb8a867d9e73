"""Ranks on GPUs, one each: the demo model's answers, the same tokens each time, and what becomes of who loses one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.engine.demo.corpus import prompt_ids
from weft.engine.demo.skills import held_out
from weft.engine.errors import RankLost

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OPTIONS = {
    "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_pages": 1000, "tuning_seconds": 0,
    "host_kv_gib": 0.1,
}  # fmt: skip
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 400, n) for n in (5, 40, 130, 300, 17)]
ASKED = (
    GREEDY,
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 5, "top_k": 20, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 7, "min_p": 0.05, "allowed_token_ids": tuple(range(20, 300))},
)


@pytest.fixture(scope="module")
def two() -> Iterator[Harness]:
    harness = Harness("demo", tensor_parallel_size=2, **OPTIONS)
    yield harness
    harness.engine.close()


def served(harness: Harness) -> list[list[int]]:
    handles = [
        harness.add(prompt, max_tokens=40, ignore_eos=True, **asked)
        for prompt, asked in zip(PROMPTS, ASKED, strict=True)
    ]
    harness.run()
    return [harness.tokens[handle] for handle in handles]


def test_the_demo_model_answers(two: Harness) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    examples = [e for skill in ("add", "subtract", "sort", "reverse", "count") for e in held_out(skill, 20, 5)]
    handles = [two.add(prompt_ids(tokenizer, e), max_tokens=60, **GREEDY) for e in examples]
    two.run()
    answers = [tokenizer.decode(two.tokens[h], skip_special_tokens=True) for h in handles]
    assert sum(a == e.answer for a, e in zip(answers, examples, strict=True)) >= len(examples) - 1


def test_a_run_repeats_itself(two: Harness) -> None:
    two.engine.reset_prefix_cache()
    first = served(two)
    two.engine.reset_prefix_cache()
    assert served(two) == first


def test_a_rank_that_is_killed_ends_the_engine_at_once() -> None:
    harness = Harness("demo", tensor_parallel_size=2, **OPTIONS)
    for prompt in PROMPTS:
        harness.add(prompt, max_tokens=5000, ignore_eos=True, **GREEDY)
    for _ in range(20):
        harness.step()
    assert harness.engine.ranks is not None
    os.kill(harness.engine.ranks._processes[1].pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RankLost, match="rank 1: its process ended"):
        _to_the_end(harness)
    assert time.monotonic() - begun < 10


def _to_the_end(harness: Harness) -> None:
    while harness.engine.has_work:
        harness.engine.check()
        harness.step()
