"""The scheduler machine on three tiny tiers: random hits, loads, failures, evictions and aborts in random order.

Copies and SSD jobs end when a rule ends them, independently. A copy moves its bytes only when it ends, and detects
changes of its pages meanwhile, so that a page freed or written too early is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from list_device import ListDevice
from machines import machine_settings
from test_scheduler_machine import MAX_LEN, PAGE_SIZE, Collisions, SchedulerMachine

from weft.engine.memory.extent import Record
from weft.engine.memory.pages import PagePool
from weft.engine.memory.ssd_store import Job, Outcome
from weft.engine.memory.tiers import Tiers
from weft.engine.memory.transfer import Copy, PageSizes, Pairs

NUM_SLOTS = 5
NUM_EXTENTS = 5


class ListCopy:
    def __init__(self, engine: ListCopies, pairs: Pairs, to_host: bool) -> None:
        self.engine, self.pairs, self.to_host = engine, list(pairs), to_host
        self.seen = self._contents()
        self.ended = self.failed = False
        self.raw: list[int] = []
        self.unkept: list[int] = []
        self.seconds = 1.0

    def _contents(self) -> list[list[int]]:
        kv, host = self.engine.device.kv, self.engine.host
        return [(kv[page] if self.to_host else host[slot]).tolist() for page, slot in self.pairs]

    def end(self, failed: bool, no_room: bool = False) -> None:
        """no_room: the first page to the host could not be packed, and does not fit unpacked."""
        assert self._contents() == self.seen, "a page changed while it was copied"
        self.ended, self.failed = True, failed
        if no_room and self.to_host:
            self.raw = self.unkept = [self.pairs[0][1]]
        for page, slot in self.pairs:
            if failed or slot in self.unkept:
                (self.engine.host[slot] if self.to_host else self.engine.device.kv[page])[:] = -9
            elif self.to_host:
                self.engine.host[slot] = self.engine.device.kv[page]
            else:
                self.engine.device.kv[page] = self.engine.host[slot]

    def done(self) -> bool:
        return self.ended


class ListCopies:
    sizes = PageSizes(4 * PAGE_SIZE, 4 * PAGE_SIZE)
    remainders = None

    def __init__(self, device: ListDevice, slots: int = NUM_SLOTS) -> None:
        self.device = device
        self.host = np.full((slots, PAGE_SIZE), -8, np.int32)
        self.under_way: list[ListCopy] = []

    def _start(self, pairs: Pairs, to_host: bool) -> Copy:
        copy = ListCopy(self, pairs, to_host)
        self.under_way.append(copy)
        return copy

    def out(self, pairs: Pairs) -> Copy:
        return self._start(pairs, True)

    def back(self, pairs: Pairs) -> Copy:
        return self._start(pairs, False)

    def wait(self, _copies: Sequence[Copy], _seconds: float) -> None:
        raise AssertionError("the machine never waits")

    def close(self) -> None:
        pass


class ListJob(Job):
    def __init__(self, extent: int, slot: int, writes: bool) -> None:
        super().__init__()
        self.extent, self.slot, self.writes = extent, slot, writes


class ListStore:
    """Extents as lists. A failed read leaves garbage in the host slot."""

    gone = None

    def __init__(self, copies: ListCopies, num_extents: int = NUM_EXTENTS, stored: ListStore | None = None) -> None:
        """`stored`: the store of an engine that has ended."""
        self.num_extents = num_extents
        self.records: dict[int, Record] = {} if stored is None else stored.records
        self.copies = copies
        self.extents: dict[int, list[int]] = {} if stored is None else stored.extents
        self.under_way: list[ListJob] = []

    def scan(self) -> list[tuple[int, Record]]:
        return [(extent, record) for extent, record in self.records.items() if extent in self.extents]

    def write(self, extent: int, record: Record, slot: int) -> Job:
        self.extents.pop(extent, None)
        self.records[extent] = record
        return self._start(extent, slot, True)

    def read(self, extent: int, slot: int) -> Job:
        return self._start(extent, slot, False)

    def _start(self, extent: int, slot: int, writes: bool) -> Job:
        busy = [j for j in self.under_way if j.slot == slot or (j.extent == extent and (writes or j.writes))]
        assert not busy, "two jobs share a slot or an extent"
        self.under_way.append(ListJob(extent, slot, writes))
        return self.under_way[-1]

    def end(self, job: ListJob, outcome: Outcome) -> None:
        self.under_way.remove(job)
        if job.writes and outcome is Outcome.DONE:
            self.extents[job.extent] = self.copies.host[job.slot].tolist()
        elif not job.writes:
            there = self.extents.get(job.extent)
            outcome = Outcome.LOST if there is None and outcome is Outcome.DONE else outcome
            self.copies.host[job.slot] = -9 if outcome is not Outcome.DONE or there is None else there
        job.outcome = outcome

    def erase(self, extent: int) -> None:
        self.extents.pop(extent, None)

    def reset(self) -> None:
        self.extents.clear()

    def close(self) -> None:
        pass


class TierMachine(SchedulerMachine):
    num_host: ClassVar[int] = NUM_SLOTS
    num_extents: ClassVar[int] = NUM_EXTENTS

    def make_tiers(self, _pool: PagePool) -> Tiers | None:
        self.copies = ListCopies(self.device, self.num_host)
        self.store = ListStore(self.copies, self.num_extents)
        tiers = Tiers(_pool, self.copies, self.num_host, self.store)
        self.worthwhile = 99
        tiers.speeds.worthwhile = lambda entries, *_: min(len(entries), self.worthwhile)  # type: ignore[method-assign]
        self.tiers = tiers
        return tiers

    @rule(pages=st.sampled_from([99, 99, 2, 0]))
    def change_what_is_worthwhile(self, pages: int) -> None:
        self.worthwhile = pages

    @rule()
    def begin_stores(self) -> None:
        self.tiers.begin_stores()

    @rule(last=st.booleans(), fate=st.integers(0, 7))
    def a_copy_ends(self, last: bool, fate: int) -> None:
        directions = {c.to_host: c for c in reversed(self.copies.under_way)}
        if directions:
            # Copies of one direction end in order.
            copy = directions.get(last) or directions[not last]
            self.copies.under_way.remove(copy)
            copy.end(failed=fate == 5, no_room=fate == 6)

    @rule(which=st.integers(0, 9), fate=st.integers(0, 7))
    def a_job_ends(self, which: int, fate: int) -> None:
        if self.store.under_way:
            job = self.store.under_way[which % len(self.store.under_way)]
            self.store.end(job, Outcome.LOST if fate == (6 if job.writes else 5) else Outcome.DONE)

    @rule(which=st.integers(0, 9), really=st.integers(0, 6))
    def the_disk_breaks(self, which: int, really: int) -> None:
        if really == 4 and self.store.under_way:
            job = self.store.under_way[which % len(self.store.under_way)]
            self.store.end(job, Outcome.BROKEN)

    @rule(ends=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 7)), min_size=1, max_size=6))
    def some_time_passes(self, ends: list[tuple[bool, int, int]]) -> None:
        for last, which, fate in ends:
            self.schedule()
            self.device_works()
            self.commit()
            self.begin_stores()
            self.a_copy_ends(last, fate)
            self.a_job_ends(which, fate)

    @rule(target=SchedulerMachine.requests, handle=SchedulerMachine.requests, more=st.integers(1, 3))
    def the_next_turn(self, handle: int, more: int) -> int:
        prompt, _, stop = self.prompts[handle]
        history = (prompt + self.output[handle])[: MAX_LEN - 6] + [2] * more
        return self.submit(history, 3, 0, self.salts[handle], stop >= 0)

    @invariant()
    def launched_steps_and_loads_share_no_page(self) -> None:
        loading = {page for copy in self.copies.under_way if not copy.to_host for page, _ in copy.pairs}
        for batch in self.launched:
            touched = {*(batch.slot_mapping // PAGE_SIZE).tolist(), *batch.page_table.reshape(-1).tolist()}
            assert not touched & loading, "a step reads or writes a page that is still on its way"

    def end_transfers(self) -> bool:
        while self.copies.under_way:
            self.copies.under_way.pop(0).end(False)
        while self.store.under_way:
            self.store.end(self.store.under_way[0], Outcome.DONE)
        return self.tiers.num_transfers > 0

    def teardown(self) -> None:
        super().teardown()
        assert not self.tiers.num_transfers
        for places in (self.tiers.host, self.tiers.ssd.blocks):
            assert places.num_free + places.num_cached == places.capacity, "a place is lost"


class CollidingTierMachine(Collisions, TierMachine):
    seen: ClassVar[Counter[str]] = Counter()


MACHINE_SETTINGS = machine_settings(150, 80, daily=45)
TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = MACHINE_SETTINGS


@pytest.mark.nightly
class TestCollidingTierMachine(CollidingTierMachine.TestCase):  # type: ignore[misc]
    settings = MACHINE_SETTINGS

    def runTest(self) -> None:
        super().runTest()
        CollidingTierMachine.check_collisions()
