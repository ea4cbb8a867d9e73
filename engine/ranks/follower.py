"""`Follower`: the main loop of every rank except rank 0. It executes orders and has no notion of requests.

The calling thread runs iterations. A second thread reads orders from the ring, passes iterations on and starts copies,
so that copies overlap iterations as they do on rank 0.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from weft.engine.errors import WeftError
from weft.engine.memory.extent import Record
from weft.engine.memory.ssd_store import Job, Outcome, SsdStore
from weft.engine.memory.store_file import StoreFile, StoreUnavailable
from weft.engine.memory.tier_setup import opened_again
from weft.engine.memory.transfer import Copy, CopyEngine, Pairs
from weft.engine.ranks.adapters import FollowingAdapters
from weft.engine.ranks.agreement import barrier
from weft.engine.ranks.batches import batch_of
from weft.engine.ranks.links import LOOK_SECONDS, Bytes, Links
from weft.engine.ranks.operations import BROKEN, DONE, LOST, PENDING, POLL_SECONDS
from weft.engine.ranks.ring import Kind, RingReader
from weft.engine.runner.cpu.cpu_runner import CpuRunner
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.device.runner import InFlight, Runner
from weft.engine.runner.iteration.batch import I32, Batch
from weft.engine.wire.heartbeat import HEARTBEAT_SECONDS
from weft.engine.wire.page_keys import KEY_BYTES

_OF_JOB = {Outcome.PENDING: PENDING, Outcome.DONE: DONE, Outcome.LOST: LOST, Outcome.BROKEN: BROKEN}
LAUNCHED_SECONDS = 0.02  # Seconds between checks of a launched GPU iteration while no further one arrives.
AHEAD = 1  # Iterations launched after the one being waited for, as on rank 0.


class Embeddings(NamedTuple):
    """Embeddings of images for rows of the pool."""

    rows: I32
    values: Bytes


class _HeldCopy(NamedTuple):
    """A copy that waits until the first `after` iterations have been computed."""

    after: int
    kind: Kind
    place: int
    pairs: Pairs


class _Transfer(NamedTuple):
    """A copy, read or write in progress."""

    place: int
    work: Copy | Job


def _outcome(work: Copy | Job) -> int:
    if isinstance(work, Job):
        return _OF_JOB[work.outcome]
    if not work.done():
        return PENDING
    if work.failed:
        return BROKEN
    return LOST if work.unkept else DONE


class Follower:
    def __init__(
        self, links: Links, runner: Runner, collectives: Collectives, file: StoreFile | None, threads: int,
        reopen: Callable[[], StoreFile], adapters: FollowingAdapters | None = None, images: ImagePool | None = None,
    ) -> None:  # fmt: skip
        """file: the file of this rank's SSD tier. threads: compute threads for iterations. reopen: opens the file
        after its disk failed. images: the embeddings of images, if the model takes any."""
        self._links, self._runner, self._collectives, self._file = links, runner, collectives, file
        self._threads, self._reopen, self._adapters, self._images = threads, reopen, adapters, images
        self._ring = RingReader(links)
        self._outcomes, self._state = links.outcomes()[links.rank], links.state(links.rank)
        self._batches: queue.SimpleQueue[Batch | Embeddings | Callable[[], None] | None] = queue.SimpleQueue()
        """Iterations, and embeddings and changes of adapters between them."""
        self._taken = self._computed = 0
        """Iterations taken from the ring, and iterations computed on this rank."""
        self._held: deque[_HeldCopy] = deque()
        self._transfers: list[_Transfer] = []
        self._copies: CopyEngine | None = None
        self._store: SsdStore | None = None
        self._store_usable = False
        self._error: BaseException | None = None
        self._launched: deque[InFlight] = deque()

    def run(self, heartbeat: Callable[[], None]) -> None:
        """Run until rank 0 sends `END`. Calls `heartbeat` once per loop. Raises any error of either thread."""
        torch.set_num_threads(self._threads)
        listener = threading.Thread(target=self._listen, name="weft-orders", daemon=True)
        listener.start()
        with torch.inference_mode():
            while (batch := self._next(heartbeat)) is not None:
                if isinstance(batch, Embeddings):
                    assert self._images is not None
                    with torch.cuda.stream(getattr(self._runner, "stream", None)):  # after launched iterations
                        self._images.put(*batch)
                elif callable(batch):
                    self._wait_for_launched(0)
                    batch()
                elif isinstance(self._runner, CpuRunner):
                    self._runner.run(batch)
                    self._computed += 1
                else:
                    self._launched.append(self._runner.launch(batch))
                    self._wait_for_launched(AHEAD)
        if self._error is not None:
            raise self._error
        listener.join()
        self._runner.close()

    def _next(self, heartbeat: Callable[[], None]) -> Batch | Embeddings | Callable[[], None] | None:
        while True:
            heartbeat()
            try:
                return self._batches.get(timeout=LAUNCHED_SECONDS if self._launched else HEARTBEAT_SECONDS)
            except queue.Empty:
                if self._launched and self._launched[0].ends_within(0.0):
                    self._wait_for_launched(len(self._launched) - 1)

    def _wait_for_launched(self, remaining: int) -> None:
        """Wait for launched GPU iterations until only `remaining` are in flight. Raises their errors."""
        while len(self._launched) > remaining:
            self._launched.popleft().wait()
            self._computed += 1

    def _listen(self) -> None:
        try:
            while self._take_order():
                self._begin_copies()
                self._report()
        except BaseException as error:  # `run` raises it
            self._error = error
        self._batches.put(None)

    def _take_order(self) -> bool:
        """Handle the next order if there is one. Returns False after the last order."""
        order = self._ring.receive(POLL_SECONDS if self._transfers or self._held else LOOK_SECONDS)
        if order is None:
            return True
        kind, arrays = order
        if kind is Kind.BATCH:
            self._taken += 1
            self._batches.put(batch_of(arrays))
            return True
        if kind is Kind.EMBEDDINGS:
            self._batches.put(Embeddings(arrays[0].view(np.int32), arrays[1]))
            return True
        if kind is Kind.END:
            return False
        numbers = arrays[0].view(np.int64).tolist() if arrays else []
        if kind is Kind.POOL:
            self._copies = self._runner.copy_engine(*numbers)
            barrier(self._collectives)
        elif kind in (Kind.OUT, Kind.BACK):
            pairs = [(page, slot) for page, slot in _pairs(arrays[1])]
            self._held.append(_HeldCopy(self._taken, kind, numbers[0], pairs))
        elif kind is Kind.CLOSE_POOL:
            assert self._copies is not None
            if self._store is not None:
                self._store.close()
            self._copies.close()
        elif kind in (Kind.READ_ADAPTER, Kind.ADD_ADAPTER, Kind.DROP_ADAPTER):
            self._run_adapter_order(kind, numbers, arrays[1:])
        else:
            self._run_store_order(kind, numbers, arrays[1:])
        return True

    def _run_adapter_order(self, kind: Kind, numbers: list[int], texts: Sequence[Bytes]) -> None:
        assert self._adapters is not None
        if kind is Kind.READ_ADAPTER:
            place, ticket, oldest = numbers
            path, digest = (text.tobytes().decode("utf-8", "surrogateescape") for text in texts)
            self._transfers.append(_Transfer(place, self._adapters.begin(ticket, oldest, Path(path), digest)))
        elif kind is Kind.ADD_ADAPTER:
            self._batches.put(self._adapters.adding(*numbers))
        else:
            self._batches.put(self._adapters.dropping(*numbers))

    def _run_store_order(self, kind: Kind, numbers: list[int], texts: Sequence[Bytes]) -> None:
        if kind is Kind.SCAN:
            self._transfers.append(_Transfer(numbers[0], self._scan(*texts)))
            return
        store = self._store
        if store is None or not self._store_usable:
            if kind in (Kind.WRITE, Kind.READ):
                self._outcomes[numbers[0]] = BROKEN
        elif kind is Kind.WRITE:
            place, extent, slot = numbers
            key, parent, tokens, salt = (text.tobytes() for text in texts)
            record = Record(key, parent, tokens, salt.decode("utf-8", "surrogatepass"))
            self._transfers.append(_Transfer(place, store.write(extent, record, slot)))
        elif kind is Kind.READ:
            place, extent, slot = numbers
            self._transfers.append(_Transfer(place, store.read(extent, slot)))
        elif kind is Kind.ERASE:
            store.erase(*numbers)
        elif kind is Kind.RESET:
            try:
                store.reset()
            except StoreUnavailable:  # rank 0 opens all stores again after the next job
                self._store_usable = False

    def _scan(self, extents: Bytes, keys: Bytes) -> Job:
        """Open the store and keep only rank 0's pages, on a thread, because a disk may hang."""
        here = dict(zip(extents.view(np.int64).tolist(), map(bytes, keys.reshape(-1, KEY_BYTES)), strict=True))
        self._store_usable = False
        job = Job()

        def run() -> None:
            try:
                self._store = store = self._opened_store()
                for extent, record in store.scan():
                    if here.get(extent) != record.key:
                        store.erase(extent)
                self._store_usable = True
                job.outcome = Outcome.DONE
            except (StoreUnavailable, WeftError, OSError):
                job.outcome = Outcome.BROKEN

        threading.Thread(target=run, name="weft-ssd-open", daemon=True).start()
        return job

    def _opened_store(self) -> SsdStore:
        """Return the store of the start's file, or one of a file that was opened again."""
        assert self._copies is not None
        if self._store is not None:
            self._store.close()
            file = opened_again(self._store.file, self._reopen)
        else:
            file = self._file or opened_again(None, self._reopen)
        return SsdStore(file, self._copies.host, self._copies.remainders)

    def _begin_copies(self) -> None:
        """Start the held copies whose pages no earlier iteration on this rank can still touch.

        Rank 0 was done with the pages when it sent the order. This rank may not be: after the last layer writes K and V
        of an iteration whose rows are not read, no all-reduce follows, so ranks do not wait for each other."""
        while self._held and self._held[0].after <= self._computed:
            held = self._held.popleft()
            assert self._copies is not None
            copy = self._copies.out if held.kind is Kind.OUT else self._copies.back
            self._transfers.append(_Transfer(held.place, copy(held.pairs)))

    def _report(self) -> None:
        """Publish whether the store's file was lost, then the outcomes of finished transfers."""
        self._state.store_lost = self._store is not None and self._store.gone is not None
        pending = []
        for transfer in self._transfers:
            if (outcome := _outcome(transfer.work)) == PENDING:
                pending.append(transfer)
            else:
                self._outcomes[transfer.place] = outcome
        self._transfers = pending


def _pairs(array: Bytes) -> list[list[int]]:
    pairs: list[list[int]] = array.view(np.int64).reshape(-1, 2).tolist()
    return pairs
