"""`LeadingRunner`: rank 0's runner, host pool and store, which drive those of the other ranks.

Each device operation goes into the ring before rank 0 performs it. An operation is done when all ranks are done with
it, and has failed if it failed on any rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.errors import RankLost
from weft.engine.memory.extent import Record
from weft.engine.memory.ssd_store import Job, Outcome, SsdStore
from weft.engine.memory.store_file import StoreFile, StoreUnavailable
from weft.engine.memory.transfer import Bytes, Copy, CopyEngine, Pairs, Remainders
from weft.engine.model.adapter import Adapter
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress, notice
from weft.engine.ranks.adapters import LeadingAdapters
from weft.engine.ranks.agreement import agree, barrier
from weft.engine.ranks.batches import arrays_of
from weft.engine.ranks.links import Links, State
from weft.engine.ranks.operations import BROKEN, DONE, LOST, PENDING, POLL_SECONDS, Operations
from weft.engine.ranks.ring import Kind, RingWriter
from weft.engine.ranks.runners import rank_runner
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.device.image_rows import ImageRows
from weft.engine.runner.device.runner import InFlight, Runner
from weft.engine.runner.iteration.batch import I32, Batch
from weft.engine.runner.memory.sleep import Sleepless
from weft.engine.runner.options.resolve import ResolvedConfig

OTHER_FAILED = "the disk of another rank failed"
PART_BYTES = 1 << 20  # Embeddings in one order.


def lead(
    links: Links, spec: ModelSpec, weights: Weights, options: EngineConfig, config: ResolvedConfig, model: str,
    progress: Progress | None = None, compiling: CompileJob | None = None, images: ImageRows | None = None, *,
    store: bool,
) -> LeadingRunner:  # fmt: skip
    """Wait until all ranks are ready and agree, then return rank 0's runner. images: see `make_runner`. store: rank 0
    has an SSD tier file.

    Raises `RankLost`, `ConfigError` or `OutOfMemory`."""
    if progress is not None:
        progress("waiting for the other ranks", 0, len(links.peers))
    collectives = SharedCollectives(links)
    config, stores = agree(collectives, config, model, store=store)
    if store and not stores:
        notice("the SSD tier is off: not every rank has one")
    runner = rank_runner(links, spec, weights, options, config, collectives, progress, compiling, images)
    leading = LeadingRunner(runner, links, collectives, stores=stores)
    if images is not None:
        images.spread = leading.send_embeddings
    return leading


class LeadingRunner:
    """See `runner.Runner`. stores: every rank has an SSD tier file."""

    def __init__(self, runner: Runner, links: Links, collectives: Collectives, *, stores: bool) -> None:
        self.own, self.stores = runner, stores
        self.num_pages, self.preparation = runner.num_pages, runner.preparation
        self.sleepable = Sleepless("ranks share it")  # the other ranks would have to sleep too
        self._ring = RingWriter(links)
        self._operations = Operations(links)
        self._others = {rank: links.state(rank) for rank in links.peers}
        self._collectives = collectives

    @cached_property
    def adapters(self) -> LeadingAdapters | None:
        own = self.own.adapters
        return None if own is None else LeadingAdapters(own, self._ring, self._operations)

    def stage_adapter(self, adapter: Adapter, path: Path, digest: str) -> Adapter:
        assert self.adapters is not None
        return self.adapters.read(self.own.stage_adapter(adapter, path, digest), path, digest)

    def copy_engine(self, slots: int) -> CopyEngine:
        self._ring.send(Kind.POOL, np.array([slots]))
        own = self.own.copy_engine(slots)
        barrier(self._collectives)
        return LeadingCopies(own, self._ring, self._operations)

    def make_store(self, file: StoreFile, host: Bytes, remainders: Remainders | None) -> LeadingStore:
        """Open the store of the SSD tier; call `copy_engine` first."""
        return LeadingStore(SsdStore(file, host, remainders), self._ring, self._operations, self._others)

    def send_embeddings(self, rows: I32, made: Tensor) -> None:
        """Send embeddings to the pools of the other ranks, in parts, so that iterations wait for one part at most."""
        values = made.contiguous().view(torch.uint8).cpu().numpy().reshape(len(rows), -1)
        step = max(1, PART_BYTES // values.shape[1])
        for at in range(0, len(rows), step):
            self._ring.send(Kind.EMBEDDINGS, rows[at : at + step], values[at : at + step])

    def launch(self, batch: Batch) -> InFlight:
        self._ring.send(Kind.BATCH, *arrays_of(batch))
        return self.own.launch(batch)

    def close(self) -> None:
        with suppress(RankLost):
            self._ring.send(Kind.END)
        self.own.close()


class LeadingCopy:
    """See `transfer.Copy`."""

    def __init__(self, own: Copy, place: int, operations: Operations, slots: Collection[int]) -> None:
        self.own, self._place, self._operations, self._slots = own, place, operations, slots
        self._worst = PENDING

    def done(self) -> bool:
        if self._worst == PENDING and self.own.done():
            self._worst = self._operations.worst(self._place)
        return self._worst != PENDING

    @property
    def failed(self) -> bool:
        return self.own.failed or self._worst == BROKEN

    @property
    def raw(self) -> Collection[int]:
        return self.own.raw

    @property
    def unkept(self) -> Collection[int]:
        """Slots without a copy. If another rank ran out of space these are all slots: it does not report which."""
        return self._slots if self._worst == LOST else self.own.unkept

    @property
    def seconds(self) -> float:
        return self.own.seconds


class LeadingCopies:
    """See `transfer.CopyEngine`."""

    def __init__(self, own: CopyEngine, ring: RingWriter, operations: Operations) -> None:
        self._own, self._ring, self._operations = own, ring, operations
        self.host, self.remainders, self.sizes = own.host, own.remainders, own.sizes

    def out(self, pairs: Pairs) -> Copy:
        return self._begin(Kind.OUT, self._own.out, pairs)

    def back(self, pairs: Pairs) -> Copy:
        return self._begin(Kind.BACK, self._own.back, pairs)

    def _begin(self, kind: Kind, act: Callable[[Pairs], Copy], pairs: Pairs) -> LeadingCopy:
        place = self._operations.begin()
        self._ring.send(kind, np.array([place]), np.array(pairs, np.int64))
        return LeadingCopy(act(pairs), place, self._operations, {slot for _, slot in pairs})

    def wait(self, copies: Sequence[Copy], seconds: float) -> None:
        first = copies[0]
        assert isinstance(first, LeadingCopy)
        end = time.monotonic() + seconds
        self._own.wait([first.own], seconds)
        while not first.done() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._ring.send(Kind.CLOSE_POOL)
        self._own.close()


class LeadingJob(Job):
    """A read or write on all ranks."""

    def __init__(self, own: Job, place: int, operations: Operations) -> None:
        self._own, self._place, self._operations = own, place, operations

    @property
    def outcome(self) -> Outcome:  # type: ignore[override]
        if (own := self._own.outcome) is Outcome.PENDING:
            return own
        worst = self._operations.worst(self._place)
        if worst == PENDING:
            return Outcome.PENDING
        if Outcome.BROKEN is own or worst == BROKEN:
            return Outcome.BROKEN
        return Outcome.LOST if own is Outcome.LOST or worst == LOST else Outcome.DONE

    @property
    def begun(self) -> float | None:  # type: ignore[override]
        return self._own.begun

    @property
    def raw(self) -> bool:  # type: ignore[override]
        return self._own.raw

    @property
    def reason(self) -> str:  # type: ignore[override]
        return self._own.reason or OTHER_FAILED


class LeadingStore:
    """See `ssd_store.Store`. Each rank has its own file with its shard of each page under the same extent."""

    def __init__(self, own: SsdStore, ring: RingWriter, operations: Operations, others: Mapping[int, State]) -> None:
        self._own, self._ring, self._operations, self._others = own, ring, operations, others

    @property
    def on_done(self) -> Callable[[], None]:
        return self._own.on_done

    @on_done.setter
    def on_done(self, call: Callable[[], None]) -> None:
        self._own.on_done = call

    @property
    def num_extents(self) -> int:
        return self._own.num_extents

    @property
    def gone(self) -> str | None:
        lost = (rank for rank, state in self._others.items() if state.store_lost)
        if self._own.gone is None and (rank := next(lost, None)) is not None:
            return f"the file of rank {rank} was removed or truncated"
        return self._own.gone

    def scan(self) -> list[tuple[int, Record]]:
        """Return this rank's records. A page that another rank lacks is missed when it is read. Raises `RankLost`,
        `OSError`, or `StoreUnavailable` if another rank's disk fails."""
        records = self._own.scan()
        place = self._operations.begin()
        self._ring.send(
            Kind.SCAN,
            np.array([place]),
            np.array([extent for extent, _ in records], np.int64),
            np.frombuffer(b"".join(record.key for _, record in records), np.uint8),
        )
        if self._operations.wait(place) != DONE:
            raise StoreUnavailable(OTHER_FAILED)
        return records

    def write(self, extent: int, record: Record, slot: int) -> Job:
        place = self._operations.begin()
        texts = (record.key, record.parent_key, record.tokens, record.salt.encode("utf-8", "surrogatepass"))
        self._ring.send(Kind.WRITE, np.array([place, extent, slot]), *(np.frombuffer(text, np.uint8) for text in texts))
        return LeadingJob(self._own.write(extent, record, slot), place, self._operations)

    def read(self, extent: int, slot: int) -> Job:
        place = self._operations.begin()
        self._ring.send(Kind.READ, np.array([place, extent, slot]))
        return LeadingJob(self._own.read(extent, slot), place, self._operations)

    def erase(self, extent: int) -> None:
        self._ring.send(Kind.ERASE, np.array([extent]))
        self._own.erase(extent)

    def reset(self) -> None:
        self._ring.send(Kind.RESET)
        self._own.reset()

    def close(self) -> None:
        """Close this rank's store, on another thread if a disk failed. Other ranks keep theirs until the next scan."""
        self._own.close()
