"""The index finds by hash and compares contents: a collision never serves another prompt's KV."""

from __future__ import annotations

import numpy as np
import pytest
from colliding import CollidingIndex
from hypothesis import given
from hypothesis import strategies as st
from list_device import ListEngine

from weft.engine.memory.prefix_index import Hits, PrefixEntry, PrefixIndex

PAGE = 2


def pages(*tokens: int) -> list[bytes]:
    return [np.array(tokens[i : i + PAGE], np.int32).tobytes() for i in range(0, len(tokens), PAGE)]


def publish(index: PrefixIndex, *tokens: int, salt: str = "") -> list[PrefixEntry | None]:
    """Publish the pages of `tokens` in a chain, each on its own GPU page."""
    made: list[PrefixEntry | None] = []
    parent, key = None, index.root(salt)
    for page in pages(*tokens):
        key = index.chain(key, page)
        entry = index.publish(parent, key, page, salt)
        if entry is not None:
            index.set_page(entry, 1 + len(index))
        made.append(entry)
        parent = entry
    return made


def match(index: PrefixIndex, *tokens: int, salt: str = "") -> list[PrefixEntry]:
    array = np.array(tokens, np.int32)
    return index.match(array, index.keys(array, PAGE, salt), PAGE, salt)


def test_the_longest_published_beginning_is_found() -> None:
    index = PrefixIndex("m")
    chain = publish(index, 1, 2, 3, 4, 5, 6)
    assert match(index, 1, 2, 3, 4, 5, 6, 7, 8) == chain
    assert match(index, 1, 2, 3, 4, 9, 9) == chain[:2]
    assert match(index, 9, 2, 3, 4) == []
    assert match(index, 3, 4) == [], "a page is found behind its own beginning only"
    index.check()


def test_tokens_that_fill_no_page_have_no_key() -> None:
    index = PrefixIndex("m")
    assert [len(index.keys(np.arange(n, dtype=np.int32), PAGE, "")) for n in range(6)] == [0, 0, 1, 1, 2, 2]


def test_publishing_again_gives_the_same_entry() -> None:
    index = PrefixIndex("m")
    assert publish(index, 1, 2, 3, 4) == publish(index, 1, 2, 3, 4)
    assert len(index) == 2
    index.check()


def test_tenants_and_models_share_no_key() -> None:
    index, other = PrefixIndex("m"), PrefixIndex("n")
    tokens = np.array([1, 2, 3, 4], np.int32)
    keys = [*index.keys(tokens, PAGE, ""), *index.keys(tokens, PAGE, "t"), *other.keys(tokens, PAGE, "")]
    assert len(set(keys)) == 6
    publish(index, 1, 2, salt="t")
    assert match(index, 1, 2) == []
    assert len(match(index, 1, 2, salt="t")) == 1


def test_tenants_whose_roots_collide_share_nothing() -> None:
    index = CollidingIndex(bits=0)
    assert index.root("") == index.root("t")
    mine = publish(index, 1, 2, salt="t")
    assert match(index, 1, 2) == []
    assert publish(index, 1, 2) == [None]
    assert match(index, 1, 2, salt="t") == mine


def test_other_tokens_under_the_same_key_are_not_found_and_not_published() -> None:
    index = CollidingIndex(bits=0)
    mine = publish(index, 1, 2)
    assert match(index, 3, 4) == []
    assert publish(index, 3, 4) == [None]
    assert match(index, 1, 2) == mine
    index.check()


def test_the_same_tokens_after_another_beginning_are_not_found_and_not_published() -> None:
    index = CollidingIndex(bits=0)
    first = index.publish(None, b"a", pages(1, 2)[0], "")
    second = index.publish(None, b"b", pages(3, 4)[0], "")
    child = index.publish(first, b"c", pages(5, 6)[0], "")
    for page, entry in enumerate((first, second, child), start=1):
        assert entry is not None
        index.set_page(entry, page)
    assert index.publish(second, b"c", pages(5, 6)[0], "") is None
    assert index.match(np.array([1, 2, 5, 6], np.int32), [b"a", b"c"], PAGE, "") == [first, child]
    assert index.match(np.array([3, 4, 5, 6], np.int32), [b"b", b"c"], PAGE, "") == [second]
    index.check()


