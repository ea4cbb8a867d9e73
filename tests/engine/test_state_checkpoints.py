"""Where recurrent states are saved, found and lost. `ListEngine` checks that every answer follows from its prompt."""

from __future__ import annotations

import numpy as np
import pytest
from list_device import ListDevice, ListEngine, continuation
from test_tier_machine import ListCopies, ListStore

from weft.engine.memory.loads import LoadSpeeds
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry
from weft.engine.memory.ssd_store import Outcome
from weft.engine.memory.tiers import Tiers
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.states import StatePolicy
from weft.engine.wire.messages import Retention
from weft.engine.wire.page_keys import state_tokens

PAGE = 4
N = 2  # Pages of a state.


def engine(capacity: int = 60, **options: object) -> ListEngine:
    return ListEngine(capacity, page_size=PAGE, state_pages=N, **options)  # type: ignore[arg-type]


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 23 for i in range(length)]


def saved(of: ListEngine) -> list[int]:
    """The depths in pages of complete states on the device, ascending."""
    depths = []
    for entry in of.pool.index.entries():
        pieces = [] if entry.of_state else entry.state_pages(N)
        if pieces and all(e.page != NOWHERE for e in pieces):
            depth, above = 0, entry
            while above is not None:
                depth, above = depth + 1, above.parent  # type: ignore[assignment]
            depths.append(depth)
    return sorted(depths)


def run(of: ListEngine, tokens: list[int], count: int = 1, **options: object) -> Request:
    request = of.add(tokens, count, **options)  # type: ignore[arg-type]
    of.run()
    return request


def test_the_same_prompt_starts_at_its_last_page_end() -> None:
    of = engine()
    assert run(of, prompt(14)).cached_tokens == 0
    assert saved(of) == [3]
    before = of.scheduler.prefill_tokens
    assert run(of, prompt(14)).cached_tokens == 12
    assert of.scheduler.prefill_tokens - before == 2
    assert run(of, prompt(12)).cached_tokens == 0, "one token must be computed, and no state is saved before it"
    assert saved(of) == [2, 3]


def test_keys_and_values_without_a_state_are_no_hit_and_the_junction_is_saved() -> None:
    of = engine()
    run(of, prompt(30))
    fork = prompt(17) + prompt(12, 7)
    second = run(of, fork)
    assert (second.cached_tokens, second.stateless) == (0, 16)
    assert of.scheduler.stats().prefix_stateless_tokens == 16
    third = run(of, prompt(17) + prompt(12, 9))
    assert (third.cached_tokens, third.stateless) == (16, 0)


def test_the_next_turn_of_a_conversation_starts_where_the_answer_ended() -> None:
    of = engine()
    first = run(of, prompt(9), 11)  # 20 tokens, the last of which was never fed
    assert saved(of) == [2, 4]
    history = prompt(9) + of.output[first.handle]
    assert run(of, [*history, 1, 2, 3]).cached_tokens == 16


