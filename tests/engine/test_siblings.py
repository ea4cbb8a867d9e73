"""Sequences of one prompt: the prompt is computed once, and all of them hold its full pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from harness import GREEDY, Harness

from weft.engine.wire.messages import AddRequest, Finish
from weft.engine.wire.sampling import SamplingParams

PAGE = 8
PROMPT = np.arange(3, 40, dtype=np.int32)  # four full pages and five tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny("llama2", tmp_path_factory.mktemp("model"))


def start(model: Path, count: int, **options: Any) -> Harness:
    harness = Harness(model, page_size=PAGE, **{"num_pages": 64, **options})
    for k in range(count):
        follow(harness, leader=-1 if k == 0 else 0)
    return harness


def follow(harness: Harness, leader: int) -> int:
    handle = len(harness.tokens)
    harness.tokens[handle] = []
    params = SamplingParams(max_tokens=6, ignore_eos=True, **GREEDY)
    harness.engine.add(AddRequest(handle=handle, prompt_token_ids=PROMPT.tobytes(), params=params, leader=leader))
    return handle


def test_the_prompt_is_computed_once(model: Path) -> None:
    harness = start(model, 5)
    computed: list[int] = []
    held: list[int] = []
    launch = harness.engine.runner.launch

    def watch(batch: Any) -> Any:
        computed.append(batch.num_tokens - batch.num_decodes)
        held.append(harness.engine.scheduler.pool.num_held)
        return launch(batch)

    harness.engine.runner.launch = watch  # type: ignore[method-assign]
    harness.run()
    partial = len(PROMPT) % PAGE
    assert sum(computed) == len(PROMPT) + 4 * partial
    assert max(held) <= 4 + 5 * 2, "full pages are shared"
    assert len({tuple(tokens) for tokens in harness.tokens.values()}) == 1
    assert [harness.cached[handle] for handle in range(5)] == [0, 32, 32, 32, 32]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_siblings_outlive_an_aborted_leader(model: Path, steps: int) -> None:
    harness = start(model, 4)
    for _ in range(steps):
        harness.step()
    harness.engine.abort(0)
    harness.engine.abort(2)
    harness.run()
    ends = [harness.finish[handle] for handle in range(4)]
    assert ends == [Finish.ABORT, Finish.LENGTH, Finish.ABORT, Finish.LENGTH]
    assert harness.tokens[1] == harness.tokens[3]
    assert harness.engine.scheduler.num_waiting == 0


def test_other_requests_overtake_waiting_siblings(model: Path) -> None:
    harness = start(model, 3, max_num_batched_tokens=16)
    other = harness.add([5, 6, 7], max_tokens=1, ignore_eos=True, **GREEDY)
    while other not in harness.finish:
        harness.step()
    assert harness.engine.scheduler.num_waiting <= 2
    harness.run()


def test_nothing_waits_if_nothing_is_shared(model: Path) -> None:
    harness = start(model, 3, prefix_caching=False)
    assert harness.engine.scheduler.num_waiting == 3
    assert len(harness.engine.scheduler._waiting) == 3
    harness.run()