def test_a_key_is_free_again_once_its_page_is_evicted() -> None:
    index = CollidingIndex(bits=0)
    (entry,) = publish(index, 1, 2)
    assert entry is not None
    index.set_page(entry, -1)
    assert not index.contains(entry)
    assert publish(index, 3, 4) != [None]
    assert not index.contains(entry), "its key leads to another page"


def test_requests_whose_pages_all_collide_are_answered_from_their_own_prompts() -> None:
    engine = ListEngine(12, index=CollidingIndex(bits=0))
    first = engine.add([1, 2, 3, 4, 5], 3)
    engine.run()
    others = [engine.add([3, 4, 1, 2, 5], 3), engine.add([1, 2, 3, 4, 5], 3, salt="t"), engine.add([1, 2, 9, 9], 3)]
    again = engine.add([1, 2, 3, 4, 5], 3)
    engine.run()
    assert len(engine.pool.index) == 1, "only the first page got in"
    assert [request.hits.gpu for request in (first, *others, again)] == [0, 0, 0, 2, 2]


def test_nothing_is_published_after_a_refused_page() -> None:
    index = PrefixIndex("m")
    engine = ListEngine(12, index=index)
    tokens = np.array([1, 2, 3, 4, 5, 6], np.int32)
    keys = index.keys(tokens, PAGE, "")
    # The second page's key holds another page.
    squatter = index.publish(None, keys[1], pages(7, 7)[0], "")
    assert squatter is not None
    (page,) = engine.pool.allocate(1)
    engine.pool.adopt(squatter, int(page))
    engine.pool.release(np.array([page], np.int32))
    request = engine.add([1, 2, 3, 4, 5, 6, 8], 1)
    engine.step()
    assert not request.publishable
    assert [index.find(key) is not None for key in keys] == [True, True, False]
    assert index.find(keys[1]) is squatter
    engine.run()


def test_a_request_that_starts_again_may_publish_again() -> None:
    engine = ListEngine(8, index=CollidingIndex(bits=0))
    engine.add([1, 2], 1)
    engine.run()
    request = engine.add([3, 4, 5], 8)
    engine.step()
    assert not request.publishable
    engine.scheduler._preempt_one()
    engine.scheduler.reset_cache()
    engine.run()
    assert len(engine.pool.index) == 1
    assert next(iter(engine.pool.index.entries())).tokens == pages(3, 4)[0]


def test_hits_are_counted_in_the_fastest_tier() -> None:
    entries = [PrefixEntry(b"", None, b"", "") for _ in range(6)]
    entries[0].page = entries[1].page = entries[1].host = 0
    entries[2].host = entries[3].host = entries[3].extent = 0
    entries[4].extent = 0
    assert Hits.of(entries[:5], 4) == (8, 8, 4)


@pytest.mark.parametrize(
    ("where", "children", "stored", "on_ssd", "gpu", "host", "ssd"),
    [
        ("g", 0, 0, 0, True, True, True),
        ("g", 1, 0, 0, False, True, True),
        ("gh", 1, 0, 0, True, True, True),
        ("gh", 1, 1, 0, True, False, True),
        ("h", 0, 0, 0, True, True, True),
        ("h", 1, 0, 0, True, False, True),
        ("hs", 1, 1, 0, True, True, True),
        ("hs", 1, 1, 1, True, True, False),
        ("s", 1, 0, 0, True, True, False),
        ("s", 0, 0, 0, True, True, True),
        ("gs", 1, 1, 0, True, True, False),
        ("gs", 1, 0, 0, True, True, True),
        ("gs", 1, 1, 1, True, True, False),
    ],
)
def test_a_copy_may_be_dropped_while_no_child_needs_it(
    where: str, children: int, stored: int, on_ssd: int, gpu: bool, host: bool, ssd: bool
) -> None:
    entry = PrefixEntry(b"", None, b"", "")
    for tier in where:
        setattr(entry, {"g": "page", "h": "host", "s": "extent"}[tier], 0)
    entry.children, entry.stored, entry.on_ssd = children, stored, on_ssd
    assert entry.anywhere
    assert entry.lower == (where != "g")
    assert (entry.evictable_from_gpu(), entry.evictable_from_host(), entry.evictable_from_ssd()) == (gpu, host, ssd)


