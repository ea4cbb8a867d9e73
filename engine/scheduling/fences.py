"""`Fences`: releases pages and slots once the last step that may touch them has completed (docs/pitfalls.md 1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.engine.memory.pages import PagePool, Pages
from weft.engine.scheduling.slots import SlotTable


class _Fence(NamedTuple):
    step: int
    slot: int  # the slot to release, or -1 for pages only
    pages: Pages


class Fences:
    def __init__(self, slots: SlotTable, pool: PagePool) -> None:
        self._slots, self._pool = slots, pool
        self._waiting: list[_Fence] = []
        self._completed_step = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_slots(self) -> int:
        return sum(f.slot >= 0 for f in self._waiting)

    @property
    def num_pages(self) -> int:
        return sum(len(f.pages) for f in self._waiting)

    def references(self) -> Pages:
        """Return `[pages]`: the references to each page that fences hold."""
        held = np.zeros(self._pool.num_pages, np.int32)
        for fence in self._waiting:
            np.add.at(held, fence.pages, 1)
        return held

    def release_after(self, step: int, slot: int, pages: Pages) -> None:
        """Drop a reference to each page, and free the slot, once `step` has completed: the last launched step that can
        touch them. Afterwards, pages in the prefix index are cached and others are free."""
        if step <= self._completed_step:
            self._pool.release(pages)
            if slot >= 0:
                self._slots.release(slot)
        else:
            self._waiting.append(_Fence(step, slot, pages))

    def completed(self, step: int) -> None:
        self._completed_step = step

    def open(self) -> None:
        passed = [f for f in self._waiting if f.step <= self._completed_step]
        if passed:
            self._waiting = [f for f in self._waiting if f.step > self._completed_step]
            for fence in passed:
                self.release_after(*fence)
