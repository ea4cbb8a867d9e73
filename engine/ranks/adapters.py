"""LoRA adapters on several ranks: each rank reads its shard of an adapter, and adds it between the same iterations.

A projection that reads the stream has A whole on each rank, and the rows of B that its matrix has. One that adds to the
stream has the columns of A that its matrix has, and B whole: the rank's partial sum includes B times its part of A's
product, so the all-reduce that follows is the only one.
"""

from __future__ import annotations

import itertools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.engine.errors import ModelError, WeftError
from weft.engine.memory.ssd_store import Job, Outcome
from weft.engine.model.adapter import Adapter
from weft.engine.ranks.operations import Operations
from weft.engine.ranks.ring import Kind, RingWriter

Read = Callable[[Path], tuple[str, Adapter]]
"""Returns the digest and the rank's shard of an adapter's directory. Raises `WeftError`."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReadAdapter(Adapter):
    """An adapter that every rank has read."""

    own: Adapter  # Rank 0's.
    ticket: int  # Its number on the other ranks until it is added.


class LeadingAdapters(MutableMapping[int, Adapter]):
    """Rank 0's adapters by number. What changes here changes on all ranks, in the same place among iterations."""

    def __init__(self, own: MutableMapping[int, Adapter], ring: RingWriter, operations: Operations) -> None:
        self._own, self._ring, self._operations = own, ring, operations
        self._tickets = itertools.count()
        self._alive: weakref.WeakValueDictionary[int, ReadAdapter] = weakref.WeakValueDictionary()
        """Adapters that may be added yet. The other ranks forget the others."""

    def read(self, own: Adapter, path: Path, digest: str) -> ReadAdapter:
        """Return an adapter once the other ranks have read it too. Only one thread may call it.

        Raises `ModelError` if one cannot, and `RankLost`."""
        made = ReadAdapter((), own.rank, own, next(self._tickets))
        self._alive[made.ticket] = made
        place = self._operations.begin()
        texts = (np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8) for text in (str(path), digest))
        self._ring.send(Kind.READ_ADAPTER, np.array([place, made.ticket, min(self._alive)]), *texts)
        if not self._operations.succeeds(place):
            raise ModelError(
                f"not every rank could read {path}, or it changed while it was being loaded: load it again"
            )
        return made

    def __setitem__(self, number: int, adapter: Adapter) -> None:
        assert isinstance(adapter, ReadAdapter)
        self._ring.send(Kind.ADD_ADAPTER, np.array([number, adapter.ticket]))
        self._own[number] = adapter.own

    def __delitem__(self, number: int) -> None:
        self._ring.send(Kind.DROP_ADAPTER, np.array([number]))
        del self._own[number]

    def __getitem__(self, number: int) -> Adapter:
        return self._own[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


class FollowingAdapters:
    """The adapters of another rank. Orders arrive on one thread, and `memory` changes on the one that iterates."""

    def __init__(self, memory: MutableMapping[int, Adapter], read: Read) -> None:
        """memory: the runner's adapters by number."""
        self._memory, self._read = memory, read
        self._waiting: dict[int, Adapter] = {}  # By ticket.

    def begin(self, ticket: int, oldest: int, path: Path, digest: str) -> Job:
        """Read an adapter on a thread. oldest: the lowest ticket that may be added yet."""
        for given_up in [other for other in self._waiting if other < oldest]:
            del self._waiting[given_up]
        job = Job()

        def run() -> None:
            try:
                found, adapter = self._read(path)
                if found == digest:
                    self._waiting[ticket] = adapter
                    job.outcome = Outcome.DONE
            except WeftError:
                pass  # rank 0 reports it
            except Exception:  # rank 0 waits for this job, so it must end however a file breaks a reader
                traceback.print_exc()
            if job.outcome is Outcome.PENDING:
                job.outcome = Outcome.BROKEN

        threading.Thread(target=run, name="weft-adapter", daemon=True).start()
        return job

    def adding(self, number: int, ticket: int) -> Callable[[], None]:
        """Return what adds an adapter that was read."""
        adapter = self._waiting.pop(ticket)
        return lambda: self._memory.__setitem__(number, adapter)

    def dropping(self, number: int) -> Callable[[], None]:
        return lambda: self._memory.__delitem__(number)
