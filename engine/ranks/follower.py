"""`Follower`: what a rank but the first does all day: it takes orders and computes. It knows no request.

The calling thread runs iterations; a thread beside it takes orders out of the ring, hands iterations on and begins
copies, which so run beside iterations here as they do on rank 0.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.engine.memory.extent import Record
from weft.engine.memory.ssd_store import Job, Outcome, SsdStore
from weft.engine.memory.store_file import StoreFile
from weft.engine.memory.transfer import Copy, CopyEngine, Pairs
from weft.engine.ranks.batches import batch_of
from weft.engine.ranks.leader import BROKEN, DONE, LOST, PENDING, POLL_SECONDS
from weft.engine.ranks.links import LOOK_SECONDS, Bytes, Links
from weft.engine.ranks.ring import Kind, RingReader
from weft.engine.ranks.scans import agreed, meet
from weft.engine.runner.cpu.cpu_runner import CpuRunner
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.device.runner import InFlight, Runner
from weft.engine.runner.iteration.batch import Batch
from weft.engine.wire.heartbeat import HEARTBEAT_SECONDS

_OF_JOB = {Outcome.PENDING: PENDING, Outcome.DONE: DONE, Outcome.LOST: LOST, Outcome.BROKEN: BROKEN}


LAUNCHED_SECONDS = 0.02
"""between looks at an iteration on a GPU that nothing follows"""
AHEAD = 1
"""iterations launched behind the one that is waited for, as on rank 0"""


class _Held(NamedTuple):
    """A copy that waits for the iterations before it."""

    behind: int
    """iterations"""
    kind: Kind
    place: int
    pairs: Pairs


class _Act(NamedTuple):
    """A copy, read or write under way."""

    place: int
    what: Copy | Job


def _outcome(what: Copy | Job) -> int:
    if isinstance(what, Job):
        return _OF_JOB[what.outcome]
    if not what.done():
        return PENDING
    if what.failed:
        return BROKEN
    return LOST if what.unkept else DONE


class Follower:
    def __init__(
        self, links: Links, runner: Runner, collectives: Collectives, file: StoreFile | None, threads: int
    ) -> None:
        """file: of this rank's SSD tier. threads: of iterations."""
        self._links, self._runner, self._collectives, self._file = links, runner, collectives, file
        self._threads = threads
        self._ring = RingReader(links)
        self._outcomes = links.outcomes()[links.rank]
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._taken = self._computed = 0
        """iterations out of the ring, and those that are done here"""
        self._held: deque[_Held] = deque()
        self._acts: list[_Act] = []
        self._copies: CopyEngine | None = None
        self._store: SsdStore | None = None
        self._error: BaseException | None = None
        self._launched: deque[InFlight] = deque()

    def run(self, heartbeat: Callable[[], None]) -> None:
        """Until rank 0 says so. `heartbeat` is called with each round of the loop. Raises what went wrong."""
        torch.set_num_threads(self._threads)
        listener = threading.Thread(target=self._listen, name="weft-orders", daemon=True)
        listener.start()
        with torch.inference_mode():
            while (batch := self._next(heartbeat)) is not None:
                if isinstance(self._runner, CpuRunner):
                    self._runner.run(batch)
                    self._computed += 1
                else:
                    self._launched.append(self._runner.launch(batch))
                    self._wait_for_launched(AHEAD)
        if self._error is not None:
            raise self._error
        listener.join()
        self._runner.close()

    def _next(self, heartbeat: Callable[[], None]) -> Batch | None:
        while True:
            heartbeat()
            try:
                return self._batches.get(timeout=LAUNCHED_SECONDS if self._launched else HEARTBEAT_SECONDS)
            except queue.Empty:
                if self._launched and self._launched[0].ends_within(0.0):
                    self._wait_for_launched(len(self._launched) - 1)

    def _wait_for_launched(self, but: int) -> None:
        """Of a GPU: for all but so many iterations. Raises what went wrong with them."""
        while len(self._launched) > but:
            self._launched.popleft().wait()
            self._computed += 1

    def _listen(self) -> None:
        try:
            while self._take():
                self._begin_copies()
                self._report()
        except BaseException as error:  # of a thread: raised where its batches are taken
            self._error = error
        self._batches.put(None)

    def _take(self) -> bool:
        """One order, if there is one. False: it was the last."""
        order = self._ring.receive(POLL_SECONDS if self._acts or self._held else LOOK_SECONDS)
        if order is None:
            return True
        kind, arrays = order
        if kind is Kind.BATCH:
            self._taken += 1
            self._batches.put(batch_of(arrays))
            return True
        if kind is Kind.END:
            return False
        numbers = arrays[0].view(np.int64).tolist() if arrays else []
        if kind is Kind.POOL:
            self._copies = self._runner.copy_engine(*numbers)
            if self._file is not None:
                self._store = SsdStore(self._file, self._copies.host, self._copies.remainders)
            meet(self._collectives)
        elif kind in (Kind.OUT, Kind.BACK):
            pairs = [(page, slot) for page, slot in _pairs(arrays[1])]
            self._held.append(_Held(self._taken, kind, numbers[0], pairs))
        elif kind is Kind.CLOSE_POOL:
            assert self._copies is not None
            if self._store is not None:
                self._store.close()
            self._copies.close()
        else:
            assert self._store is not None
            self._keep(self._store, kind, numbers, arrays[1:])
        return True

    def _keep(self, store: SsdStore, kind: Kind, numbers: list[int], texts: Sequence[Bytes]) -> None:
        if kind is Kind.SCAN:
            agreed(self._collectives, store.scan())
        elif kind is Kind.WRITE:
            place, extent, slot = numbers
            key, parent, tokens, salt = (text.tobytes() for text in texts)
            record = Record(key, parent, tokens, salt.decode("utf-8", "surrogatepass"))
            self._acts.append(_Act(place, store.write(extent, record, slot)))
        elif kind is Kind.READ:
            place, extent, slot = numbers
            self._acts.append(_Act(place, store.read(extent, slot)))
        elif kind is Kind.ERASE:
            store.erase(*numbers)
        elif kind is Kind.RESET:
            store.reset()

    def _begin_copies(self) -> None:
        """Those that nothing computed here before them can touch any more.

        Rank 0 was done with the pages when it asked. This rank need not be: behind the last layer's keys and values of
        an iteration of which no row is read, nothing is added up, and so nobody waits for anybody.
        """
        while self._held and self._held[0].behind <= self._computed:
            held = self._held.popleft()
            assert self._copies is not None
            act = self._copies.out if held.kind is Kind.OUT else self._copies.back
            self._acts.append(_Act(held.place, act(held.pairs)))

    def _report(self) -> None:
        """Show what has ended."""
        open_acts = []
        for act in self._acts:
            if (outcome := _outcome(act.what)) == PENDING:
                open_acts.append(act)
            else:
                self._outcomes[act.place] = outcome
        self._acts = open_acts


def _pairs(array: Bytes) -> list[list[int]]:
    pairs: list[list[int]] = array.view(np.int64).reshape(-1, 2).tolist()
    return pairs
