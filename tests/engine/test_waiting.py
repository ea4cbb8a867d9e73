"""The queue reports what its requests wait for; the engine reports the content of its iterations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness

from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

LONG = list(range(5, 45))


def reasons(harness: Harness) -> dict[str, int]:
    """The reasons that at least one request waits for."""
    stats = harness.engine.stats().scheduler
    counted = {reason: count for reason, count in stats.queue.items() if count}
    assert sum(counted.values()) == stats.waiting
    return counted


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_seqs": 2, "num_pages": 64}, "slots"),
        ({"max_num_seqs": 8, "num_pages": 13}, "pages"),
        ({"max_num_seqs": 8, "num_pages": 64, "max_num_batched_tokens": 80}, "tokens"),
    ],
)
def test_reasons_for_waiting(tiny_model: Callable[[str], Path], options: dict[str, Any], reason: str) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, prefix_caching=False, async_scheduling=False, **options)
    for _ in range(5):
        harness.add(LONG, max_tokens=4, ignore_eos=True, **GREEDY)
    harness.step()
    assert reasons(harness) == {reason: 3}
    harness.run()
    assert reasons(harness) == {}


@pytest.mark.parametrize("ended", [(), (0,), (2,), (0, 1), (0, 1, 2)])
def test_siblings_are_counted_separately(tiny_model: Callable[[str], Path], ended: tuple[int, ...]) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64)
    for handle in range(3):
        harness.tokens[handle] = []
        params = SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY)
        prompt = np.array(LONG, np.int32).tobytes()
        leader = 0 if handle else -1
        harness.engine.add(AddRequest(handle=handle, prompt_token_ids=prompt, params=params, leader=leader))
    for handle in ended:
        harness.engine.abort(handle)
    left = 3 - len(ended)
    assert sum(reasons(harness).values()) == left
    assert reasons(harness).get("sibling", 0) == max(0, left - 1)
    harness.run()
    assert reasons(harness) == {}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_decodes_and_prefills_add_up(tiny_model: Callable[[str], Path], async_scheduling: bool) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64, async_scheduling=async_scheduling)
    for k in range(3):
        harness.add([50 + k, *LONG], max_tokens=6, ignore_eos=True, **GREEDY)
    harness.run()
    stats = harness.engine.stats()
    assert stats.scheduler.prefill_tokens == 3 * 41
    assert stats.scheduler.decode_tokens == 3 * 5
    assert stats.iterations_pipelined == 0


def test_a_device_without_requests_does_not_count_as_idle(tiny_model: Callable[[str], Path]) -> None:
    harness = Harness(tiny_model("yi"), page_size=8, num_pages=64)
    launch, waits = harness.engine.runner.launch, []

    class Late:
        """An iteration that followed the one before after 100 s."""

        def __init__(self, batch: Any) -> None:
            self._inner = launch(batch)
            self.batch = batch

        def wait(self) -> Any:
            waits.append(self.batch.step)
            return self._inner.wait()._replace(idle_seconds=100.0)

    harness.engine.runner.launch = Late  # type: ignore[method-assign,assignment]
    for _ in range(2):
        harness.add(LONG, max_tokens=3, ignore_eos=True, **GREEDY)
        harness.run()
    # Each request has three iterations; before its first one there was nothing to do.
    assert len(waits) == 6
    assert harness.engine.stats().iterations_idle_seconds == 400.0
