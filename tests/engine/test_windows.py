"""Sliding windows: pages that no layer reads any more are freed while their request runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import GREEDY, Harness
from test_parity import _prompts, _run

from weft.engine.scheduling.admission import OutputLengths

WINDOW, PAGE = 24, 4
Made = Callable[[str], Path]


def _longest(harness: Harness, prompt: np.ndarray, max_tokens: int) -> int:
    """Serve it. Returns the maximum number of held pages after the prompt was computed."""
    harness.add(prompt, max_tokens=max_tokens, ignore_eos=True, **GREEDY)
    held, s = [0], harness.engine.scheduler.slots

    def look(_step: int) -> None:
        if s.confirmed.max() > len(prompt):
            held.append(harness.engine.scheduler.pool.num_held)

    harness.run(look)
    return max(held)


def test_a_request_holds_the_pages_of_its_window(tiny_model: Made) -> None:
    harness = Harness(tiny_model("mistral"), page_size=PAGE, num_pages=64)
    assert harness.engine.spec.kv_window == WINDOW
    # of the window, one that is started, and those held by the fence of a step in flight
    assert _longest(harness, _prompts(1, 60)[0], 120) <= WINDOW // PAGE + 3


def test_a_model_with_a_full_attention_layer_keeps_its_pages(tiny_model: Made) -> None:
    harness = Harness(tiny_model("gemma3"), page_size=PAGE, num_pages=64)
    assert harness.engine.spec.kv_window is None
    assert _longest(harness, _prompts(1, 60)[0], 120) >= 180 // PAGE


def test_freed_pages_serve_others_and_a_prefix_of_them_is_no_hit(tiny_model: Made) -> None:
    """The pool fits the windows of all, not their contexts: early pages are reused at once."""
    harness = Harness(tiny_model("mistral"), page_size=PAGE, num_pages=48, max_num_batched_tokens=16, max_num_seqs=8)
    harness.poison_pages()
    prompts = _prompts(2, 70, 64, 40, 66)
    _run(harness, prompts, 90)
    assert harness.engine.scheduler.pool.evictions > 40
    cached = _run(harness, prompts, 30)
    assert max(cached) < 60, "the whole of a prompt that was given back"


def test_admission_counts_only_the_windows(tiny_model: Made) -> None:
    """Long answers of known length: without windows two would fit, with them all do."""
    harness = Harness(tiny_model("mistral"), page_size=PAGE, num_pages=90, max_num_seqs=8, prefix_caching=False)
    harness.engine.scheduler.output_lengths = OutputLengths(mean=200.0, weight=1e9)
    for prompt in _prompts(3, *[20] * 6):
        harness.add(prompt, max_tokens=160, ignore_eos=True, **GREEDY)
    running = []
    harness.run(lambda _step: running.append(harness.engine.scheduler.num_running))
    assert max(running) == 6
    assert harness.engine.scheduler.preemptions == 0


def test_a_prefix_returns_from_the_host_after_its_pages_were_freed(tiny_model: Made) -> None:
    harness = Harness(tiny_model("mistral"), page_size=PAGE, num_pages=40, host_kv_gib=0.02)
    tiers, pool = harness.engine.tiers, harness.engine.scheduler.pool
    assert tiers is not None
    tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
    (prompt,) = _prompts(4, 90)
    _run(harness, [prompt], 60)
    tiers.flush(60)
    pool.evict_all()
    harness.poison_pages()
    assert min(_run(harness, [prompt], 30)) >= 84


def test_tokens_beyond_the_window_do_not_matter(tiny_model: Made) -> None:
    """Three layers of 24 see 70 positions back: tokens further away change nothing."""
    harness = Harness(tiny_model("mistral"), page_size=PAGE, num_pages=64, prefix_caching=False)
    (prompt,) = _prompts(5, 120)
    other = prompt.copy()
    other[:45] = 7
    for each in (prompt, other):
        harness.add(each, max_tokens=20, ignore_eos=True, **GREEDY)
        harness.run()
    assert harness.tokens[0] == harness.tokens[1]
