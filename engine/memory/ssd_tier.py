"""`SsdTier`: the pages of the index that are in an `SsdStore`, and their moves from and to host slots.

All bookkeeping runs on the scheduler's thread; the store's threads read and write.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from weft.engine.errors import WeftError
from weft.engine.memory.block_allocator import BlockAllocator
from weft.engine.memory.extent import Record
from weft.engine.memory.loads import LoadSpeeds, PageLoad
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry, PrefixIndex
from weft.engine.memory.ssd_store import Job, Outcome, Store, chains
from weft.engine.memory.store_file import StoreUnavailable, reason_of
from weft.engine.memory.transfer import PageSizes
from weft.engine.progress import notice
from weft.engine.wire.messages import TierStats

MAX_READS, MAX_WRITES = 32, 32
"""Maximum concurrent jobs. Each holds a host slot, so a quarter of the host pool is a limit too."""
SPILL_WRITES, SPILL_SCAN = 8, 256  # idle pages to write at once, and to examine per iteration
IO_TIMEOUT_SECONDS = 10.0
REOPEN_SECONDS = 10.0  # seconds between attempts to open a store whose disk failed


class _Read(NamedTuple):
    job: Job
    load: PageLoad
    extent: int
    slot: int


class _Write(NamedTuple):
    job: Job
    entry: PrefixEntry
    extent: int
    slot: int
    idle: bool  # the page is written because it is idle


class SsdTier:
    """The SSD tier. `store` is None if there is no SSD, or while it is switched off after a failure.
    `keep_on_host(entry, slot)` is called for pages that were read, `missed(load)` for pages that cannot be read."""

    def __init__(
        self, index: PrefixIndex, host: BlockAllocator, sizes: PageSizes, store: Store | None, speeds: LoadSpeeds,
        keep_on_host: Callable[[PrefixEntry, int], None], missed: Callable[[PageLoad], None],
        reopen: Callable[[], Store] | None = None,
    ) -> None:  # fmt: skip
        """While there is no store, `reopen` opens one on a thread. It raises `StoreUnavailable`, `ConfigError` or
        `OSError` while that fails."""
        self.index, self.host, self.store, self._sizes = index, host, store, sizes
        self._speeds, self._keep_on_host, self._missed = speeds, keep_on_host, missed
        self.stats = TierStats()
        self.blocks = BlockAllocator(store.num_extents if store else 0, PrefixEntry.evictable_from_ssd, self.lose)
        self.unwritten: dict[PrefixEntry, None] = {}  # entries on the host and not on the SSD, oldest first
        self.staged: list[tuple[PageLoad, int]] = []  # (load, slot) of pages that were read, until the owner takes them
        self._queue: deque[tuple[PageLoad, int]] = deque()  # (load, extent) waiting for a host slot
        self._reads: list[_Read] = []
        self._read_clock = 0.0
        self._writes: deque[_Write] = deque()
        self._writing: set[PrefixEntry] = set()
        self._abandoned: list[tuple[Job, int]] = []
        """Jobs of a store that was switched off, and the host slots they may still touch."""
        self._wake = threading.Event()
        self._reopen = reopen
        self._reopened: tuple[Store, list[tuple[int, Record]]] | None = None  # a store that works again, and its pages
        self._forgotten = False  # the index was cleared while the tier was switched off
        self._closed = threading.Event()
        if store is None:
            if reopen is not None:
                self._wait_for_disk(None)
            return
        store.on_done = self.wake
        try:
            records = store.scan()
        except (StoreUnavailable, OSError) as error:
            self._switch_off(reason_of(error) if isinstance(error, OSError) else str(error))
        else:
            self._adopt_stored(store, records)

    # -- called by the owner

    def kept_on_host(self, entry: PrefixEntry) -> None:
        """Queue a page that is on the host now: it must reach the SSD before the host needs its slot."""
        if self.store is not None and entry.extent == NOWHERE:
            self.unwritten[entry] = None

    def load(self, load: PageLoad) -> None:
        """Read a page into a host slot."""
        self.blocks.pin(load.entry.extent)
        self._queue.append((load, load.entry.extent))

    def pump_ends(self) -> None:
        """Process jobs that have ended, notice if the store's file was removed, and use a store that works again."""
        if self._reopened is not None:
            self._switch_on(*self._reopened)
        if self.store is not None and (gone := self.store.gone) is not None:
            self._switch_off(gone)
        self._end_reads()
        self._end_writes()
        self._abandoned = [(job, slot) for job, slot in self._abandoned if not self._unpin_if_ended(job, slot)]

    def pump_starts(self) -> None:
        """Start the jobs that can start. Reads go first, because requests wait for them."""
        self._start_reads()
        self.start_writes()

    @property
    def num_reading(self) -> int:
        return len(self._queue) + len(self._reads)

    @property
    def num_writing(self) -> int:
        return len(self._writes)

    @property
    def quiet(self) -> bool:
        """No job touches a host slot, including those of a store that was switched off."""
        return not (self._queue or self._reads or self._writes or self._abandoned)

    def loads(self) -> list[PageLoad]:
        """Return the page loads that have not reached the host."""
        return [read.load for read in self._reads] + [load for load, _ in self._queue]

    def wait(self, seconds: float) -> None:
        """Return when a job may have ended, or after `seconds`."""
        if self._reads or self._writes:
            self._wake.wait(seconds)
            self._wake.clear()
        else:
            time.sleep(min(seconds, 1e-3))

    def wake(self) -> None:
        """End `wait`. The store's threads call it when a job has ended."""
        self._wake.set()

    def forget(self) -> None:
        """Drop all pages: the index was cleared."""
        self.unwritten.clear()
        self._forgotten = True
        if self.store is not None:
            try:
                self.store.reset()
                self._forgotten = False
            except StoreUnavailable as error:
                self._switch_off(str(error))

    def close(self) -> None:
        self._closed.set()
        if self.store is not None:
            self.store.close()

    # -- SSD to host

    def _start_reads(self) -> None:
        while self.store is not None and self._queue and len(self._reads) < self._most(MAX_READS):
            slot = self.host.take()
            if slot is None:
                return
            load, extent = self._queue.popleft()
            if not self._reads:
                self._read_clock = time.monotonic()
            self._reads.append(_Read(self.store.read(extent, slot), load, extent, slot))

    def _end_reads(self) -> None:
        ended = [r for r in self._reads if r.job.outcome is not Outcome.PENDING]
        if broken := next((r.job for r in ended if r.job.outcome is Outcome.BROKEN), None):
            self._switch_off(broken.reason)
            return
        if any(self._overdue(r.job) for r in self._reads):
            self._switch_off(f"no answer in {IO_TIMEOUT_SECONDS:.0f} s")
            return
        if not ended:
            return
        now = time.monotonic()
        self._speeds.moved("ssd", len(ended), now - self._read_clock)
        self._read_clock = now
        self._reads = [r for r in self._reads if r not in ended]
        for read in ended:
            entry = read.load.entry
            if read.job.outcome is Outcome.DONE:
                size = self._sizes.stored(raw=read.job.raw)
                self.stats.bytes_out += size
                self.stats.bytes_saved += self._sizes.page - size
                if entry.host == NOWHERE and self.index.contains(entry):
                    self._keep_on_host(entry, read.slot)
                self.blocks.unpin(read.extent)
                self.staged.append((read.load, read.slot))
                continue
            # A failed load is a miss: free the extent. Only the missing suffix is computed again.
            self.stats.failures += 1
            assert self.store is not None
            self.store.erase(read.extent)
            if entry.extent == read.extent:
                self.lose(entry)
            self.blocks.unpin(read.extent)
            self.host.unpin(read.slot)
            self._missed(read.load)

    def _most(self, jobs: int) -> int:
        return min(jobs, max(1, self.host.capacity // 4))

    @staticmethod
    def _overdue(job: Job) -> bool:
        begun = job.begun
        waits = job.outcome is Outcome.PENDING and begun is not None
        return waits and time.monotonic() - (begun or 0.0) > IO_TIMEOUT_SECONDS

    def lose(self, entry: PrefixEntry) -> None:
        extent = entry.extent
        self.blocks.forget(extent)
        self.index.set_extent(entry, NOWHERE)

    # -- host to SSD

    def start_writes(self, everything: bool = False) -> None:
        """Write the oldest unwritten pages while less than a quarter of the host pool is free or evictable."""
        store = self.store
        if store is None:
            return
        reserve = self._most(self.host.capacity)
        tries = 2 * MAX_WRITES
        while tries > 0 and self.unwritten and len(self._writes) < self._most(MAX_WRITES):
            tries -= 1
            if not everything and self.host.num_free + self.num_on_both >= reserve:
                return
            entry = next(iter(self.unwritten))
            if not self._write(entry):
                return

    @property
    def num_on_both(self) -> int:
        return self.host.num_cached - len(self.unwritten) if self.store is not None else 0

    def spill(self, idle: int) -> None:
        """Write some idle pages, last used at or before `idle` of the index's clock, while extents are free."""
        if self.store is None or self.num_reading:
            return
        for entry in list(islice(self.unwritten, SPILL_SCAN)):
            if len(self._writes) >= self._most(SPILL_WRITES) or not self.blocks.num_free:
                return
            if entry.used <= idle:
                self._write(entry, idle=True)
            elif entry in self.unwritten:
                del self.unwritten[entry]
                self.unwritten[entry] = None

    def _write(self, entry: PrefixEntry, *, idle: bool = False) -> bool:
        """Start to write an entry that is on the host. Returns False if no extent can be evicted."""
        store = self.store
        assert store is not None
        self.unwritten.pop(entry, None)
        parent = entry.parent
        record = Record(entry.key, parent.key if parent else self.index.root(entry.salt), entry.tokens, entry.salt)
        if not record.fits(self._speeds.page_size):
            return True
        if parent is not None and parent.extent == NOWHERE and parent not in self._writing:
            # Write it after its parent, which the SSD may have evicted.
            if parent.host >= 0:
                self.unwritten[parent] = None
            self.unwritten[entry] = None
            return True
        extent = self.blocks.take()
        if extent is None:
            self.unwritten[entry] = None
            return False
        self.host.pin(entry.host)
        self._writing.add(entry)
        self._writes.append(_Write(store.write(extent, record, entry.host), entry, extent, entry.host, idle))
        return True

    def _end_writes(self) -> None:
        if any(self._overdue(w.job) for w in self._writes):
            self._switch_off(f"no answer in {IO_TIMEOUT_SECONDS:.0f} s")
        # In start order, so that a parent is stored before its child.
        while self._writes and self._writes[0].job.outcome is not Outcome.PENDING:
            if self._writes[0].job.outcome is Outcome.BROKEN:
                self._switch_off(self._writes[0].job.reason)
                return
            write = self._writes.popleft()
            entry = write.entry
            self._writing.discard(entry)
            if write.job.outcome is Outcome.LOST:
                self.stats.failures += 1  # no remainder was free for a page that could not be packed
            elif (
                self.index.contains(entry)
                and entry.extent == NOWHERE
                and (entry.parent is None or entry.parent.extent >= 0)
            ):
                size = self._sizes.stored(raw=write.job.raw)
                self.stats.bytes_in += size
                self.stats.bytes_saved += self._sizes.page - size
                self.stats.raw_pages += write.job.raw
                self.stats.spilled += write.idle
                self.blocks.settle(write.extent, entry)
                self.index.set_extent(entry, write.extent)
            self.host.unpin(write.slot)
            self.blocks.unpin(write.extent)

    def _switch_off(self, reason: str) -> None:
        """Continue without the SSD until its disk works again: log one line, and make every extent a miss."""
        store, self.store = self.store, None
        if store is None:
            return
        notice(f"SSD tier switched off: {reason}; serving continues without it")
        self.stats.failures += 1
        self._abandoned += [(r.job, r.slot) for r in self._reads] + [(w.job, w.slot) for w in self._writes]
        missed = [r.load for r in self._reads] + [load for load, _ in self._queue]
        self._reads, self._queue = [], deque()
        self._writes.clear()
        self._writing.clear()
        self.unwritten.clear()
        lost = [entry for _, entry in self.blocks.entries()]
        evictions = self.blocks.evictions
        self.blocks = BlockAllocator(0, PrefixEntry.evictable_from_ssd, self.lose)
        self.blocks.evictions = evictions
        for entry in lost:
            self.index.set_extent(entry, NOWHERE)
        for load in missed:
            self._missed(load)
        self._wait_for_disk(store)

    def _wait_for_disk(self, old: Store | None) -> None:
        """Close the failed store and open it again, on a thread, because a disk that hangs must not block the
        scheduler."""

        def run() -> None:
            failed = old
            while True:
                if failed is not None:
                    failed.close()
                if self._reopen is None or self._closed.wait(REOPEN_SECONDS):
                    return
                try:
                    failed = store = self._reopen()
                    self._reopened = store, store.scan()
                    return
                except (StoreUnavailable, WeftError, OSError):
                    continue

        threading.Thread(target=run, name="weft-ssd-reopen", daemon=True).start()

    def _switch_on(self, store: Store, records: list[tuple[int, Record]]) -> None:
        self._reopened, self.store = None, store
        store.on_done = self.wake
        evictions = self.blocks.evictions
        self.blocks = BlockAllocator(store.num_extents, PrefixEntry.evictable_from_ssd, self.lose)
        self.blocks.evictions = evictions
        if self._forgotten:
            records = []
            self.forget()
        self._adopt_stored(store, records)
        for _, entry in self.host.entries():
            self.kept_on_host(entry)
        if self.store is not None:
            notice(f"SSD tier works again, with {self.blocks.num_used} pages")

    def _unpin_if_ended(self, job: Job, slot: int) -> bool:
        if job.outcome is Outcome.PENDING:
            return False
        self.host.unpin(slot)
        return True

    def _adopt_stored(self, store: Store, records: list[tuple[int, Record]]) -> None:
        """Add stored pages to the index, parents before children, oldest first."""
        if self.store is not store:
            return
        for extent, record in chains(records, self.index.root):
            parent = self.index.find(record.parent_key)
            if parent is not None and parent.extent == NOWHERE:
                continue
            entry = self.index.publish(parent, record.key, record.tokens, record.salt)
            if entry is None or entry.extent != NOWHERE:
                continue
            if not entry.anywhere:
                entry.used = record.serial
                self.index.clock = max(self.index.clock, record.serial)
            self.blocks.claim(extent, entry)
            self.index.set_extent(entry, extent)