def test_an_answer_that_ends_at_a_page_end_saves_that_state() -> None:
    of = engine()
    run(of, prompt(9), 12)  # the last token fed is the 20th
    assert saved(of) == [2, 5]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_step_after_the_end_token_saves_nothing(ahead: int) -> None:
    tokens = prompt(9)
    answer = continuation(tokens, 12, recurrent=True)
    end = next(i for i in range(3, 12) if answer[i] not in answer[:i])
    of = engine()
    of.add(tokens, 12, stop=answer[end])
    for _ in range(40):
        of.launch()
        if len(of.launched) > ahead or not of.scheduler.slots.decoding().size:
            for _ in range(min(1, len(of.launched))):
                of.complete()
    while of.launched:
        of.complete()
    of.run()
    assert all(depth * PAGE <= 9 + end for depth in saved(of))
    assert run(of, tokens + answer[: end + 1] + [3, 4]).cached_tokens in (8, (9 + end) // PAGE * PAGE)


def test_a_preempted_request_computes_at_most_a_page_again() -> None:
    of = engine()
    request = of.add(prompt(9), 20)
    for _ in range(15):
        of.step()
    done = int(of.scheduler.slots.confirmed[request.slot])
    before = of.scheduler.prefill_tokens
    of.scheduler._preempt_one()
    of.run()
    assert of.scheduler.prefill_tokens - before <= PAGE
    assert done > 20


def test_a_prompt_preempted_between_chunks_continues_after_its_last_one() -> None:
    of = engine(budget=8, chunk_step=8)
    request = of.add(prompt(30), 2)
    of.step()
    of.step()
    assert of.scheduler.slots.confirmed[request.slot] == 16
    of.scheduler._preempt_one()
    before = of.scheduler.prefill_tokens
    of.run()
    assert of.scheduler.prefill_tokens - before == 14


def test_states_of_decodes_are_not_saved_if_bits_must_not_depend_on_them() -> None:
    of = engine(state_policy=StatePolicy(exact=True), chunk_step=2 * PAGE)
    first = run(of, prompt(13), 12)
    assert saved(of) == [2], "at a multiple of the chunk step"
    assert run(of, prompt(13) + of.output[first.handle]).cached_tokens == 8


def test_long_prompts_save_states_at_an_interval() -> None:
    of = engine(state_policy=StatePolicy(interval=10))
    run(of, prompt(50))
    assert saved(of) == [2, 5, 7, 10, 12]
    assert run(of, prompt(22) + prompt(9, 5)).cached_tokens == 20


def test_marked_positions_save_a_state_that_is_retained() -> None:
    of = engine(capacity=24)
    marked = run(of, prompt(18), retention=(Retention(tokens=10, seconds=1000.0),))
    assert marked.retained_tokens == 8
    assert len(of.pool.retention) == 2 + N
    assert saved(of) == [2, 4]
    for i in range(6):  # more than the pool holds
        run(of, prompt(40, 11)[i:])
    of.pool.check()
    assert saved(of)[0] == 2
    assert run(of, prompt(18)).cached_tokens == 8


def test_states_are_evicted_before_their_pages() -> None:
    of = engine(capacity=24)
    run(of, prompt(14))
    pages = of.pool.allocate(of.pool.num_free + 1)
    assert saved(of) == []
    assert sum(e.page != NOWHERE for e in of.pool.index.entries()) == 3 + N - 1
    of.pool.release(pages)
    assert run(of, prompt(14)).stateless == 12


def test_cached_pages_never_keep_the_longest_prompt_out() -> None:
    of = engine(capacity=20)
    run(of, prompt(of.max_len - 5))
    assert run(of, prompt(of.max_len - 1)).cached_tokens == of.max_len - 8


def test_admission_counts_two_states_for_each_request() -> None:
    of = engine(capacity=4 * N + 3)
    for i in range(3):
        of.add(prompt(3, i), 1)
    of.launch()
    assert of.scheduler.num_running == 2, "each takes a page and two states"
    of.run()


def test_without_free_pages_checkpoints_are_left_out_and_nothing_else_is() -> None:
    of = engine(capacity=3 * N + 3)
    of.add(prompt(9), 3)
    of.launch()
    assert not of.launched[0].states.checkpoint_rows.size  # type: ignore[union-attr]
    of.run()


def test_samples_of_one_prompt_share_its_state() -> None:
    of = engine()
    leader = of.add(prompt(14), 3)
    followers = [of.add(prompt(14), 3, leader=leader.handle) for _ in range(3)]
    of.run()
    assert [request.cached_tokens for request in followers] == [12] * 3
    assert of.scheduler.prefill_tokens == 14 + 3 * 2


def test_a_cleared_cache_has_no_states_and_running_requests_continue() -> None:
    of = engine()
    of.add(prompt(14), 8)
    run_until = [of.step() for _ in range(3)]
    assert run_until
    of.scheduler.reset_cache()
    of.run()
    assert of.pool.index.states == {"page": 0, "host": 0, "extent": 0}
    assert run(of, prompt(14)).cached_tokens == 0


def test_without_prefix_caching_no_state_is_saved() -> None:
    of = engine(prefix_caching=False)
    run(of, prompt(14), 9)
    assert run(of, prompt(14)).cached_tokens == 0
    assert not len(of.pool.index)


@pytest.mark.parametrize(("budget", "chunks"), [(16, [16, 4]), (9, [8, 8, 4]), (7, [4, 4, 4, 4, 4]), (3, [3, 1, 3, 1])])
def test_chunks_end_at_blocks_where_the_budget_allows(budget: int, chunks: list[int]) -> None:
    of = engine(budget=budget, chunk_step=8)
    of.add(prompt(20), 1)
    lengths = []
    for _ in chunks:
        of.launch()
        lengths += of.launched[0].query_len.tolist()
        of.complete()
    assert lengths == chunks
    of.run()


def test_with_bits_that_must_not_change_chunks_end_nowhere_else() -> None:
    of = engine(budget=9, chunk_step=8, state_policy=StatePolicy(exact=True))
    of.add(prompt(5), 4)
    of.step()
    of.add(prompt(20), 1)
    of.launch()
    assert of.launched[0].query_len.tolist() == [1, 8]
    of.run()


def test_only_the_chosen_state_counts_for_what_is_worth_loading() -> None:
    def entry(where: str) -> PrefixEntry:
        made = PrefixEntry(b"", None, b"", "")
        made.page, made.host, made.extent = (0 if where == w else NOWHERE for w in "ghs")
        return made

    speeds = LoadSpeeds(page_bytes=1000, page_size=10)
    free = {"host": 0, "ssd": 0}
    chain, states = [entry("h") for _ in range(6)], {2: [entry("h")] * 4, 5: [entry("g")] * 4}
    assert speeds.worthwhile(chain, free, 0, states) == 5, "nothing was measured: the deepest state"
    assert speeds.worthwhile(chain, free, 0, {}) == 0
    speeds.computed(1000, 1.0, full=True)  # a page takes 10 ms to compute
    speeds.bytes_per_second["host"] = 1e6  # 1 ms to load
    assert speeds.worthwhile(chain, free, 0, states) == 5
    assert speeds.worthwhile(chain, free, 0, {2: [entry("h")] * 4, 5: [entry("h")] * 60}) == 2
    assert speeds.worthwhile(chain, free, 0, {2: [entry("h")] * 19}) == 0
    on_device = [entry("g") for _ in range(6)]
    assert speeds.worthwhile(on_device, free, 0, {2: [entry("g")] * 4, 3: [entry("h")] * 60}) == 2


def test_the_index_counts_states_by_tier() -> None:
    of = engine()
    run(of, prompt(14), 9)
    stats = of.scheduler.stats()
    assert stats.state_checkpoints == {"gpu": 2, "host": 0, "ssd": 0}
    of = engine(state_policy=StatePolicy(page_bytes=100))
    of.add(prompt(14), 9)
    of.step()
    assert of.scheduler.stats().state_bytes == 3 * N * 100


def test_rows_of_a_batch_say_where_states_are() -> None:
    of = engine()
    of.add(prompt(10), 6)
    of.launch()
    first = of.launched[0].states
    assert first is not None
    assert first.fresh.tolist() == [True]
    assert (first.checkpoint_rows.tolist(), first.checkpoint_tokens.tolist()) == ([0], [8])
    of.complete()
    seen = []
    for _ in range(4):  # positions 10 to 13: the state at 12 stays
        of.launch()
        rows = of.launched[0].states
        assert rows is not None
        assert not rows.fresh.any()
        seen.append(bool(np.array_equal(rows.read, rows.write)))
        of.complete()
    assert seen == [True, True, False, True]
    of.run()


class TieredEngine(ListEngine):
    """An engine with two pages of two tokens per state, and a host pool and an SSD whose transfers end at once."""

    def __init__(self, stored: ListStore | None = None, idle_seconds: float = 0.0) -> None:
        self.stored, self.idle_seconds = stored, idle_seconds
        super().__init__(60, page_size=2, state_pages=N, tiers=self._tiers)

    def _tiers(self, pool: PagePool, device: ListDevice) -> Tiers:
        self.copies = ListCopies(device, 40)
        self.store = ListStore(self.copies, 60, self.stored)
        self.tiers = Tiers(pool, self.copies, 40, self.store, idle_seconds=self.idle_seconds)
        return self.tiers

    def step(self) -> list[int]:
        handles = super().step()
        self._end()
        return handles

    def _end(self) -> None:
        while self.copies.under_way:
            self.copies.under_way.pop(0).end(False)
        while self.store.under_way:
            self.store.end(self.store.under_way[0], Outcome.DONE)

    def settle(self) -> None:
        self.tiers.pump()
        self.tiers.ssd.start_writes(everything=True)
        while self.tiers.num_transfers:
            self._end()
            self.tiers.pump()
            self.tiers.ssd.start_writes(everything=True)

    def evict(self) -> None:
        """Leave pages and states on the host and the SSD alone, and nothing readable on the device."""
        self.pool.evict_all()
        self.device.kv[:] = -9


def test_a_hit_loads_the_pages_of_one_state_from_the_host() -> None:
    of = TieredEngine()
    run(of, prompt(9), 4)
    run(of, prompt(9) + of.output[0] + [1, 2], 1)
    stats = of.scheduler.stats().state_checkpoints
    assert stats["gpu"] == stats["host"] == stats["ssd"] > 2
    of.evict()
    assert of.scheduler.stats().state_checkpoints["gpu"] == 0
    before = of.tiers.stats()["host"].bytes_out
    assert run(of, prompt(9)).cached_tokens == 8
    assert (of.tiers.stats()["host"].bytes_out - before) // of.copies.sizes.page == 4 + N


def test_a_restart_finds_states_on_the_ssd() -> None:
    first = TieredEngine()
    run(first, prompt(9), 6)
    second = TieredEngine(first.store)
    assert second.scheduler.stats().state_checkpoints == {"gpu": 0, "host": 0, "ssd": 2}
    again = run(second, prompt(9) + first.output[0] + [3])
    assert again.cached_tokens == 14
    assert again.hits.ssd == 14


@pytest.mark.parametrize("lost", [0, 1])
def test_a_state_without_one_of_its_pages_is_not_found_after_a_restart(lost: int) -> None:
    first = TieredEngine()
    run(first, prompt(9))
    (extent,) = [i for i, r in first.store.records.items() if r.tokens == state_tokens(N, 2)[lost]]
    first.store.erase(extent)
    second = TieredEngine(first.store)
    request = run(second, prompt(9))
    assert (request.cached_tokens, request.stateless) == (0, 8)
    assert run(second, prompt(9)).cached_tokens == 8


def test_the_next_turn_is_fetched_with_its_state() -> None:
    of = TieredEngine()
    run(of, prompt(9), 4, names=(b"talk",))
    of.evict()
    of.scheduler.prefetch((b"talk",))
    of.settle()
    assert of.scheduler.stats().state_checkpoints["gpu"] == 1
    before = of.tiers.stats()["host"].bytes_out
    assert run(of, prompt(9) + of.output[0]).cached_tokens == 12
    assert of.tiers.stats()["host"].bytes_out == before


def test_idle_states_are_copied_after_the_host_lost_them() -> None:
    of = TieredEngine(idle_seconds=1e-9)
    run(of, prompt(9))
    of.tiers.host.evict_all()
    of.tiers.ssd._switch_off("a test")
    assert of.scheduler.stats().state_checkpoints == {"gpu": 1, "host": 0, "ssd": 0}
    for _ in range(4):
        of.settle()
    assert of.scheduler.stats().state_checkpoints == {"gpu": 1, "host": 1, "ssd": 0}


def test_external_routers_get_no_events_of_states() -> None:
    of = engine()
    of.pool.index.changes = []
    run(of, prompt(14), 9)
    changes = of.pool.index.changes
    assert len(changes) == 5
    assert not any(change is None or change.entry.of_state for change in changes)
    assert sum(entry.of_state for entry in of.pool.index.entries()) == 2 * N


def test_a_load_that_fails_leads_to_a_shorter_prefix() -> None:
    of = TieredEngine()
    run(of, prompt(9))
    of.evict()
    of.add(prompt(9), 2)
    assert of.launch() == []
    for copy in list(of.copies.under_way):
        of.copies.under_way.remove(copy)
        copy.end(True)
    of.run()
