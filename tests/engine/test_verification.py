"""Drafts change no token, no page and no prefix, however many of them are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_device import VOCAB, ListEngine, next_token
from scripted_drafts import ScriptedDrafter

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.verification import Verification

PROMPTS = st.lists(st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=9), st.integers(1, 14)), max_size=4)


class Ended(NamedTuple):
    """What a run left."""

    outputs: dict[int, list[int]]
    finish: dict[int, int]
    keys: set[bytes]
    iterations: int


def drafter(most: int = 3, right: Callable[[], int] = lambda: 99) -> Callable[[SlotTable], ScriptedDrafter]:
    return lambda slots: ScriptedDrafter(
        slots, lambda _, text: next_token(text), lambda token: (token + 1) % VOCAB, most, right
    )


def ran(
    requests: Sequence[tuple[list[int], int]], stop: int | None = None, ahead: bool = False, **options: Any
) -> tuple[Ended, ListEngine]:
    """Run requests to their end. `ahead`: launch an iteration ahead of the one that runs, where possible."""
    engine, finish, iterations = ListEngine(80, **options), dict[int, int](), 0
    for prompt, max_tokens in requests:
        engine.add(prompt, max_tokens, stop=stop)
    commit = engine.scheduler.commit

    def noting(result: Any) -> Any:
        nonlocal iterations
        iterations += 1
        events = commit(result)
        for handle, reason in zip(events.handles.tolist(), events.finish.tolist(), strict=True):
            assert handle not in finish, "an event after the terminal one"
            if reason:
                finish[handle] = reason
        return events

    engine.scheduler.commit = noting  # type: ignore[method-assign]
    if ahead:
        engine.launch()
    engine.run()
    keys = {entry.key for entry in engine.pool.index.entries()}
    return Ended(engine.output, finish, keys, iterations), engine


@given(
    requests=PROMPTS, stop=st.none() | st.integers(0, VOCAB - 1), most=st.integers(0, 5), ahead=st.booleans(),
    right=st.lists(st.integers(0, 5), min_size=1, max_size=20), page_size=st.sampled_from([1, 2, 4]),
)  # fmt: skip
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_order_of_right_and_wrong_drafts_leaves_what_no_drafts_leave(
    requests: list[tuple[list[int], int]], stop: int | None, most: int, ahead: bool, right: list[int], page_size: int
) -> None:
    plain, _ = ran(requests, stop, page_size=page_size)
    rights = chain(right, repeat(0))
    drafted, engine = ran(
        requests, stop, ahead, page_size=page_size, drafter=drafter(most, lambda: next(rights))
    )  # fmt: skip
    assert drafted._replace(iterations=0) == plain._replace(iterations=0)
    assert (engine.scheduler.slots.drafts == 0).all()
    assert engine.scheduler.generation_tokens == sum(map(len, plain.outputs.values()))


def test_right_drafts_save_iterations() -> None:
    plain, _ = ran([([5, 6, 7], 13)])
    drafted, engine = ran([([5, 6, 7], 13)], drafter=drafter(3))
    assert (plain.iterations, drafted.iterations) == (13, 4)
    scripted = engine.scheduler.verification._drafter  # type: ignore[union-attr]
    assert (scripted.drafted, scripted.accepted) == (9, 9)
    assert engine.scheduler.stats().decode_tokens == 12


def test_wrong_drafts_cost_tokens_but_change_none() -> None:
    plain, _ = ran([([5, 6, 7], 13)])
    drafted, engine = ran([([5, 6, 7], 13)], drafter=drafter(3, lambda: 0))
    assert drafted.outputs == plain.outputs
    assert drafted.iterations == plain.iterations
    scripted = engine.scheduler.verification._drafter  # type: ignore[union-attr]
    assert scripted.accepted == 0
    assert scripted.drafted == 3 * 9 + 2 + 1


@pytest.mark.parametrize("at", range(12))
def test_a_stop_token_ends_a_request_anywhere_in_its_drafts(at: int) -> None:
    whole = ran([([5, 6], 14)])[0].outputs[0]
    stop = whole[at]
    plain, _ = ran([([5, 6], 14)], stop)
    drafted, _ = ran([([5, 6], 14)], stop, drafter=drafter(4))
    assert drafted.outputs == plain.outputs
    assert drafted.finish == plain.finish
    assert plain.outputs[0][-1] == stop


def test_drafts_take_no_token_from_a_prompt() -> None:
    engine = ListEngine(60, budget=6, drafter=drafter(5))
    engine.add([5, 6], 20)
    engine.step()
    engine.add([7, 8, 9, 10, 11], 2)
    engine.launch()
    (batch,) = engine.launched
    assert batch.query_len.tolist() == [1, 5]
    engine.complete()
    engine.run()


def test_drafts_take_no_page_that_running_requests_need() -> None:
    engine = ListEngine(8, page_size=1, drafter=drafter(2))
    engine.add([5, 6], 6)
    engine.add([7, 8], 2)
    engine.step()
    engine.launch()
    (batch,) = engine.launched
    assert batch.query_len.tolist() == [1, 1], "two pages are left, one for the next token of each"
    engine.complete()
    engine.run()


def test_nothing_is_launched_while_drafts_may_follow() -> None:
    engine = ListEngine(60, drafter=drafter(2))
    engine.add([5, 6], 12)
    assert engine.launch() == [0]
    assert engine.launch() == []
    engine.complete()
    engine.scheduler.verification._drafter.active = False  # type: ignore[union-attr]
    assert engine.launch() == [0]
    assert engine.launch() == [0], "without drafts, one iteration is launched ahead"
    while engine.launched:
        engine.complete()
    engine.run()


def test_a_request_with_drafts_in_flight_sits_out() -> None:
    engine = ListEngine(60, drafter=drafter(2))
    engine.add([5, 6], 12)
    engine.step()
    engine.launch()
    engine.scheduler.verification._drafter.active = False  # type: ignore[union-attr]
    assert engine.launch() == []
    engine.complete()
    assert engine.launch() == [0]
    engine.run()


def test_recurrent_states_have_no_drafts() -> None:
    slots = SlotTable(2, 8, 2, state_pages=1)
    with pytest.raises(ValueError, match="rolled back"):
        Verification(slots, PagePool(9, 2, PrefixIndex("m")), None)


def test_pages_for_drafts_hold_the_next_tokens() -> None:
    """Rejected drafts leave pages, which are not allocated again."""
    engine = ListEngine(20, page_size=1, drafter=drafter(4, lambda: 0))
    engine.add([5], 10)
    engine.step()
    engine.step()
    slots = engine.scheduler.slots
    assert (int(slots.scheduled[0]), int(slots.num_pages[0])) == (2, 6)
    table = slots.page_table[0, :6].copy()
    engine.step()
    assert np.array_equal(slots.page_table[0, :6], table)
    engine.run()
