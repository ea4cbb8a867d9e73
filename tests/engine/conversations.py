"""Conversations of several turns with the demo model, each with its own facts, for tests of the KV tiers."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from harness import GREEDY, Harness
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import Example, held_out, user


class Answers(NamedTuple):
    tokens: list[list[int]]
    cached: list[int]
    """tokens of each prompt that were not computed"""
    right: int


class Conversations:
    """`count` conversations at once. The first prompts take about `context_tokens`; every turn requests the fact
    again."""

    def __init__(self, count: int, context_tokens: int, answer_tokens: int = 12) -> None:
        self.tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
        examples = held_out("recall", 2 * count, 9, context_tokens=context_tokens)
        self.examples = [e for e in examples if e.messages[-1]["content"].endswith("?")][:count]
        assert len(self.examples) == count
        self.prompts = [np.array(prompt_ids(self.tokenizer, e)) for e in self.examples]
        self._answer_tokens = answer_tokens

    def ask(self, harness: Harness) -> Answers:
        handles = [harness.add(p, max_tokens=self._answer_tokens, **GREEDY) for p in self.prompts]
        harness.run()
        tokens = [harness.tokens[h] for h in handles]
        texts = [self.tokenizer.decode(t, skip_special_tokens=True) for t in tokens]
        right = sum(text == e.answer for text, e in zip(texts, self.examples, strict=True))
        return Answers(tokens, [harness.cached[h] for h in handles], right)

    def go_on(self, answers: Answers) -> None:
        """The prompts of the next turn: the conversation so far, and the question again."""
        questions = [re.split(r"[.\n] *", e.messages[-1]["content"])[-1] for e in self.examples]
        turns = [prompt_ids(self.tokenizer, Example("recall", [user(q)], "", ""))[1:] for q in questions]
        histories = zip(self.prompts, answers.tokens, turns, strict=True)
        self.prompts = [np.concatenate(parts) for parts in histories]
