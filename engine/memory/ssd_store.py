"""`SsdStore`: stores pages of KV in one preallocated file (`StoreFile`), on separate threads.

A cache may lose entries but must never return wrong ones. A page is written in full before its header, and data that
is read is compared with the header's checksum before use. A mismatch is a miss, and the extent is reused.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from weft.engine.memory.extent import Record, checksum
from weft.engine.memory.store_file import StoreFile, StoreUnavailable, reason_of
from weft.engine.memory.transfer import Bytes, Remainders

READERS, WRITERS = 8, 4
WATCH_SECONDS = 2.0  # seconds between checks that the file has been neither removed nor truncated


class Outcome(enum.Enum):
    PENDING = enum.auto()
    DONE = enum.auto()
    LOST = enum.auto()  # the extent does not match its header, or there was no remainder for the page
    BROKEN = enum.auto()  # the device failed, so the tier must be switched off


class Job:
    """A read or write. The thread that runs it sets `outcome` last."""

    def __init__(self) -> None:
        self.outcome = Outcome.PENDING
        self.begun: float | None = None  # start in monotonic seconds; None while queued
        self.reason = ""
        self.raw = False  # The page could not be packed. Valid once the outcome is set.


class Store(Protocol):
    """The store of an SSD tier, as `Tiers` uses it. The caller assigns extents `0 … num_extents - 1` to pages."""

    on_done: Callable[[], None]  # called on any thread when a job has ended

    @property
    def num_extents(self) -> int: ...

    @property
    def gone(self) -> str | None:
        """Why written pages would be lost with this process; None if they would not."""

    def scan(self) -> list[tuple[int, Record]]:
        """Return extents with valid headers, oldest first. Call once, before any write."""

    def write(self, extent: int, record: Record, slot: int) -> Job:
        """Write the host slot's page to the extent and drop its old content. LOST if no remainder is free."""

    def read(self, extent: int, slot: int) -> Job:
        """Read the extent's page into the host slot and verify its checksum."""

    def erase(self, extent: int) -> None:
        """Drop one extent permanently, in the background."""

    def reset(self) -> None:
        """Drop every extent permanently. Raises `StoreUnavailable` if the device fails."""

    def close(self) -> None: ...


Task = tuple[Job, Callable[[Job], Outcome]]


