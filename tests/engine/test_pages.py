"""Every page has one state; unreferenced pages are kept until needed, and evicted oldest first, leaves first."""

from __future__ import annotations

import numpy as np
import pytest
from colliding import CollidingIndex

from weft.engine.memory.pages import PagePool, Pages
from weft.engine.memory.prefix_index import PrefixEntry, PrefixIndex


def make(capacity: int = 4, index: PrefixIndex | None = None) -> PagePool:
    return PagePool(capacity + 1, 1, PrefixIndex("m") if index is None else index)


def cached(pool: PagePool, *tokens: int) -> Pages:
    """Allocate a page for each token, publish them as a chain, and release them."""
    pages = pool.allocate(len(tokens))
    parent, key = None, pool.index.root("")
    for page, token in zip(pages.tolist(), tokens, strict=True):
        raw = np.array([token], np.int32).tobytes()
        key = pool.index.chain(key, raw)
        parent = pool.index.publish(parent, key, raw, "")
        assert parent is not None
        pool.adopt(parent, page)
    pool.release(pages)
    pool.check()
    return pages


def entries(pool: PagePool, *tokens: int) -> list[PrefixEntry]:
    array = np.array(tokens, np.int32)
    return pool.index.match(array, pool.index.keys(array, 1, ""), 1, "")


def counts(pool: PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_cached, pool.num_held


def test_all_pages_but_the_dummy_are_allocated_low_ids_first() -> None:
    pool = make(4)
    assert counts(pool) == (4, 0, 0)
    assert sorted(pool.allocate(1).tolist() + pool.allocate(1).tolist()) == [1, 2]
    assert sorted(pool.allocate(2).tolist()) == [3, 4]
    assert counts(pool) == (0, 0, 4)


def test_allocating_more_pages_than_free_is_refused_and_changes_nothing() -> None:
    pool = make(4)
    cached(pool, 1, 2)
    with pytest.raises(RuntimeError, match="5 pages requested, 4 available"):
        pool.allocate(5)
    assert counts(pool) == (2, 2, 0)
    assert len(pool.allocate(4)) == 4
    assert counts(pool) == (0, 0, 4)


def test_a_page_is_free_when_its_last_reference_is_released() -> None:
    pool = make(2)
    pages = pool.allocate(1)
    pool.hold(int(pages[0]))
    pool.release(pages)
    assert counts(pool) == (1, 0, 1)
    pool.release(pages)
    assert counts(pool) == (2, 0, 0)


def test_a_published_page_is_cached_when_its_last_reference_is_released() -> None:
    pool = make(3)
    (page,) = cached(pool, 1).tolist()
    assert counts(pool) == (2, 1, 0)
    assert pool.pin(entries(pool, 1)).tolist() == [page]
    assert pool.pin(entries(pool, 1)).tolist() == [page]
    assert counts(pool) == (2, 0, 1)
    pool.release(np.array([page], np.int32))
    assert counts(pool) == (2, 0, 1)
    pool.release(np.array([page], np.int32))
    assert counts(pool) == (2, 1, 0)


def test_no_cached_page_is_evicted_while_a_free_one_is_left() -> None:
    pool = make(4)
    cached(pool, 1, 2)
    pool.allocate(2)
    assert (pool.evictions, counts(pool)) == (0, (0, 2, 2))
    pool.allocate(1)
    assert (pool.evictions, counts(pool)) == (1, (0, 1, 3))


def test_the_end_of_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = make(4)
    cached(pool, 1, 2)
    cached(pool, 5, 6)
    pool.release(pool.pin(entries(pool, 1, 2)))
    pool.allocate(1)
    assert (len(entries(pool, 1, 2)), len(entries(pool, 5, 6))) == (2, 1)
    pool.allocate(1)
    assert (len(entries(pool, 1, 2)), len(entries(pool, 5, 6))) == (2, 0)
    pool.allocate(1)
    assert len(entries(pool, 1, 2)) == 1


def test_a_parent_outlives_a_child_that_was_used_later() -> None:
    pool = make(3)
    cached(pool, 1, 2)
    # Only the child is used again: the parent is the oldest, and still not the victim.
    child = entries(pool, 1, 2)[1]
    pool.release(pool.pin([child]))
    pool.allocate(2)
    assert len(entries(pool, 1, 2)) == 1


def test_the_end_of_a_chain_is_evicted_first_though_a_lower_tier_has_it_all() -> None:
    pool = make(3)
    cached(pool, 1, 2)
    pages = pool.pin(entries(pool, 1, 2))
    for slot, entry in enumerate(entries(pool, 1, 2)):
        pool.index.set_host(entry, slot)
    pool.release(pages)
    pool.allocate(2)
    assert [entry.page for entry in entries(pool, 1, 2)] == [pages[0], -1]


def test_when_no_page_is_evictable_the_oldest_is_evicted() -> None:
    pool = make(2)
    pages = cached(pool, 1, 2)
    child = entries(pool, 1, 2)[1]
    # The child's page is in use, the parent has no other copy.
    pool.pin([child])
    taken = pool.allocate(1)
    assert taken.tolist() == [pages[0]]
    assert pool.index.contains(child.parent)  # type: ignore[arg-type]
    assert entries(pool, 1, 2) == []
    assert counts(pool) == (0, 0, 2)


def test_a_release_counts_as_a_use() -> None:
    pool = make(3)
    cached(pool, 1)
    before = pool.index.clock
    held = pool.pin(entries(pool, 1))
    pool.release(held)
    assert pool.index.clock == before + 1
    assert entries(pool, 1)[0].used == pool.index.clock


def test_evicting_all_keeps_held_pages() -> None:
    pool = make(4)
    cached(pool, 1, 2, 3)
    pool.pin(entries(pool, 1))
    pool.evict_all()
    assert counts(pool) == (3, 0, 1)
    assert len(entries(pool, 1, 2, 3)) == 1


def test_clearing_frees_idle_pages_and_leaves_held_ones_to_their_holders() -> None:
    pool = make(4)
    cached(pool, 1, 2)
    held = pool.pin(entries(pool, 1))
    gone = entries(pool, 1, 2)
    pool.index.clear()
    pool.forget()
    assert counts(pool) == (3, 0, 1)
    assert [entry.page for entry in gone] == [-1, -1]
    pool.release(held)
    assert counts(pool) == (4, 0, 0)


def test_a_page_whose_key_was_taken_by_another_is_free_at_its_end() -> None:
    pool = make(4, CollidingIndex(bits=0))
    kept = cached(pool, 1)
    pages = pool.allocate(1)
    raw = np.array([2], np.int32).tobytes()
    assert pool.index.publish(None, pool.index.chain(b"", raw), raw, "") is None
    pool.release(pages)
    assert counts(pool) == (3, 1, 0)
    assert [entry.page for entry in entries(pool, 1)] == kept.tolist()
    assert entries(pool, 2) == []


def test_the_check_detects_a_page_that_is_lost_or_free_twice() -> None:
    pool = make(2)
    pages = pool.allocate(1)
    pool.ref[pages] = 0
    with pytest.raises(AssertionError, match="1 pages held, 0 referenced"):
        pool.check()
    pool = make(3)
    pool.allocate(2)
    pool.ref[:] = 0
    pool._push(3)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()
