"""Several engines with one or two API processes: pages, loads, conversations, exits. The engines are made up."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.errors import EngineDead
from weft.engine.wire.messages import EngineReady, EngineStats, PageChanges
from weft.engine.wire.page_keys import BRIEF, chain, page_keys, root, state_tokens
from weft.server.observe.shared_state import SharedState
from weft.server.replicas.replicas import CachedPages, Replicas, credit_new_engine

PAGE = 16


def ready(model_id: str = "m", **fields: Any) -> EngineReady:
    return EngineReady(
        model_type="", num_parameters=0, dtype="", device="", vocab_size=100, page_size=PAGE, num_pages=10,
        max_num_batched_tokens=1, eos_token_ids=(), load_seconds=0, model_id=model_id,
        **{"max_model_len": 100, "max_num_seqs": 8, **fields},
    )  # fmt: skip


def client(**fields: Any) -> Any:
    return SimpleNamespace(alive=True, num_open=0, stats=EngineStats(), on_stats=None, on_open=None, **fields)


def replicas(engines: int, shared_state: SharedState | None = None, row: int = 0, **options: Any) -> Replicas:
    made = Replicas(shared_state or SharedState(1, engines=engines), row, **options)
    for engine in range(engines):
        made.attach(engine, client(), ready(), lambda _: None)
    return made


def keys(tokens: list[int], salt: str = "", model_id: str = "m") -> list[bytes]:
    return [key[:BRIEF] for key in page_keys(root(model_id, salt), np.array(tokens, np.int32), PAGE)]


def send_news(all_of_them: Replicas, engine: int, entered: list[bytes] = [], left: list[bytes] = []) -> None:  # noqa: B006
    (replica,) = [each for each in all_of_them if each.engine == engine]
    replica.client.on_stats(EngineStats(pages=PageChanges(b"".join(entered), b"".join(left))))


def routed(all_of_them: Replicas, tokens: list[int], salt: str = "") -> int:
    """Route a request that ends at once."""
    ticket = all_of_them.route(all_of_them.prompt_pages(tokens, salt), 1)
    ticket.end()
    return ticket.replica.engine


def test_a_prompt_goes_to_the_engine_with_its_pages() -> None:
    three, prompt = replicas(3), list(range(100))
    assert routed(three, prompt) == 0
    send_news(three, 2, keys(prompt))
    assert [routed(three, prompt) for _ in range(3)] == [2, 2, 2]
    kept = list(three)[2]
    assert (
        three.prompt_pages(prompt, "").cached_tokens(kept)
        == three.prompt_pages([*prompt, 5], "").cached_tokens(kept)
        == 96
    )
    assert three.prompt_pages(prompt[:96], "").cached_tokens(kept) == 80  # one token at least is to be computed
    assert three.prompt_pages(prompt, "another tenant").cached_tokens(kept) == 0
    assert three.prompt_pages([1, *prompt], "").cached_tokens(kept) == 0  # pages after another beginning are different
    send_news(three, 2, left=keys(prompt)[1:2])
    assert three.prompt_pages(prompt, "").cached_tokens(kept) == 16


def test_pages_of_other_weights_do_not_count() -> None:
    two, prompt = replicas(2), list(range(100))
    two.attach(1, client(), ready("other weights", pages=b"".join(keys(prompt))), lambda _: None)
    assert routed(two, prompt) == 0
    send_news(two, 1, keys(prompt, model_id="other weights"))
    assert routed(two, prompt) == 1


def test_equal_requests_at_the_same_time_go_to_the_same_engine() -> None:
    three, prompt = replicas(3), list(range(100))
    tickets = [three.route(three.prompt_pages(prompt, ""), 1) for _ in range(3)]
    assert len({ticket.replica.engine for ticket in tickets}) == 1
    assert [len(r.cached_pages._expected) for r in three] == [6, 0, 0]
    for ticket in tickets:
        ticket.end()
    assert not any(r.cached_pages._expected for r in three)


def test_loads_of_all_processes_count_and_end_with_their_requests() -> None:
    shared_state = SharedState(3, engines=2)
    one, other = replicas(2, shared_state, 1), replicas(2, shared_state, 2)
    first = one.route(one.prompt_pages(list(range(50)), ""), 10)
    second = other.route(other.prompt_pages(list(range(50, 90)), ""), 10)
    assert [first.replica.engine, second.replica.engine] == [0, 1]
    sibling = first.sibling()
    assert shared_state.engine_load.sum(axis=0).tolist() == [70, 50]
    first.started()
    assert shared_state.engine_load.sum(axis=0).tolist() == [20, 50]
    for ticket in (first, second, sibling, first):
        ticket.end()
    assert not shared_state.engine_load.any()


def test_closed_stalled_and_dead_engines_get_no_requests() -> None:
    shared_state, stalled = SharedState(1, engines=4), {1}
    four = replicas(4, shared_state, stalled=stalled.__contains__)
    shared_state.closed[0] = 1
    next(r for r in four if r.engine == 2).client.alive = False
    assert {routed(four, [i] * 20) for i in range(20)} == {3}
    assert [four.state(engine) for engine in (0, 1, 3)] == ["draining", "stalled", "serving"]
    four.detach(3)
    assert routed(four, [1]) in (0, 1)  # better than none
    four.detach(0)
    four.detach(1)
    with pytest.raises(EngineDead):
        routed(four, [1])


def test_an_engine_that_returns_does_not_get_all_requests() -> None:
    shared_state = SharedState(1, engines=3)
    shared_state.given[:] = [[900, 9], [1100, 11], [100, 1]]
    credit_new_engine(shared_state, 2)
    assert shared_state.given.tolist() == [[900, 9], [1100, 11], [1000, 10]]


def test_older_assignments_count_less() -> None:
    two = replicas(2)
    for i in range(5000):
        routed(two, [i % 90] * 20)
    assert two._shared_state.given[:, 1].sum() < two.policy.window
    assert two._shared_state.given[:, 0].min() > 0.9 * two._shared_state.given[:, 0].max()


def test_together_they_serve_what_each_can_serve() -> None:
    two = replicas(2)
    two.attach(1, client(), ready(max_model_len=64, max_num_seqs=3), lambda _: None)
    assert (two.ready.max_model_len, two.max_num_seqs, two.ready.num_pages) == (64, 11, 20)


KEYS = st.lists(st.integers(0, 30).map(lambda i: bytes([i]) * BRIEF), max_size=6)


@given(st.lists(st.tuples(KEYS, KEYS), max_size=20), KEYS)
def test_known_pages_follow_the_news(news: list[tuple[list[bytes], list[bytes]]], coming: list[bytes]) -> None:
    cached_pages, model = CachedPages(), set()
    cached_pages.expect(coming)
    for entered, left in news:
        left = [key for key in left if key not in entered]
        cached_pages.update(PageChanges(b"".join(entered), b"".join(left)))
        model = (model | set(entered)) - set(left)
        assert len(cached_pages) == len(model)
        assert cached_pages.match(sorted(model | set(coming))) == len(model | set(coming))
    cached_pages.settle(coming)
    assert not cached_pages._expected
    absent = bytes([99]) * BRIEF
    assert cached_pages.match([*sorted(model), absent]) == len(model)


class Cache:
    """An engine's pages; the least recently used ones are evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.pages = capacity, OrderedDict[bytes, None]()

    def use(self, wanted: list[bytes]) -> tuple[int, list[bytes], list[bytes]]:
        """Pages found, added and evicted."""
        found = next((i for i, key in enumerate(wanted) if key not in self.pages), len(wanted))
        entered = [key for key in wanted if key not in self.pages]
        for key in reversed(wanted):  # leaves are evicted first
            self.pages[key] = None
            self.pages.move_to_end(key)
        left = [self.pages.popitem(last=False)[0] for _ in range(max(0, len(self.pages) - self.capacity))]
        return found, [key for key in entered if key in self.pages], left


