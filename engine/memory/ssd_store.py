"""`SsdStore`: pages of KV in one preallocated file (`StoreFile`), written and read by threads of its own.

A cache may lose entries, never lie: a page is written in full before its header names it, and what is read is
compared with the header's checksum before anyone uses it. What does not hold is a miss, and its extent is used anew.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from weft.engine.memory.extent import Record, checksum
from weft.engine.memory.rests import Rests
from weft.engine.memory.store_file import StoreFile, StoreUnavailable, reason_of
from weft.engine.memory.transfer import Bytes

READERS, WRITERS = 8, 4
WATCH_SECONDS = 2.0
"""between looks at the path, which somebody may remove"""


class Outcome(enum.Enum):
    PENDING = enum.auto()
    DONE = enum.auto()
    LOST = enum.auto()
    """this extent does not hold what its header promised"""
    BROKEN = enum.auto()
    """the device failed: the tier cannot go on"""


class Job:
    """A read or write under way. `outcome` is set last, by the thread that did it."""

    def __init__(self) -> None:
        self.outcome = Outcome.PENDING
        self.begun: float | None = None
        """monotonic; None while it waits for a thread"""
        self.reason = ""
        self.raw = False
        """of a page that could not be packed; known with the outcome"""


class Store(Protocol):
    """What `Tiers` asks of an SSD tier. Extents are `0 … num_extents - 1`; who calls decides what is where."""

    on_done: Callable[[], None]
    """called on any thread when a job has ended"""

    @property
    def num_extents(self) -> int: ...

    @property
    def gone(self) -> str | None:
        """Why what is written would be lost with this process; None as long as it would not."""
        ...

    def scan(self) -> list[tuple[int, Record]]:
        """Extents whose headers hold, oldest first. Once, before anything is written."""
        ...

    def write(self, extent: int, record: Record, slot: int) -> Job:
        """The host slot's page into the extent; its old content is gone at once. LOST: there is no room for it."""
        ...

    def read(self, extent: int, slot: int) -> Job:
        """The extent's page into the host slot, its checksum compared."""
        ...

    def erase(self, extent: int) -> None:
        """Forget one extent for good (in the background)."""
        ...

    def reset(self) -> None:
        """Forget every extent for good. Raises `StoreUnavailable` when the device refuses."""
        ...

    def close(self) -> None: ...


class _Task(NamedTuple):
    job: Job
    work: Callable[[Job], Outcome]