def test_a_chain_without_copies_is_removed_from_its_end() -> None:
    index = PrefixIndex("m")
    parent, child = publish(index, 1, 2, 3, 4)
    assert parent is not None
    assert child is not None
    reported: list[PrefixEntry] = []
    index.on_evictable = reported.append
    index.set_page(parent, -1)
    assert index.contains(parent), "its child can still be of use when it is computed again"
    assert match(index, 1, 2, 3, 4) == []
    assert reported == []
    index.check()
    index.set_page(child, -1)
    assert len(index) == 0
    assert reported == [parent]


def test_a_tier_is_notified_of_what_it_can_evict_now() -> None:
    index = PrefixIndex("m")
    parent, child = publish(index, 1, 2, 3, 4)
    assert parent is not None
    assert child is not None
    reported: list[PrefixEntry] = []
    index.on_evictable = reported.append
    index.set_host(parent, 0)
    index.set_host(child, 1)
    index.set_extent(child, 0)
    assert (parent.stored, parent.on_ssd) == (1, 1)
    assert reported == [parent, child, child]
    index.set_host(child, -1)
    assert (parent.stored, parent.on_ssd) == (1, 1), "it is still on the SSD"
    assert reported[3:] == [child]
    index.set_extent(child, -1)
    assert (parent.stored, parent.on_ssd) == (0, 0)
    assert reported[4:] == [parent, child]
    index.check()


@pytest.mark.parametrize("tier", ["host", "extent"])
def test_a_tier_is_notified_of_a_parent_whose_child_left_it(tier: str) -> None:
    index = PrefixIndex("m")
    parent, child = publish(index, 1, 2, 3, 4)
    assert parent is not None
    assert child is not None
    move = {"host": index.set_host, "extent": index.set_extent}[tier]
    if tier == "extent":
        index.set_host(child, 0)  # so that it stays in a lower tier
    move(parent, 1)
    move(child, 2)
    reported: list[PrefixEntry] = []
    index.on_evictable = reported.append
    move(child, -1)
    assert reported == [parent, child]
    index.check()


def test_clearing_forgets_everything_once() -> None:
    index = PrefixIndex("m")
    chain = publish(index, 1, 2, 3, 4)
    assert index.clear() == chain
    assert len(index) == 0
    assert match(index, 1, 2, 3, 4) == []
    assert index.clear() == []


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=8), st.sampled_from(["", "t"])), max_size=12))
def test_a_match_is_the_prompts_own_beginning_despite_collisions(prompts: list[tuple[list[int], str]]) -> None:
    index = CollidingIndex(bits=1)
    for tokens, salt in prompts:
        publish_until_refused(index, tokens, salt)
        index.check()
    for tokens, salt in prompts:
        found = match(index, *tokens, salt=salt)
        assert [entry.tokens for entry in found] == pages(*tokens)[: len(found)]
        assert all(entry.salt == salt for entry in found)
        assert [entry.parent for entry in found] == [None, *found[:-1]][: len(found)]


def publish_until_refused(index: PrefixIndex, tokens: list[int], salt: str) -> None:
    parent, key = None, index.root(salt)
    for page in pages(*tokens)[: len(tokens) // PAGE]:
        key = index.chain(key, page)
        parent = index.publish(parent, key, page, salt)
        if parent is None:
            return
        if not parent.anywhere:
            index.set_page(parent, 1 + len(index))


def test_a_use_is_later_than_all_before_it() -> None:
    index = PrefixIndex("m")
    first, second = publish(index, 1, 2, 3, 4), publish(index, 5, 6)
    index.use(second)  # type: ignore[arg-type]
    index.use(first)  # type: ignore[arg-type]
    used = [entry.used for entry in (*first, *second) if entry is not None]
    assert used[0] == used[1] == index.clock > used[2] > 0
