"""A page is not freed while a launched step may touch it, and not kept longer."""

from __future__ import annotations

import numpy as np
import pytest

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.scheduling.fences import Fences
from weft.engine.scheduling.slots import SlotTable


def make() -> tuple[Fences, PagePool, SlotTable]:
    slots, pool = SlotTable(2, 8, 2), PagePool(9, 2, PrefixIndex("m"))
    return Fences(slots, pool), pool, slots


@pytest.mark.parametrize(("last_step", "at_once"), [(1, True), (2, True), (3, False)])
def test_pages_are_freed_when_their_last_step_has_completed(last_step: int, at_once: bool) -> None:
    fences, pool, _ = make()
    pages = pool.allocate(3)
    fences.completed(2)
    fences.release_after(last_step, -1, pages)
    assert len(fences) == (0 if at_once else 1)
    assert fences.num_pages == (0 if at_once else 3)
    assert fences.num_slots == 0
    assert pool.num_held == (0 if at_once else 3)


def test_a_fence_opens_with_its_own_step_and_no_earlier() -> None:
    fences, pool, slots = make()
    slots._free.remove(1)
    first, second = pool.allocate(2), pool.allocate(3)
    fences.release_after(4, 1, first)
    fences.release_after(5, -1, second)
    for completed, held, num_slots, fenced in [(3, 5, 1, 5), (4, 3, 0, 3), (5, 0, 0, 0)]:
        fences.completed(completed)
        assert fences.references().sum() >= fenced
        fences.open()
        assert (pool.num_held, fences.num_slots, fences.num_pages) == (held, num_slots, fenced)
    assert slots.num_free == 2
    assert not len(fences)


def test_references_are_counted_once_for_each_fence() -> None:
    fences, pool, _ = make()
    pages = pool.allocate(2)
    pool.hold(int(pages[0]))
    fences.release_after(1, -1, pages)
    fences.release_after(2, -1, pages[:1])
    held = fences.references()
    assert held[pages].tolist() == [2, 1]
    assert held.sum() == 3
    assert np.array_equal(held, pool.ref)