class SsdStore:
    """A `Store` on a `StoreFile`, with threads that read and write."""

    def __init__(self, file: StoreFile, host: Bytes, remainders: Remainders | None = None) -> None:
        """`host [slots, stride]` is the host pool, `remainders` holds the ends of its pages that are not packed."""
        self.file = file
        self._host_remainders = remainders if remainders is not None else Remainders(0)
        self._remainders = Remainders(file.geometry.num_remainders)
        self._ends = [memoryview(remainder) for remainder in self._host_remainders.memory]
        self._slots = [memoryview(host[i])[: file.geometry.extent_bytes] for i in range(len(host))]
        self._payload_bytes = file.geometry.payload_bytes
        self._checksums: dict[int, bytes] = {}
        self._serial = 0
        self.on_done: Callable[[], None] = lambda: None
        self._reads: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # Each extent has one writer, so its writes run in order.
        self._writes: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in range(WRITERS)]
        queues = [self._reads] * READERS + self._writes
        self._threads = [threading.Thread(target=self._work, args=(q,), name="weft-ssd", daemon=True) for q in queues]
        for thread in self._threads:
            thread.start()
        self.gone: str | None = None
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="weft-ssd-watch", daemon=True).start()

    @property
    def num_extents(self) -> int:
        return self.file.geometry.num_extents

    def _watch(self) -> None:
        """Watch the path on a thread, because a disk may hang."""
        while not self._closing.wait(WATCH_SECONDS):
            if (loss := self.file.loss()) is not None:
                self.gone = f"{self.file.path} was {loss}"
                self.on_done()
                return

    def scan(self) -> list[tuple[int, Record]]:
        records = self.file.headers()
        for extent, record in records:
            self._checksums[extent] = record.payload
            self._serial = max(self._serial, record.serial)
        # If two extents claim one remainder, the newer one wrote it, and the older one fails its checksum.
        for extent, record in reversed(records):
            if record.remainder >= 0:
                self._remainders.claim(extent, record.remainder)
        return records

    def write(self, extent: int, record: Record, slot: int) -> Job:
        self._serial += 1
        serial, epoch, stale = self._serial, self.file.epoch, self._checksums.pop(extent, None)

        def work(job: Job) -> Outcome:
            data = self._slots[slot]
            if stale is not None:
                self.file.write_header(extent, None, epoch)
            self._remainders.drop(extent)
            remainder, end = -1, self._end_of(slot)
            if end is not None:
                job.raw = True
                if (taken := self._remainders.take(extent)) is None:
                    return Outcome.LOST
                remainder = taken
                self.file.write_remainder(remainder, end)
            payload = self._checksum(slot, end)
            self.file.write_extent(extent, data)
            written = replace(record, payload=payload, serial=serial, remainder=remainder)
            self.file.write_header(extent, written, epoch)
            self._checksums[extent] = payload
            return Outcome.DONE

        return self._submit(self._writes[extent % WRITERS], work)

    def read(self, extent: int, slot: int) -> Job:
        def work(job: Job) -> Outcome:
            self._host_remainders.drop(slot)
            end: memoryview | None = None
            if (remainder := self._remainders.of(extent)) is not None:
                job.raw = True
                if self._host_remainders.take(slot) is None:
                    return Outcome.LOST
                end = self._end_of(slot)
                if end is None or not self.file.read_remainder(remainder, end):
                    return Outcome.LOST
            if not self.file.read_extent(extent, self._slots[slot]):
                return Outcome.LOST
            right = self._checksum(slot, end) == self._checksums.get(extent)
            return Outcome.DONE if right else Outcome.LOST

        return self._submit(self._reads, work)

    def _end_of(self, slot: int) -> memoryview | None:
        """Return the end of a page in the host pool that could not be packed; None for packed pages."""
        remainder = self._host_remainders.of(slot)
        return None if remainder is None else self._ends[remainder]

    def _checksum(self, slot: int, end: memoryview | None) -> bytes:
        ends = [] if end is None else [end[: self.file.geometry.remainder_bytes]]
        return checksum(self._slots[slot][: self._payload_bytes], *ends)

    def erase(self, extent: int) -> None:
        epoch = self.file.epoch
        self._checksums.pop(extent, None)

        def work(_: Job) -> Outcome:
            self.file.write_header(extent, None, epoch)
            self._remainders.drop(extent)
            return Outcome.DONE

        self._submit(self._writes[extent % WRITERS], work)

    def reset(self) -> None:
        self._checksums.clear()
        self._remainders = Remainders(self.file.geometry.num_remainders)
        try:
            self.file.new_epoch()
        except OSError as error:
            raise StoreUnavailable(f"its pages cannot be cleared ({reason_of(error)}), {self._removed()}") from None

    def _removed(self) -> str:
        """Remove the file, so that no later run finds the pages that were to be cleared. Returns the result as text."""
        try:
            self.file.remove()
        except OSError as error:
            return f"and {self.file.path} cannot be removed ({reason_of(error)}): remove it before the next start"
        return f"so {self.file.path} was removed"

    def _submit(self, tasks: queue.SimpleQueue[Task | None], work: Callable[[Job], Outcome]) -> Job:
        job = Job()
        tasks.put((job, work))
        return job

    def _work(self, tasks: queue.SimpleQueue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            job, work = task
            job.begun = time.monotonic()
            try:
                outcome = work(job)
            except OSError as error:
                outcome, job.reason = Outcome.BROKEN, reason_of(error)
            job.outcome = outcome
            self.on_done()

    def close(self, patience: float = 10.0) -> None:
        """Finish queued jobs, but wait no longer than `patience` seconds for the disk."""
        self._closing.set()
        for _ in range(READERS):
            self._reads.put(None)
        for writes in self._writes:
            writes.put(None)
        end = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if not any(t.is_alive() for t in self._threads):
            self.file.close()


def chains(records: Sequence[tuple[int, Record]], root: Callable[[str], bytes]) -> list[tuple[int, Record]]:
    """Return the records that have a complete chain, parents before children. The newest record of each key counts.
    `root(salt)` is the parent key of first pages."""
    newest = {record.key: (extent, record) for extent, record in records}
    children: dict[bytes, list[tuple[int, Record]]] = {}
    for item in newest.values():
        children.setdefault(item[1].parent_key, []).append(item)
    ordered = [item for item in newest.values() if item[1].parent_key == root(item[1].salt)]
    for _, record in ordered:  # grows during iteration
        ordered += [child for child in children.get(record.key, ()) if child[1].salt == record.salt]
    return ordered
