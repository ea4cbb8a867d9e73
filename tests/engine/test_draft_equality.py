"""Drafts change no token and, with `--batch-invariant`, no bit of a log-probability, with every sampling field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness
from scripted_drafts import ScriptedDrafter
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.engine.scheduling.verification import Verification
from weft.engine.wire import grammar_text
from weft.engine.wire.thinking import Thinking

TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["ordinary", "special"]}},
    "required": ["first_name", "kind"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.2, "top_p": 0.97}


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(f"<|begin|><|user|>{text}<|end|><|assistant|>", add_special_tokens=False).ids)


SUM, SAY = ids_of("What is 12 + 30?"), ids_of("Tell me something about the sea.")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "logprobs": 3},
    "greedy, to the end": {**GREEDY, "max_tokens": 60},
    "temperature 1": {"temperature": 1.0, "seed": 1, "logprobs": 0},
    "top-p": {**HOT, "seed": 2, "logprobs": 1},
    "top-k": {"temperature": 1.5, "top_k": 7, "seed": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.02, "seed": 4, "logprobs": 2},
    "presence": {**GREEDY, "presence_penalty": 1.5, "logprobs": 1, "ignore_eos": True},
    "frequency": {**HOT, "frequency_penalty": 0.9, "seed": 5, "ignore_eos": True},
    "repetition": {**GREEDY, "repetition_penalty": 1.4, "ignore_eos": True, "logprobs": 2},
    "all penalties": {
        **HOT, "presence_penalty": -0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "seed": 6, "logprobs": 4,
    },
    "bias": {**GREEDY, "logit_bias": {50: 9.0, 60: 8.5, 70: -3.0}, "logprobs": 1},
    "early end": {**HOT, "logit_bias": {1: 12.0, 2: 12.0}, "min_tokens": 7, "stop_token_ids": (1, 2), "seed": 7},
    "stop token": {**HOT, "stop_token_ids": tuple(range(20, 120)), "seed": 8, "logprobs": 1},
    "scored ids": {**GREEDY, "logprobs": 2, "logprob_token_ids": (5, 9, 11), "max_tokens": 9},
    "allowed": {**HOT, "allowed_token_ids": tuple(range(0, 400, 3)), "seed": 9, "logprobs": 1},
    "bad words": {**HOT, "bad_words": ("th", "e", " an"), "seed": 10},
    "bad words and allowed": {**GREEDY, "bad_words": ("a",), "allowed_token_ids": tuple(range(100, 600))},
    "schema": {**HOT, "grammar": grammar_text.json_schema(SCHEMA), "max_tokens": 60, "seed": 11, "logprobs": 1},
    "greedy schema": {**GREEDY, "grammar": grammar_text.json_schema(SCHEMA), "max_tokens": 60},
    "cut schema": {**GREEDY, "grammar": grammar_text.json_schema(SCHEMA), "max_tokens": 9},
    "regex": {**HOT, "grammar": grammar_text.regex("[0-9]{3}-[a-z]{2}( yes| yesterday){1,4}"), "seed": 12},
    "choice": {**GREEDY, "grammar": grammar_text.choice(["yes, of course", "no, never"]), "min_tokens": 3},
    "grammar and bad words": {
        **HOT, "grammar": grammar_text.regex("[a-f ]{9,30}"), "bad_words": ("fa", "b"), "seed": 13, "max_tokens": 40,
    },
    "thinking": {**GREEDY, "thinking": Thinking(6, (), (4000,), (77, 78, 79)), "ignore_eos": True, "logprobs": 1},
    "long thinking": {**HOT, "thinking": Thinking(13, (), (4000,), (77, 78, 79)), "seed": 14, "ignore_eos": True},
    "scored prompt": {**GREEDY, "prompt_logprobs": 1, "logprobs": 1},
    "one token": {**GREEDY, "max_tokens": 1},
    "two tokens": {**HOT, "max_tokens": 2, "seed": 15},
}  # fmt: skip


def make(**options: Any) -> Harness:
    return Harness(MODEL_PATH, **{"max_num_seqs": 32, "page_size": 8, "num_pages": 600, **options})


def drafting(harness: Harness, like: Harness, rng: np.random.Generator, most: int = 4) -> ScriptedDrafter:
    """Let an engine verify drafts that repeat the output of another one, as far as the draw goes."""
    scheduler = harness.engine.scheduler
    prompt_len = scheduler.slots.prompt_len

    def truth(handle: int, text: list[int]) -> int:
        slot = int(np.flatnonzero(scheduler.slots.handle == handle)[-1])
        said, at = like.tokens[handle], len(text) - int(prompt_len[slot])
        return said[at] if at < len(said) else 99

    def right() -> int:
        return int(rng.choice([0, 1, 2, 9, 9]))

    drafter = ScriptedDrafter(scheduler.slots, truth, lambda token: (token + 1) % 4000, most, right)
    scheduler.verification = Verification(scheduler.slots, scheduler.pool, drafter)
    return drafter


def ask_all(harness: Harness) -> None:
    for i, params in enumerate(REQUESTS.values()):
        harness.add(SUM if i % 2 else SAY, **{"max_tokens": 24, **params})
    harness.run()


def differing(one: Harness, other: Harness, what: Callable[[Harness, int], Any]) -> list[str]:
    return [name for handle, name in enumerate(REQUESTS) if what(one, handle) != what(other, handle)]


@pytest.fixture(scope="module")
def plain() -> Harness:
    harness = make(batch_invariant=True)
    ask_all(harness)
    return harness


def compare(harness: Harness, plain: Harness) -> None:
    assert not differing(harness, plain, lambda h, i: h.tokens[i])
    assert not differing(harness, plain, lambda h, i: h.finish[i])
    assert not differing(harness, plain, lambda h, i: h.logprobs[i])
    assert not differing(harness, plain, lambda h, i: h.prompt_logprobs[i])


def test_outputs_and_log_probabilities_are_the_same_bits(plain: Harness) -> None:
    harness = make(batch_invariant=True)
    drafter = drafting(harness, plain, np.random.default_rng(0))
    ask_all(harness)
    compare(harness, plain)
    assert harness.steps < 0.8 * plain.steps
    verification = harness.engine.scheduler.verification
    assert verification is not None
    assert 0.3 < drafter.accepted / drafter.drafted < 0.9
    assert verification.forced_accepted == verification.forced_drafted > 30


def test_forced_tokens_of_grammars_need_no_drafter(plain: Harness) -> None:
    harness = make(batch_invariant=True)
    scheduler = harness.engine.scheduler
    verification = scheduler.verification = Verification(scheduler.slots, scheduler.pool, None)
    ask_all(harness)
    compare(harness, plain)
    assert verification.forced_accepted > 30
