"""Non-finite logits end only their own request, with `NONFINITE`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from list_device import ListEngine

from weft.engine.scheduling.events import NOT_FINITE
from weft.engine.wire.messages import Finish
from weft.kernels.reference import sampling

POISON = 17
"""a token whose embedding is NaN"""
OPTIONS = [GREEDY, {"seed": 3}, {"seed": 4, "top_k": 5, "top_p": 0.5}, {**GREEDY, "repetition_penalty": 1.5}]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_rows_are_distinguished_from_masked_ones(value: float) -> None:
    logits = torch.randn(6, 100)
    logits[1, 99] = value
    logits[2, 5:] = -torch.inf  # a mask
    logits[3] = -torch.inf
    logits[4, 0] = -value
    want = [False, True, False, True, value != value, False]
    assert sampling.nonfinite(logits).tolist() == want


def poisoned(tiny_model: Callable[[str], Path], value: float, **options: Any) -> Harness:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=200, **options)
    weights = harness.engine.runner._executor.weights
    assert weights.lm_head is not weights.embedding
    with torch.inference_mode():
        weights.embedding[POISON] = value
    return harness


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_request_ends_and_its_neighbours_stay_right(tiny_model: Callable[[str], Path], value: float) -> None:
    rng = np.random.default_rng(0)
    prompts = [np.where((p := rng.integers(3, 199, 20)) == POISON, 18, p) for _ in range(8)]
    quiet = {"max_tokens": 12, "logit_bias": {POISON: -100.0}, "ignore_eos": True}
    alone = poisoned(tiny_model, value)
    mixed = poisoned(tiny_model, value)
    want = [alone.add(p, **quiet, **OPTIONS[i % 4]) for i, p in enumerate(prompts)]
    alone.run()
    got, spoilt = [], []
    for i, p in enumerate(prompts):
        spoilt.append(mixed.add([*p[:5], POISON, *p[5:]], **quiet, **OPTIONS[i % 4], logprobs=2 if i % 2 else None))
        got.append(mixed.add(p, **quiet, **OPTIONS[i % 4]))
    mixed.run()
    assert [mixed.tokens[h] for h in got] == [alone.tokens[h] for h in want]
    assert {mixed.finish[h] for h in spoilt} == {Finish.NONFINITE}
    assert not any(mixed.tokens[h] for h in spoilt)
    assert mixed.engine.stats().scheduler.nonfinite_logits == 8


def test_a_request_with_nan_while_decoding_keeps_its_earlier_tokens(tiny_model: Callable[[str], Path]) -> None:
    harness = poisoned(tiny_model, float("nan"))
    handle = harness.add([5, 6, 7], max_tokens=20, logit_bias={POISON: 100.0}, **GREEDY)
    harness.run()
    assert (harness.tokens[handle], harness.finish[handle]) == ([POISON], Finish.NONFINITE)


def test_no_page_of_a_nan_iteration_becomes_a_prefix(tiny_model: Callable[[str], Path]) -> None:
    harness = poisoned(tiny_model, float("nan"))
    harness.add([POISON, *range(20, 60)], **GREEDY)
    harness.run()
    assert len(harness.engine.scheduler.pool.index) == 0


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_scored_prompt_with_nan_is_not_an_answer(tiny_model: Callable[[str], Path], max_tokens: int) -> None:
    harness = poisoned(tiny_model, float("nan"), max_num_batched_tokens=16)
    handle = harness.add([5, 6, POISON, *range(20, 60)], max_tokens=max_tokens, prompt_logprobs=1, **GREEDY)
    fine = harness.add([5, 6, *range(20, 60)], max_tokens=max_tokens, prompt_logprobs=1, **GREEDY)
    harness.run()
    assert (harness.finish[handle], harness.finish[fine]) == (Finish.NONFINITE, Finish.LENGTH)
    assert not harness.prompt_logprobs[handle]
    assert len(harness.prompt_logprobs[fine]) == 41


def test_a_grammar_is_not_blamed() -> None:
    harness = Harness("demo")
    grammar = '{"grammars": [{"lark_grammar": "start: /[0-9]{1,4}/"}]}'
    with torch.inference_mode():
        harness.engine.runner._executor.weights.norm[:] = float("nan")
    handle = harness.add([5, 6, 7], max_tokens=20, grammar=grammar, **GREEDY)
    events = []
    while harness.engine.has_work:
        if (outputs := harness.step()) is not None:
            events.append(outputs.errors.get(handle))
    assert (harness.finish[handle], events[-1]) == (Finish.NONFINITE, NOT_FINITE)


def test_a_tiny_repetition_penalty_is_not_a_model_failure(tiny_model: Callable[[str], Path]) -> None:
    harness = Harness(tiny_model("yi"))
    handle = harness.add([5, 6, 7], max_tokens=8, repetition_penalty=1e-300, ignore_eos=True, **GREEDY)
    harness.run()
    assert harness.finish[handle] is Finish.LENGTH


class Spoiling(ListEngine):
    """Some requests' results are NaN; those of `score` only in their prompt's scores."""

    spoilt: frozenset[int] = frozenset()

    def complete(self) -> None:
        batch, result = self.launched[0], None
        handles = self.scheduler.slots.handle[batch.slots]
        result = self.device.execute(batch)
        bad = np.isin(handles[batch.sampled_rows], list(self.spoilt))
        execute, self.device.execute = self.device.execute, lambda _: result._replace(nonfinite=bad)  # type: ignore[method-assign]
        try:
            super().complete()
        finally:
            self.device.execute = execute  # type: ignore[method-assign]


def test_siblings_of_a_nan_leader_continue() -> None:
    engine = Spoiling(16)
    engine.spoilt = frozenset({0})
    engine.add([1, 2, 3, 4, 5], 3)
    engine.add([1, 2, 3, 4, 5], 3, leader=0)
    engine.add([1, 2, 3, 4, 5], 3, leader=0)
    engine.run()
    assert engine.output[0] == []
    assert len(engine.output[1]) == len(engine.output[2]) == 3
    assert engine.scheduler.stats().generation_tokens == 6


def test_a_nan_row_of_an_ended_request_is_ignored() -> None:
    engine = Spoiling(16)
    engine.spoilt = frozenset({0})
    engine.add([1, 2, 3], 4)
    engine.launch()
    engine.scheduler.abort(0)
    engine.complete()
    assert engine.scheduler.stats().nonfinite_logits == 0


def test_the_log_reports_it_once_a_minute(tiny_model: Callable[[str], Path], capfd: pytest.CaptureFixture[str]) -> None:
    harness = poisoned(tiny_model, float("nan"))
    for _ in range(5):
        harness.add([5, POISON], **GREEDY)
        while harness.engine.has_work:
            harness.step()
    lines = [line for line in capfd.readouterr().err.splitlines() if "nonfinite_logits" in line]
    assert len(lines) == 1
