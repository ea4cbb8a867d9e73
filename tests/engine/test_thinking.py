"""`Thinking`: after the budget of thinking tokens its end marks are forced, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness
from test_grammar import PROMPT

from weft.engine.demo import MODEL_PATH
from weft.engine.errors import RequestError
from weft.engine.wire import grammar_text
from weft.engine.wire.thinking import PATIENCE, Thinking, ThoughtCount

PLAIN = {"max_tokens": 24, "ignore_eos": True, **GREEDY}
END = (5, 6, 7)
NEVER = 2000
"""an id that the model does not generate by itself"""


@pytest.fixture(scope="module")
def demo() -> Harness:
    return Harness(MODEL_PATH, max_num_seqs=16, page_size=8, num_pages=96)


@pytest.fixture(scope="module")
def free(demo: Harness) -> list[int]:
    """The output without a budget."""
    return demo.tokens[run(demo)]


def run(harness: Harness, thinking: Thinking | None = None, **params: object) -> int:
    handle = harness.add(PROMPT, thinking=thinking, **{**PLAIN, **params})
    harness.run()
    return handle


@pytest.mark.parametrize("budget", [0, 1, 2, 9])
def test_the_end_is_forced_after_the_budget(demo: Harness, free: list[int], budget: int) -> None:
    bounded = demo.add(PROMPT, thinking=Thinking(budget, (), (NEVER,), END), **PLAIN)
    together = demo.add(PROMPT, **PLAIN)
    demo.run()
    tokens = demo.tokens[bounded]
    assert tokens[:budget] == free[:budget]
    assert tokens[budget : budget + 3] == [*END]
    assert len(tokens) == 24
    assert demo.tokens[together] == free
    # The model's own continuation follows.
    again = demo.add([*PROMPT, *tokens[: budget + 3]], **{**PLAIN, "max_tokens": 21 - budget})
    demo.run()
    assert demo.tokens[again] == tokens[budget + 3 :]


def test_thinking_that_ends_in_time_is_unchanged(demo: Harness, free: list[int]) -> None:
    at = next(i for i in range(2, 12) if free[i] not in free[:i])
    for budget in (at, 24):
        assert demo.tokens[run(demo, Thinking(budget + 1, (), (free[at],), END))] == free


def test_an_answer_without_thinking_is_unchanged(demo: Harness, free: list[int]) -> None:
    assert demo.tokens[run(demo, Thinking(1, (NEVER,), (NEVER + 1,), END))] == free


def test_the_budget_counts_from_the_start_of_thinking(demo: Harness, free: list[int]) -> None:
    at = next(i for i in range(PATIENCE - 1) if free[i] not in free[:i] and i)
    tokens = demo.tokens[run(demo, Thinking(4, (free[at],), (NEVER,), END))]
    assert tokens[: at + 5] == free[: at + 5]
    assert tokens[at + 5 : at + 8] == [*END]


def test_within_the_budget_and_after_it_is_launched_ahead(demo: Harness) -> None:
    handle = demo.add(PROMPT, thinking=Thinking(8, (), (NEVER,), END), **{**PLAIN, "max_tokens": 40})
    ahead: list[tuple[int, int]] = []
    while handle not in demo.finish:
        demo.step()
        slots = demo.engine.scheduler.slots
        ahead.append((len(demo.tokens[handle]), int(slots.in_flight.max())))
        assert not slots.masked.any() or 7 <= len(demo.tokens[handle]) <= 11
    demo.run()
    assert any(flying for count, flying in ahead if 1 <= count < 7)
    assert any(flying for count, flying in ahead if count > 12)


def test_preemption_changes_nothing() -> None:
    params: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True, "logit_bias": {3: -100.0}}
    params["stop_token_ids"] = (3,)  # a token that is never generated: admission cannot know how long they will be
    bounds = [Thinking(budget, (), (NEVER,), END) for budget in (3, 8, 15, 22, 30, 60)]
    roomy = Harness(MODEL_PATH, max_num_seqs=6, page_size=8, num_pages=96, prefix_caching=False)
    short = Harness(MODEL_PATH, max_num_seqs=6, page_size=8, num_pages=14, prefix_caching=False)
    short.expect_short_outputs()
    for harness in (roomy, short):
        for k, thinking in enumerate(bounds):
            harness.add(PROMPT[:9], seed=k, thinking=thinking, **params)
        harness.run()
    assert short.engine.scheduler.preemptions
    assert short.tokens == roomy.tokens
    for handle, thinking in enumerate(bounds[:5]):
        assert tuple(short.tokens[handle][thinking.budget : thinking.budget + 3]) == END


def test_tokens_that_a_constraint_forbids_are_not_forced(demo: Harness, free: list[int]) -> None:
    ids = tuple(set(free) - set(END))
    assert demo.tokens[run(demo, Thinking(4, (), (NEVER,), END), allowed_token_ids=ids)] == free
    digits = grammar_text.regex("[0-9]{8}")
    handle = run(demo, Thinking(2, (), (NEVER,), END), grammar=digits)
    assert len(demo.tokens[handle]) <= 9
    assert demo.finish[handle].name == "STOP"


def test_a_grammar_continues_after_the_forced_tokens(demo: Harness) -> None:
    from test_grammar import TOKENIZER, text_of

    digit = TOKENIZER.encode("7", add_special_tokens=False).ids
    thinking = Thinking(3, (), (NEVER,), tuple(digit))
    handle = run(demo, thinking, grammar=grammar_text.regex("[a-z ]{3,40}7[a-c]"))
    assert "7" in text_of(demo, handle)


def test_invalid_tokens_are_refused(demo: Harness) -> None:
    with pytest.raises(RequestError, match="thinking has a token id outside"):
        demo.add(PROMPT, thinking=Thinking(1, (), (1,), (10**6,)))
    demo.tokens.popitem()


def test_thoughts_are_counted_without_their_marks() -> None:
    def count(tokens: list[int], begin: tuple[int, ...] = (1, 2), again: bool = False) -> tuple[int, bool]:
        following = ThoughtCount(begin, (8, 9), again=again)
        for token in tokens:
            following.see(token)
        return following.tokens, following.over

    assert count([1, 2, 5, 5, 8, 9, 5, 1, 2, 5]) == (2, True)
    assert count([1, 2, 5, 5, 8, 9, 5, 1, 2, 5], again=True) == (3, False)
    assert count([5, 5, 8, 9], begin=()) == (2, True)
    assert count([5, 8, 5], begin=()) == (3, False)
    assert count([5] * PATIENCE + [1, 2, 5]) == (0, True)
    assert not np.any([count([5])[1], count([1])[1]])
