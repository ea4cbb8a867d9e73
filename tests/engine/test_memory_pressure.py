"""Just enough pages: which requests are admitted, wait or are preempted, and what a preempted request keeps."""

from __future__ import annotations

import numpy as np
import pytest
from list_device import ListEngine

from weft.engine.scheduling.admission import OutputLengths
from weft.engine.wire.sampling import SamplingParams


def test_pages_held_by_another_request_do_not_count_as_free() -> None:
    engine = ListEngine(4)
    engine.add([5, 6, 7, 8, 9], 1, stop=-9)
    engine.add([5, 6, 7, 8, 4], 1, leader=0, stop=-9)
    engine.launch()
    engine.complete()
    first = engine.add([5, 6, 7, 8, 9], 2, stop=-9)
    engine.step()
    request = engine.add([5, 6, 7, 8, 3], 1, stop=-9)
    assert (first.waiting, engine.pool.num_held) == (False, 3)
    # One page is left, and one is needed in addition to the two that the first holds.
    assert request.handle in engine.step()
    engine.run()


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_request_that_needs_all_remaining_pages_is_admitted(others: int) -> None:
    engine = ListEngine(4 + others, prefix_caching=False)
    for _ in range(others):
        engine.add([6], 1, stop=-9)
    engine.add([5] * 7, 1, stop=-9)
    assert engine.step() == list(range(others + 1))
    engine.run()


def test_a_request_waits_for_the_last_page_that_it_needs() -> None:
    engine = ListEngine(4, prefix_caching=False)
    engine.add([5], 2)
    request = engine.add([6] * 7, 1)
    assert engine.step() == [0]
    assert (engine.pool.num_available, request.waiting) == (3, True)
    assert engine.step() == [0]
    assert engine.pool.num_available == 4
    assert engine.step() == [1]
    engine.run()


def test_all_idle_pages_serve_a_request_that_starts_with_them() -> None:
    engine = ListEngine(4)
    engine.add([5] * 7, 1)
    engine.run()
    assert (engine.pool.num_free, engine.pool.num_cached) == (1, 3)
    request = engine.add([5] * 7, 1)
    assert engine.step() == [request.handle]
    assert request.hits.gpu == 6
    engine.run()


def test_idle_pages_of_a_requests_prefix_are_not_counted_as_free_for_it() -> None:
    engine = ListEngine(6)
    engine.add([5] * 6, 1)
    engine.run()
    other = engine.add([6] * 5, 2)
    assert engine.step() == [other.handle]
    assert (engine.pool.num_available, engine.pool.num_cached) == (3, 3)
    # Three pages are idle. Two of them are its prefix, which it must not evict to get two more.
    request = engine.add([5] * 5 + [9] * 3, 1)
    assert engine.launch() == [other.handle]
    assert request.waiting
    engine.complete()
    engine.run()


def test_a_request_expected_to_outgrow_the_pool_with_the_others_waits() -> None:
    engine = ListEngine(8, prefix_caching=False)
    engine.scheduler.output_lengths = OutputLengths(mean=7.0, weight=1e30)
    engine.add([5, 6, 7], 9, stop=-9)
    request = engine.add([6, 7, 8], 9, stop=-9)
    assert engine.step() == [0]
    assert request.waiting, "two times ten tokens are ten pages"
    engine.run()


def test_pages_held_by_a_fence_do_not_hide_that_others_are_shared() -> None:
    engine = ListEngine(7)
    engine.add([5, 6, 7, 8], 4, stop=-9)
    engine.step()
    engine.add([5, 6, 7, 8, 4], 3, stop=-9)
    gone = engine.add([1], 3, stop=-9)
    engine.launch()
    engine.scheduler.abort(gone.handle)
    # Two requests share two of their pages, and one page is held by the fence of the launched step.
    assert (engine.pool.num_held, engine.scheduler.fences.num_pages) == (5, 1)
    request = engine.add([2, 3, 4], 1, stop=-9)
    assert request.handle in engine.launch()
    while engine.launched:
        engine.complete()
    engine.run()


def fill(engine: ListEngine, *prompts: int, max_tokens: int = 9) -> None:
    """Requests of the given tokens each, past their prefill. Their lengths are guesses: they have a stop token."""
    for length in prompts:
        engine.add([5 + len(engine.requests)] * length, max_tokens, stop=-9)
    assert len(engine.step()) == len(prompts)


def test_a_request_waits_for_pages_that_fences_will_release() -> None:
    engine = ListEngine(3, prefix_caching=False)
    fill(engine, 3, 1, max_tokens=3)
    engine.launch()
    engine.scheduler.abort(1)
    # The first wants its third page. The only one that is not its own is held by the fence of the launched step.
    assert (engine.pool.num_available, engine.scheduler.fences.num_pages) == (0, 1)
    assert engine.launch() == []
    assert engine.scheduler.preemptions == 0
    engine.complete()
    assert engine.launch() == [0]
    assert engine.scheduler.preemptions == 0
    engine.complete()
    engine.run()


