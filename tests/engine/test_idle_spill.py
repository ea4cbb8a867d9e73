"""Idle pages get a copy in a lower tier and are then evicted first; the pages of an announced turn are loaded in
advance."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from list_device import ListEngine
from test_prefix_reuse import PROMPT, TieredEngine

from weft.engine.memory.prefix_index import NOWHERE, Hits, PrefixEntry
from weft.engine.memory.tiers import IdleClock
from weft.engine.scheduling.prefix_reuse import ConversationPages, PrefixStats

NAME = (b"n" * 16,)


def test_uses_are_idle_after_the_time() -> None:
    clock = IdleClock(32.0)
    assert clock.idle(0.0, 5) == -1
    assert clock.idle(31.9, 6) == -1
    assert clock.idle(32.0, 7) == 5
    assert clock.idle(63.9, 8) == 6
    assert clock.idle(200.0, 9) == 8, "after a pause of everything"
    assert IdleClock(0.0).idle(1e9, 5) == -1


def lie_idle(engine: TieredEngine) -> None:
    """Marks all pages used so far as idle."""
    idle = engine.pool.index.clock
    engine.tiers._idle = SimpleNamespace(idle=lambda _now, _clock: idle)  # type: ignore[assignment]


def idle_iterations(engine: TieredEngine) -> None:
    """Run iterations without work, as an idle engine does."""
    for _ in range(8):
        assert engine.launch() == []
        engine.end_copies()
    engine.settle()


def entries(engine: ListEngine) -> list[PrefixEntry]:
    return list(engine.pool.index.entries())


def test_idle_pages_reach_the_ssd_although_the_host_has_free_slots() -> None:
    engine = TieredEngine(12, ssd=True)
    engine.store(PROMPT)
    idle_iterations(engine)
    assert all(entry.extent == NOWHERE for entry in entries(engine)), "they are not idle yet"
    lie_idle(engine)
    idle_iterations(engine)
    assert [entry.extent >= 0 for entry in entries(engine)] == [True] * 3
    assert engine.tiers.stats()["ssd"].spilled == 3


def test_idle_pages_that_the_host_lost_get_a_slot_there_again() -> None:
    engine = TieredEngine(12)
    engine.add(PROMPT, 1)
    engine.run()
    engine.tiers.host.evict_all()
    assert all(entry.page >= 0 and entry.host == NOWHERE for entry in entries(engine))
    lie_idle(engine)
    idle_iterations(engine)
    assert all(entry.host >= 0 for entry in entries(engine))
    assert engine.tiers.stats()["host"].spilled == 3


def test_full_tiers_do_not_swap_forever() -> None:
    """Six pages and five slots: one is left without a copy, and nothing moves any more."""
    engine = TieredEngine(12)
    for prompt in (PROMPT, [20, 21, 22, 23, 24, 25, 26]):
        engine.add(prompt, 1)
        engine.run()
    lie_idle(engine)
    idle_iterations(engine)
    before = engine.tiers.stats()["host"].bytes_in
    for _ in range(5):
        idle_iterations(engine)
    assert engine.tiers.stats()["host"].bytes_in == before


def test_a_page_is_tried_once_after_each_use() -> None:
    engine = TieredEngine(12)
    engine.add(PROMPT, 1)
    engine.run()
    engine.tiers.host.evict_all()
    lie_idle(engine)
    engine.launch()
    engine.end_copies(failed=True)
    for _ in range(3):
        assert engine.launch() == []
        assert not engine.copies.under_way, "it failed, and would for ever"
    engine.add(PROMPT, 1)
    engine.run()
    lie_idle(engine)
    idle_iterations(engine)
    assert all(entry.host >= 0 for entry in entries(engine))


def test_a_stored_page_is_as_idle_as_before() -> None:
    """From the GPU alone it reaches the SSD in one step, and is the next to be evicted."""
    engine = TieredEngine(12, ssd=True)
    engine.add(PROMPT, 1)
    engine.run()
    engine.tiers.host.evict_all()
    engine.add([20, 21, 22, 23, 24], 1)
    engine.run()  # used later
    used = {entry: entry.used for entry in entries(engine)}
    lie_idle(engine)
    idle_iterations(engine)
    assert {entry: entry.used for entry in entries(engine)} == used
    assert all(entry.extent >= 0 for entry in entries(engine))
    engine.pool.release(engine.pool.allocate(10))
    assert [entry.page >= 0 for entry in entries(engine)] == [False] * 3 + [True] * 2


def test_idle_pages_with_a_copy_are_evicted_before_those_without() -> None:
    engine = TieredEngine(8)
    engine.add(PROMPT, 1)
    engine.run()
    engine.tiers.host.evict_all()
    engine.add([20, 21, 22, 23, 24, 25, 26], 1)
    engine.run()  # used later, and on the host
    engine.pool.idle_clock = engine.pool.index.clock
    engine.pool.release(engine.pool.allocate(5))
    assert [entry.page >= 0 for entry in entries(engine)] == [True] * 3 + [False] * 3
    again = engine.add(PROMPT, 1)
    engine.run()
    assert again.cached_tokens == 6


@pytest.mark.parametrize("ssd", [False, True])
def test_an_announced_turn_finds_its_pages_on_the_gpu(ssd: bool) -> None:
    engine = TieredEngine(12, ssd=ssd)
    engine.add(PROMPT, 1, names=NAME)
    engine.run()
    engine.pool.evict_all()
    if ssd:
        lie_idle(engine)
        idle_iterations(engine)
        engine.tiers.host.evict_all()
    engine.scheduler.prefetch(NAME)
    engine.settle()
    assert engine.pool.num_held == 0
    assert all(entry.page >= 0 for entry in entries(engine))
    request = engine.add([*PROMPT, 12, 13], 1)
    assert engine.launch() == [request.handle], "it waits for nothing"
    engine.run()
    assert request.hits == (6, 0, 0)
    assert engine.tiers.stats()["ssd" if ssd else "host"].prefetched == 3


def test_a_turn_that_arrives_before_its_pages_waits_for_the_same_copies() -> None:
    engine = TieredEngine(12)
    engine.add(PROMPT, 1, names=NAME)
    engine.run()
    engine.pool.evict_all()
    engine.scheduler.prefetch(NAME)
    request = engine.add([*PROMPT, 12, 13], 1)
    assert engine.launch() == []
    assert len(engine.copies.under_way) == 1
    engine.run()
    assert request.cached_tokens == 6
    assert engine.tiers.stats()["host"].bytes_out == 3 * engine.copies.sizes.page


def test_an_unknown_conversation_fetches_nothing() -> None:
    engine = TieredEngine(12)
    engine.store(PROMPT)
    engine.scheduler.prefetch((b"x" * 16,))
    assert not engine.tiers.num_transfers


def test_fetching_takes_half_of_the_available_pages_and_evicts_none_of_its_own() -> None:
    engine = TieredEngine(6)
    engine.add(PROMPT, 1, names=NAME)
    engine.run()
    engine.pool.evict_all()
    blocker = engine.add([30, 31, 32, 33, 34], 2)
    engine.launch()  # holds three of six
    engine.scheduler.prefetch(NAME)
    assert engine.tiers.num_loading == 1
    engine.run()
    assert len(engine.output[blocker.handle]) == 2


def test_a_request_waiting_for_a_slot_has_its_pages_fetched() -> None:
    engine = TieredEngine(12, slots=1)
    engine.store(PROMPT)
    engine.add([30, 31, 32], 4)
    engine.launch()
    waiting = engine.add(PROMPT, 1)
    engine.launch()
    assert engine.tiers.num_loading == 3
    engine.run()
    assert waiting.hits == (6, 0, 0)


def test_a_conversation_is_known_as_far_as_its_pages_are_kept() -> None:
    engine = ListEngine(12)
    engine.add(PROMPT, 1, names=(b"a" * 16, b"b" * 16))
    engine.run()
    recall, chain = engine.scheduler.prefixes.conversations, entries(engine)
    assert recall.chain((b"c" * 16, b"b" * 16)) == chain
    engine.pool.release(engine.pool.allocate(10))  # the last page goes
    assert recall.chain((b"a" * 16,)) == chain[:2]
    assert recall.chain(()) == []


def test_names_are_forgotten_with_their_pages() -> None:
    engine = ListEngine(12)
    engine.add(PROMPT, 1)
    engine.run()
    chain = entries(engine)
    recall = ConversationPages(engine.pool.index, max_pages=6)
    for name in (b"a", b"b", b"a", b"c"):
        recall.remember((name,), chain)
    assert [bool(recall.chain((name,))) for name in (b"a", b"b", b"c")] == [True, False, True]


def test_hits_are_counted_by_the_length_of_the_prompt_and_the_tier() -> None:
    stats = PrefixStats()
    for tokens, hits in ((10, Hits(4, 2, 1)), (1023, Hits()), (1024, Hits(1000)), (70_000, Hits(0, 64_000, 0))):
        stats.add(tokens, hits)
    reported = {name: (of.gpu, of.host, of.ssd, of.missed) for name, of in stats.by_length.items()}
    assert reported == {
        "1k": (4, 2, 1, 1026), "4k": (1000, 0, 0, 24), "16k": (0,) * 4, "64k": (0,) * 4, "more": (0, 64_000, 0, 6000)
    }  # fmt: skip
