"""The results of a committed iteration: counters, states, and the events of ended requests."""

from __future__ import annotations

import time

import pytest
from list_device import ListEngine

from weft.engine.scheduling.admission import OutputLengths
from weft.engine.wire.messages import Finish


def test_an_unused_scheduler_has_zero_counters() -> None:
    stats = ListEngine(8).scheduler.stats()
    counts = (
        stats.preemptions,
        stats.prompt_tokens,
        stats.generation_tokens,
        stats.decode_tokens,
        stats.prefill_tokens,
    )
    assert counts == (0, 0, 0, 0, 0)
    assert (stats.running, stats.waiting, stats.pages_held, stats.pages_cached) == (0, 0, 0, 0)


def test_tokens_are_counted_as_they_are_committed() -> None:
    engine = ListEngine(16)
    engine.add([5, 6, 7], 4)
    engine.add([6, 7, 8, 9], 2)
    seen = []
    while engine.scheduler.num_requests:
        engine.launch()
        before = engine.scheduler.stats()
        engine.complete()
        after = engine.scheduler.stats()
        seen.append((after.prefill_tokens, after.decode_tokens, after.generation_tokens))
        assert after.generation_tokens > before.generation_tokens
    assert seen == [(7, 0, 2), (7, 2, 4), (7, 3, 5), (7, 4, 6)]
    stats = engine.scheduler.stats()
    assert (stats.prompt_tokens, stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (7, 7, 0)
    assert (stats.pages_total, stats.pages_cached) == (16, len(engine.pool.index))


def test_requests_are_counted_by_state() -> None:
    engine = ListEngine(16, slots=1)
    engine.add([5, 6, 7], 4)
    engine.add([6, 7, 8, 9], 2)
    engine.launch()
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert stats.queue == {
        "slots": 1, "pages": 0, "tokens": 0, "sibling": 0, "load": 0, "grammar": 0, "adapter": 0, "encoder": 0
    }  # fmt: skip
    assert stats.pages_held == 2
    engine.complete()
    engine.run()
    assert engine.scheduler.stats().queue["slots"] == 0


def test_a_prompt_is_counted_once_despite_preemption() -> None:
    engine = ListEngine(16)
    engine.add([5, 6, 7], 4)
    engine.step()
    engine.scheduler._preempt_one()
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.preemptions, stats.prompt_tokens, stats.prefix_queried_tokens) == (1, 3, 3)


@pytest.mark.parametrize("launched", [False, True])
def test_an_aborted_request_ends_once(launched: bool) -> None:
    engine = ListEngine(16)
    request = engine.add([5, 6, 7], 4)
    engine.step()
    if launched:
        engine.launch()
    engine.scheduler.abort(request.handle)
    engine.scheduler.abort(request.handle)
    assert request.ended
    assert engine.scheduler.num_requests == 0
    assert engine.scheduler.has_events()
    events = engine.scheduler.idle_events()
    assert (events.handles.tolist(), events.finish.tolist()) == ([request.handle], [Finish.ABORT])
    assert not engine.scheduler.has_events()
    assert engine.pool.num_held == (2 if launched else 0), "pages that a launched step reads stay"
    if launched:
        engine.complete()
    assert engine.pool.num_held == 0
    assert engine.output[request.handle] == engine.output[request.handle][:1], "what comes after the end is dropped"


def test_an_aborted_waiting_request_leaves_the_queue() -> None:
    engine = ListEngine(16, slots=1)
    engine.add([5, 6, 7], 2)
    second, third = engine.add([6, 7, 8], 2), engine.add([7, 8, 9], 2)
    engine.step()
    engine.scheduler.abort(second.handle)
    assert (second.ended, engine.scheduler.num_waiting) == (True, 1)
    engine.run()
    assert engine.started == [0, third.handle]