class SsdStore:
    """The SSD tier's file with its threads (see `Store`)."""

    def __init__(self, file: StoreFile, host: Bytes, rests: Rests | None = None) -> None:
        """`host [slots, stride]` is where pages come from and go to, `rests` the ends of those that are not packed."""
        self.file = file
        self._host_rests = rests if rests is not None else Rests(0)
        self._rests = Rests(file.geometry.num_rests)
        self._ends = [memoryview(rest) for rest in self._host_rests.memory]
        self._slots = [memoryview(host[i])[: file.geometry.extent_bytes] for i in range(len(host))]
        self._payload_bytes = file.geometry.payload_bytes
        self._checksums: dict[int, bytes] = {}
        self._serial = 0
        self.on_done: Callable[[], None] = lambda: None
        self._reads: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # What is done to one extent is done in order: it has one writer.
        self._writes: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in range(WRITERS)]
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
        """On a thread: a path on a disk that hangs must hold up nobody."""
        while not self._closing.wait(WATCH_SECONDS):
            if not self.file.is_there():
                self.gone = f"{self.file.path} was removed"
                self.on_done()
                return

    def scan(self) -> list[tuple[int, Record]]:
        records = self.file.headers()
        for extent, record in records:
            self._checksums[extent] = record.payload
            self._serial = max(self._serial, record.serial)
        # The youngest of two that claim one rest wrote it; what the other has there does not hold.
        for extent, record in reversed(records):
            if record.rest >= 0:
                self._rests.claim(extent, record.rest)
        return records

    def write(self, extent: int, record: Record, slot: int) -> Job:
        self._serial += 1
        serial, epoch, stale = self._serial, self.file.epoch, self._checksums.pop(extent, None)

        def work(job: Job) -> Outcome:
            data = self._slots[slot]
            if stale is not None:
                self.file.write_header(extent, None, epoch)
            self._rests.drop(extent)
            rest, end = -1, self._end_of(slot)
            if end is not None:
                job.raw = True
                if (place := self._rests.take(extent)) is None:
                    return Outcome.LOST
                rest = place
                self.file.write_rest(rest, end)
            payload = self._checksum(slot, end)
            self.file.write_extent(extent, data)
            self.file.write_header(extent, replace(record, payload=payload, serial=serial, rest=rest), epoch)
            self._checksums[extent] = payload
            return Outcome.DONE

        return self._submit(self._writes[extent % WRITERS], work)

    def read(self, extent: int, slot: int) -> Job:
        def work(job: Job) -> Outcome:
            self._host_rests.drop(slot)
            end: memoryview | None = None
            if (rest := self._rests.of(extent)) is not None:
                job.raw = True
                if self._host_rests.take(slot) is None:
                    return Outcome.LOST
                end = self._end_of(slot)
                if end is None or not self.file.read_rest(rest, end):
                    return Outcome.LOST
            if not self.file.read_extent(extent, self._slots[slot]):
                return Outcome.LOST
            right = self._checksum(slot, end) == self._checksums.get(extent)
            return Outcome.DONE if right else Outcome.LOST

        return self._submit(self._reads, work)

    def _end_of(self, slot: int) -> memoryview | None:
        """Of a page on the host that could not be packed."""
        rest = self._host_rests.of(slot)
        return None if rest is None else self._ends[rest]

    def _checksum(self, slot: int, end: memoryview | None) -> bytes:
        parts = [self._slots[slot][: self._payload_bytes]]
        return checksum(*parts, *([end[: self.file.geometry.rest_bytes]] if end is not None else []))

    def erase(self, extent: int) -> None:
        epoch = self.file.epoch
        self._checksums.pop(extent, None)

        def work(_: Job) -> Outcome:
            self.file.write_header(extent, None, epoch)
            self._rests.drop(extent)
            return Outcome.DONE

        self._submit(self._writes[extent % WRITERS], work)

    def reset(self) -> None:
        self._checksums.clear()
        self._rests = Rests(self.file.geometry.num_rests)
        try:
            self.file.new_epoch()
        except OSError as error:
            raise StoreUnavailable(f"it cannot forget its pages ({reason_of(error)}), {self._removed()}") from None

    def _removed(self) -> str:
        """Remove the file, so that no later run finds in it what was to be forgotten; what became of that, in words."""
        try:
            self.file.remove()
        except OSError as error:
            return f"nor can {self.file.path} be removed ({reason_of(error)}): remove it, or the next start has them"
        return f"so {self.file.path} was removed"

    def _submit(self, tasks: queue.SimpleQueue[_Task | None], work: Callable[[Job], Outcome]) -> Job:
        job = Job()
        tasks.put(_Task(job, work))
        return job

    def _work(self, tasks: queue.SimpleQueue[_Task | None]) -> None:
        while (task := tasks.get()) is not None:
            job = task.job
            job.begun = time.monotonic()
            try:
                outcome = task.work(job)
            except OSError as error:
                outcome, job.reason = Outcome.BROKEN, reason_of(error)
            job.outcome = outcome
            self.on_done()

    def close(self, patience: float = 10.0) -> None:
        """Finish what was asked for, but do not wait for a disk that does not answer."""
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
    """Records whose whole chain is there, parents before children, one for each key; the rest are of no use.

    `root(salt)` is the key before a first page; among two of one key the younger counts.
    """
    youngest = {record.key: (extent, record) for extent, record in records}
    children: dict[bytes, list[tuple[int, Record]]] = {}
    for item in youngest.values():
        children.setdefault(item[1].parent_key, []).append(item)
    ordered = [item for item in youngest.values() if item[1].parent_key == root(item[1].salt)]
    for _, record in ordered:  # grows while it is read
        ordered += [child for child in children.get(record.key, ()) if child[1].salt == record.salt]
    return ordered