def converse(engines: int, processes: int, *, pages: int, seed: int, shared: int) -> tuple[float, list[float]]:
    """Conversations of several rounds over made-up engines: the share of prompt tokens found, and the tokens that
    each engine computed. A round's request goes to any of the API processes. `shared`: tokens that all prompts begin
    with."""
    rng = random.Random(seed)
    shared_state = SharedState(processes + 1, engines=engines)
    sides = [replicas(engines, shared_state, row + 1) for row in range(processes)]
    caches = [Cache(pages // engines) for _ in range(engines)]
    free_at, computed, found, requested = [0.0] * engines, [0.0] * engines, 0, 0
    order = itertools.count()
    beginning = [rng.randrange(10**6) for _ in range(shared)]
    events: list[Any] = []
    for _ in range(120):
        rounds = rng.randrange(3, 9)
        heapq.heappush(events, (rng.uniform(0, 60), next(order), "ask", list(beginning), rounds))
    while events:
        now, _, what, *rest = heapq.heappop(events)
        if what == "ask":
            tokens, rounds = rest
            tokens = tokens + [rng.randrange(10**6) for _ in range(rng.randrange(20, 400))]
            side, output = rng.choice(sides), rng.randrange(10, 200)
            with shared_state.lock():
                ticket = side.route(side.prompt_pages(tokens, ""), output)
            engine, wanted = ticket.replica.engine, keys(tokens)
            hits, entered, left = caches[engine].use(wanted[: (len(tokens) - 1) // PAGE])
            work = len(tokens) - hits * PAGE + output
            found, requested, computed[engine] = found + hits * PAGE, requested + len(tokens), computed[engine] + work
            free_at[engine] = max(now, free_at[engine]) + work / (20000 / engines)
            heapq.heappush(
                events, (free_at[engine], next(order), "answer", tokens, rounds, output, ticket, entered, left)
            )
        else:
            tokens, rounds, output, ticket, entered, left = rest
            for side in sides:
                send_news(side, ticket.replica.engine, entered, left)
            ticket.end()
            if rounds > 1:
                again = now + rng.uniform(0.5, 20)
                history = tokens + [rng.randrange(10**6) for _ in range(output)]
                heapq.heappush(events, (again, next(order), "ask", history, rounds - 1))
    assert not shared_state.engine_load.any()
    return found / requested, computed


@pytest.mark.parametrize(("seed", "processes", "shared"), [(0, 1, 0), (1, 2, 0), (2, 2, 300)])
def test_conversations_keep_their_prefixes_and_spread_over_the_engines(seed: int, processes: int, shared: int) -> None:
    alone, _ = converse(1, 1, pages=30_000, seed=seed, shared=shared)
    share, computed = converse(3, processes, pages=30_000, seed=seed, shared=shared)
    print(f"{share:.3f} of {alone:.3f} found; computed {[round(c) for c in computed]}")
    assert share >= 0.9 * alone
    assert max(computed) <= 1.3 * sum(computed) / 3


def test_a_short_memory_changes_that_little() -> None:
    alone, _ = converse(1, 1, pages=3_000, seed=3, shared=100)
    share, computed = converse(3, 2, pages=3_000, seed=3, shared=100)
    assert share >= 0.9 * alone
    assert max(computed) <= 1.3 * sum(computed) / 3


def test_pages_of_a_recurrent_model_count_up_to_the_last_state() -> None:
    two, tokens = replicas(2), list(range(70))
    for engine in (0, 1):
        two.attach(engine, client(), ready(recurrent=True), lambda _: None)
    full = page_keys(root("m", ""), np.array(tokens, np.int32), PAGE)
    (first,) = state_tokens(1, PAGE)
    states = [chain(key, first)[:BRIEF] for key in full]
    send_news(two, 0, [key[:BRIEF] for key in full])
    send_news(two, 1, [full[0][:BRIEF], full[1][:BRIEF], states[1]])
    pages = two.prompt_pages(tokens, "")
    assert [pages.cached_tokens(replica) for replica in two] == [0, 32]
    ticket = two.route(pages, 1)
    assert ticket.replica.engine == 1
    assert pages.cached_tokens(ticket.replica) == 64, "a request that is computing the prompt saves its last state"
    ticket.end()
    send_news(two, 1, left=[states[1]])
    assert [pages.cached_tokens(replica) for replica in two] == [0, 0]