def test_output_lengths_are_learned_from_finished_requests() -> None:
    engine = ListEngine(16)
    lengths = engine.scheduler.output_lengths = OutputLengths(mean=0.0, weight=1.0)
    engine.add([5, 6, 7], 4)
    engine.add([5, 6, 7], 2)
    engine.run()
    # the prior and the first fade; either of the two may end first
    assert lengths.mean == pytest.approx((2 * 0.999 + 4) / ((0.999 + 1) * 0.999 + 1))


def test_penalty_counts_are_set_when_a_request_starts_and_restarts() -> None:
    engine = ListEngine(16)
    plain, counted = engine.add([5, 6, 7], 9), engine.add([6, 7, 8], 9, presence_penalty=0.5)
    engine.launch()
    (reset,) = engine.launched[0].count_resets
    assert (reset.slot, reset.prompt.tolist(), reset.output.tolist()) == (counted.slot, [6, 7, 8], [])
    engine.complete()
    engine.launch()
    assert engine.launched[0].count_resets == ()
    engine.complete()
    engine.scheduler._preempt_one()
    engine.launch()
    (reset,) = engine.launched[0].count_resets
    assert (reset.prompt.tolist(), reset.output.tolist()) == ([6, 7, 8], engine.output[counted.handle])
    assert plain.slot != counted.slot
    engine.complete()


def test_counts_of_a_request_that_ended_before_it_ran_are_not_set() -> None:
    engine = ListEngine(16, slots=1)
    request = engine.add([6, 7, 8], 9, presence_penalty=0.5)
    # Admitted and not launched, as while its beginning is still loading.
    assert engine.scheduler._admit(request) is not None
    engine.scheduler.abort(request.handle)
    engine.add([5, 6, 7], 9)
    engine.launch()
    assert engine.launched[0].count_resets == ()
    engine.complete()


def test_iterations_of_half_the_budget_and_more_measure_the_prefill_speed() -> None:
    class Watched:
        """Tiers that only record the iterations reported to them."""

        def __init__(self) -> None:
            self.speeds, self.reported = self, []  # type: ignore[var-annotated]

        def pump(self) -> list[None]:
            return []

        def transfer_pages(self) -> list[int]:
            return []

        def check(self) -> None:
            pass

        def computed(self, tokens: int, _seconds: float, full: bool) -> None:
            self.reported.append((tokens, full))

    engine = ListEngine(64, budget=8, prefix_caching=False)
    engine.scheduler.tiers = tiers = Watched()  # type: ignore[assignment]
    for length in (3, 4, 8):
        engine.add([5] * length, 1)
        engine.step()
    assert tiers.reported == [(3, False), (4, True), (8, True)]


def test_a_prompt_without_requested_output_ends_with_its_last_chunk() -> None:
    engine = ListEngine(16, budget=3)
    request = engine.add([5, 6, 7, 8, 9], 1)
    request.max_total_tokens = request.prompt_len  # as when it is only scored
    engine.launch()
    events = engine.scheduler.commit(engine.device.execute(engine.launched.popleft()))
    assert (events.handles.tolist(), events.started) == ([], [])
    assert engine.launch() == [request.handle]
    events = engine.scheduler.commit(engine.device.execute(engine.launched.popleft()))
    assert (events.handles.tolist(), events.tokens.tolist(), events.finish.tolist()) == (
        [request.handle], [-1], [Finish.LENGTH],
    )  # fmt: skip
    assert [started.handle for started in events.started] == [request.handle]
    assert (request.ended, engine.scheduler.num_requests, engine.pool.num_held) == (True, 0, 0)


def test_a_start_reports_the_time_in_the_queue_and_in_the_prompt() -> None:
    engine = ListEngine(16)
    request = engine.add([5, 6, 7, 8, 9], 2)
    request.arrival = time.monotonic() - 1000.0
    engine.launch()
    request.scheduled_at -= 100.0
    events = engine.scheduler.commit(engine.device.execute(engine.launched.popleft()))
    (started,) = events.started
    assert 890 < started.queue_seconds < 960, "from its arrival until it was scheduled"
    assert 100 <= started.prefill_seconds < 160, "from then until its first token"