def test_one_page_more_than_fences_release_preempts_the_youngest() -> None:
    engine = ListEngine(5, prefix_caching=False)
    fill(engine, 3, 3, 1, max_tokens=3)
    engine.launch()
    engine.scheduler.abort(2)
    assert engine.launch() == []
    assert engine.scheduler.preemptions == 1
    assert [r.waiting for r in engine.requests[:2]] == [False, True]
    engine.complete()
    assert engine.launch() == [0, 1], "its pages and the aborted one's suffice for both"
    engine.complete()
    engine.run()


def test_the_youngest_wait_for_fenced_pages_and_the_older_take_free_ones() -> None:
    engine = ListEngine(8, slots=5, prefix_caching=False)
    fill(engine, 3, 3, 1)
    assert engine.pool.num_free == 3
    engine.launch()
    engine.scheduler.abort(2)
    hostage = engine.pool.allocate(2)
    # Two want a page, one is free, one is fenced: the older gets it and none is preempted.
    handles = launch_unchecked(engine)
    assert handles == [0]
    assert engine.scheduler.preemptions == 0
    engine.pool.release(hostage)
    while engine.launched:
        engine.complete()
    engine.run()


def launch_unchecked(engine: ListEngine) -> list[int]:
    """`launch` while the test itself holds pages, which the check would report as lost."""
    batch = engine.scheduler.schedule(engine._steps + 1)
    if batch is None:
        return []
    engine._steps += 1
    engine.launched.append(batch)
    return engine.scheduler.slots.handle[batch.slots].tolist()


def test_no_more_are_preempted_than_necessary() -> None:
    engine = ListEngine(7, slots=5, prefix_caching=False)
    fill(engine, 3, 3, 3)
    engine.launch()
    # All three want a third page and one is free. The youngest is preempted; its two are fenced.
    assert engine.launch() == [0]
    assert engine.scheduler.preemptions == 1
    assert [r.waiting for r in engine.requests] == [False, False, True]
    while engine.launched:
        engine.complete()
    assert sorted(engine.step())[:2] == [0, 1]
    assert engine.scheduler.preemptions == 1
    engine.run()


def test_a_page_held_by_another_request_is_not_released() -> None:
    engine = ListEngine(8)
    engine.add([5, 6, 7, 8, 9], 4, stop=-9)
    engine.step()
    engine.add([5, 6, 7, 8, 9], 4, stop=-9)
    engine.launch()
    engine.scheduler.abort(1)
    assert engine.scheduler.fences.num_pages == 3
    assert engine.scheduler._num_coming() == 1, "the two that are shared stay with the first"
    engine.complete()
    engine.run()


def test_a_preempted_request_finds_all_its_published_pages_again() -> None:
    engine = ListEngine(12)
    request = engine.add([5, 6, 7, 8, 9], 12)
    for _ in range(5):
        engine.step()
    assert len(engine.output[0]) == 5
    engine.scheduler._preempt_one()
    assert len(request.token_ids) == 10
    assert engine.step() == [0]
    assert request.hits.gpu == 8, "four pages, two of them with tokens that it sampled"
    assert request.cached_tokens == 0, "it is told of what it found when it first ran"
    engine.run()
    assert len(engine.output[0]) == 12


def test_a_resumed_request_publishes_after_its_cached_pages() -> None:
    engine = ListEngine(12)
    engine.add([5, 6, 7, 8, 9], 12)
    for _ in range(4):
        engine.step()
    engine.scheduler._preempt_one()
    engine.run()
    follower = engine.add([5, 6, 7, 8, 9, *engine.output[0]], 1)
    engine.run()
    assert follower.hits.gpu == 16, "all of the 17 tokens but the last, whose KV was never computed"


def test_at_least_one_token_is_left_to_compute() -> None:
    engine = ListEngine(12)
    engine.add([5, 6, 7, 8], 1)
    engine.run()
    for prompt, hits in (([5, 6, 7, 8], 2), ([5, 6, 7, 8, 9], 4), ([5, 6, 7], 2), ([5, 6], 0)):
        request = engine.add(prompt, 1)
        engine.run()
        assert request.hits.gpu == hits


def test_two_requests_that_compute_the_same_page_end_with_one() -> None:
    engine = ListEngine(12)
    engine.add([5, 6, 7, 8, 9], 3)
    engine.add([5, 6, 7, 8, 9], 3)
    engine.step()
    first, second = (engine.scheduler.slots.page_table[r.slot].tolist() for r in engine.requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert engine.pool.num_held == 4
    assert engine.scheduler.fences.num_pages == 0, "the step that wrote the second copy has completed"
    engine.run()
    assert engine.pool.num_cached == len(engine.pool.index)


def test_scored_prompts_are_neither_found_nor_waited_for() -> None:
    engine = ListEngine(12)
    request = engine.add([5, 6, 7, 8, 9], 1)
    assert engine.scheduler.prefixes.reusable(request)
    request.params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert not engine.scheduler.prefixes.reusable(request)


def test_without_prefix_caching_nothing_is_published() -> None:
    engine = ListEngine(12, prefix_caching=False)
    engine.add([5, 6, 7, 8, 9], 3)
    engine.run()
    assert (len(engine.pool.index), engine.pool.num_cached) == (0, 0)
    assert np.array_equal(engine.pool.ref, np.zeros(13, np.int32))
