"""`Tiers`: copies full pages to the host and the SSD, and loads them back to the GPU (NanoFlow §4.2.2).

Every confirmed full page is written through to the host pool while the next iteration computes. Before the host pool
runs short, its oldest pages are written to the SSD. Pages return through a host slot. All bookkeeping runs on the
scheduler's thread; copies and I/O run concurrently, and `pump` processes their ends.

A tier's copies form whole chains: a page is below the GPU only if its parent is, and on the SSD only if its parent is.
So all pages stay reachable after evictions (leaves first) and after a restart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from weft.engine.memory.block_allocator import BlockAllocator
from weft.engine.memory.loads import Loading, LoadSpeeds, PageLoad
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry
from weft.engine.memory.ssd_store import Store
from weft.engine.memory.ssd_tier import SsdTier
from weft.engine.memory.transfer import Copy, CopyEngine
from weft.engine.wire.messages import TierStats

FLUSH_SECONDS = 3.0
SPILL_PAGES, SPILL_SCAN = 16, 256  # idle pages to store, and to examine, per iteration
IDLE_MARKS = 32  # marks of `IdleClock` over the idle time, which set the resolution


class IdleClock:
    """Finds the time of the prefix index's clock before which pages count as idle. With `seconds` 0, none ever do."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks: deque[tuple[float, int]] = deque()  # (monotonic seconds, clock), oldest first

    def idle(self, now: float, clock: int) -> int:
        """Return the index's clock at or before which a last use counts as idle; -1 if nothing is idle."""
        if not self._seconds:
            return -1
        if not self._marks or now - self._marks[-1][0] >= self._seconds / IDLE_MARKS:
            self._marks.append((now, clock))
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._seconds:
            self._marks.popleft()
        then, used = self._marks[0]
        return used if now - then >= self._seconds else -1


class _Out(NamedTuple):
    """Pages being copied to the host."""

    copy: Copy
    moves: list[tuple[PrefixEntry, int, int]]  # (entry, page, slot)


class _Back(NamedTuple):
    """Pages being copied to the GPU."""

    copy: Copy
    moves: list[tuple[PageLoad, int]]  # (load, slot)


class Tiers:
    """The tiers below the GPU. Single-threaded, like the scheduler that owns it. `store` is None without an SSD."""

    def __init__(
        self, pool: PagePool, copies: CopyEngine, num_slots: int, store: Store | None, *, ssd_configured: bool = False,
        idle_seconds: float = 0.0, reopen: Callable[[], Store] | None = None,
    ) -> None:  # fmt: skip
        """Pages unused for `idle_seconds` are stored in advance; 0 turns this off. reopen: see `SsdTier`."""
        self.pool, self.index, self.copies = pool, pool.index, copies
        self.speeds = LoadSpeeds(copies.sizes.page, pool.page_size)
        self.host = BlockAllocator(num_slots, PrefixEntry.evictable_from_host, self._lose_host)
        self.ssd = SsdTier(
            self.index, self.host, copies.sizes, store, self.speeds, self._keep_on_host, self._end, reopen
        )
        self.index.on_evictable = self._reconsider
        self._coming: dict[PrefixEntry, PageLoad] = {}  # loads to the GPU by entry
        self._fresh: deque[PrefixEntry] = deque()  # entries to write through, parents first
        self._storing: set[PrefixEntry] = set()
        self._alone: dict[PrefixEntry, None] = {}
        """Entries on the GPU alone. It may contain some that no longer are."""
        self._idle = IdleClock(idle_seconds)
        self._outs: deque[_Out] = deque()
        self._backs: deque[_Back] = deque()
        self._finished: list[Loading] = []
        self._stats = TierStats()
        self._reported = ("host", "ssd") if ssd_configured or store is not None else ("host",)
        self._load_seconds: list[tuple[str, float]] = []

    # -- called by the scheduler

    def published(self, entry: PrefixEntry) -> None:
        """Queue an entry, whose GPU page is full and confirmed, to be written through."""
        if entry.host == NOWHERE:
            self._fresh.append(entry)

    def load(self, entries: Sequence[PrefixEntry], pages: Sequence[int], waiting: Loading) -> None:
        """Load entries from lower tiers to GPU pages that the caller has referenced. `waiting` waits for the loads."""
        ready: list[tuple[PageLoad, int]] = []
        for entry, page in zip(entries, pages, strict=True):
            self.pool.hold(page)
            load = self._coming[entry] = PageLoad(entry, page, "host" if entry.host >= 0 else "ssd", time.monotonic())
            waiting.wait_for(load)
            if entry.host >= 0:
                self.host.pin(entry.host)
                ready.append((load, entry.host))
            else:
                self.ssd.load(load)
        self._copy_back(ready)

    def fetched(self, entries: Sequence[PrefixEntry]) -> None:
        """Count entries that are loaded before their request can run."""
        for entry in entries:
            (self._stats if entry.host >= 0 else self.ssd.stats).prefetched += 1

    def coming(self, entry: PrefixEntry) -> PageLoad | None:
        return self._coming.get(entry)

    def busy_pages(self) -> dict[str, int]:
        """Return the pages being loaded to the GPU, by source tier."""
        from_ssd = self.ssd.num_reading
        return {"host": sum(len(b.moves) for b in self._backs) + from_ssd, "ssd": from_ssd}

    def pump(self) -> list[Loading]:
        """Process transfers that have ended and start those that can start. Returns the finished waits."""
        self._end_outs()
        self.ssd.pump_ends()
        self._end_backs()
        self._spill(time.monotonic())
        self.begin_stores()
        staged, self.ssd.staged = self.ssd.staged, []
        self._copy_back(staged)
        self.ssd.pump_starts()
        finished, self._finished = self._finished, []
        return finished

    def forget(self) -> None:
        """Drop every copy in the lower tiers: the index was cleared."""
        for blocks in (self.host, self.ssd.blocks):
            for block, entry in list(blocks.entries()):
                entry.host = entry.extent = NOWHERE
                blocks.forget(block)
        self._fresh.clear()
        self._alone.clear()
        self.ssd.forget()

    # -- GPU to host

    def begin_stores(self) -> None:
        """Start to write published pages through to the host."""
        moves: list[tuple[PrefixEntry, int, int]] = []
        while self._fresh:
            entry = self._fresh[0]
            if self._wants_slot(entry):
                slot = self.host.take()
                if slot is None:
                    break
                self.pool.hold(entry.page)
                self._storing.add(entry)
                moves.append((entry, entry.page, slot))
            self._fresh.popleft()
        if moves:
            self._outs.append(_Out(self.copies.out([(page, slot) for _, page, slot in moves]), moves))

    def _spill(self, now: float) -> None:
        """Store some idle pages while nothing else moves, so that evicting them later loses nothing. Each page is tried
        once after each use, so that full tiers do not swap."""
        idle = self.pool.idle_clock = self._idle.idle(now, self.index.clock)
        if idle < 0 or self._backs or self._outs or self.ssd.num_reading:
            return
        # Slots that are free, or whose page is also on the SSD.
        headroom = self.host.num_free + max(0, self.ssd.num_on_both - self.host.capacity // 4)
        for entry in list(islice(self._alone, SPILL_SCAN)):
            chain: list[PrefixEntry] = []
            above: PrefixEntry | None = entry
            while above is not None and above.page >= 0 and not above.lower and above.used <= idle:
                chain.append(above)
                above = above.parent
            if not chain or entry.spilled == entry.used:
                # In use, gone or tried already: move it to the end.
                del self._alone[entry]
                if entry.page >= 0 and not entry.lower:
                    self._alone[entry] = None
                continue
            for one in reversed(chain):
                if headroom and one.spilled != one.used:
                    headroom -= 1
                    one.spilled = one.used
                    self._fresh.append(one)
            if len(self._fresh) >= SPILL_PAGES or not headroom:
                break
        self.ssd.spill(idle)

    def _wants_slot(self, entry: PrefixEntry) -> bool:
        parent = entry.parent
        return (
            entry.page >= 0
            and entry.host == NOWHERE
            and entry not in self._storing
            and (parent is None or parent.lower or parent in self._storing)
        )

    def _end_outs(self) -> None:
        while self._outs and self._outs[0].copy.done():
            out = self._outs.popleft()
            stats = self._stats
            for entry, _, slot in out.moves:
                self._storing.discard(entry)
                reachable = entry.parent is None or entry.parent.lower
                if out.copy.failed or slot in out.copy.unkept:
                    stats.failures += 1
                elif reachable and entry.host == NOWHERE and self.index.contains(entry):
                    stats.bytes_in += self._stored(out.copy, slot)
                    stats.raw_pages += slot in out.copy.raw
                    stats.spilled += entry.spilled == entry.used
                    self._keep_on_host(entry, slot)
                self.host.unpin(slot)
            # Pages stored because they were idle are still idle.
            idle = [entry.spilled == entry.used for entry, _, _ in out.moves]
            for of in (False, True):
                pages = [page for (_, page, _), lay in zip(out.moves, idle, strict=True) if lay is of]
                self.pool.release(np.array(pages, np.int32), used=not of)

    def _stored(self, copy: Copy, slot: int) -> int:
        """Return the bytes of a page copied to or from the host, and count those saved by packing."""
        sizes = self.copies.sizes
        size = sizes.stored(raw=slot in copy.raw)
        self._stats.bytes_saved += sizes.page - size
        return size

    def _keep_on_host(self, entry: PrefixEntry, slot: int) -> None:
        self.host.settle(slot, entry)
        self.index.set_host(entry, slot)
        self.ssd.kept_on_host(entry)

    def _lose_host(self, entry: PrefixEntry) -> None:
        slot = entry.host
        self.ssd.unwritten.pop(entry, None)
        self.host.forget(slot)
        self.index.set_host(entry, NOWHERE)

    # -- host to GPU

    def _copy_back(self, moves: list[tuple[PageLoad, int]]) -> None:
        if moves:
            self._backs.append(_Back(self.copies.back([(load.page, slot) for load, slot in moves]), moves))

    def _end_backs(self) -> None:
        while self._backs and self._backs[0].copy.done():
            back = self._backs.popleft()
            if not back.copy.failed:
                self.speeds.moved("host", len(back.moves), back.copy.seconds)
            for load, slot in back.moves:
                entry = load.entry
                if back.copy.failed:
                    self._stats.failures += 1
                    # Make it a miss, so that the same load is not retried forever.
                    if entry.host == slot:
                        self._lose_host(entry)
                    if entry.extent >= 0:
                        self.ssd.lose(entry)
                else:
                    self._stats.bytes_out += self._stored(back.copy, slot)
                    if entry.page == NOWHERE and self.index.contains(entry):
                        self.pool.adopt(entry, load.page)
                self.host.unpin(slot)
                self._end(load, back.copy.failed)

    def _end(self, load: PageLoad, failed: bool = True) -> None:
        del self._coming[load.entry]
        self.pool.release(np.array([load.page], np.int32))
        self._load_seconds.append((load.tier, time.monotonic() - load.begun))
        for waiting in load.waiters:
            waiting.remaining -= 1
            had_failed = waiting.failed
            waiting.failed |= failed
            if not had_failed and (failed or not waiting.remaining):
                self._finished.append(waiting)

    # -- both

    def _reconsider(self, entry: PrefixEntry) -> None:
        if entry.page >= 0 and not entry.lower:
            self._alone[entry] = None
        else:
            self._alone.pop(entry, None)
        if entry.host >= 0:
            self.host.reconsider(entry, entry.host)
        if entry.extent >= 0:
            self.ssd.blocks.reconsider(entry, entry.extent)

    @property
    def num_transfers(self) -> int:
        return len(self._outs) + len(self._backs) + self.ssd.num_reading + self.ssd.num_writing

    @property
    def bytes_moved(self) -> int:
        """Bytes moved into and out of all tiers since the start."""
        return sum(stats.bytes_in + stats.bytes_out for stats in (self._stats, self.ssd.stats))

    @property
    def num_loading(self) -> int:
        """Pages being loaded to the GPU."""
        return len(self._coming)

    def transfer_pages(self) -> list[int]:
        """Return GPU pages that transfers hold, once per reference."""
        loads = [load for back in self._backs for load, _ in back.moves] + self.ssd.loads()
        return [page for out in self._outs for _, page, _ in out.moves] + [load.page for load in loads]

    def wait(self, seconds: float) -> None:
        """Return when a transfer may have ended, or after `seconds`."""
        if self._backs or self._outs:
            self.copies.wait([b.copy for b in self._backs] or [o.copy for o in self._outs], seconds)
        elif self.num_transfers:
            self.ssd.wait(seconds)

    def drain(self) -> list[Loading]:
        """Wait for all transfers. Returns the finished waits."""
        finished: list[Loading] = self.pump()
        while self.num_transfers:
            self.wait(0.01)
            finished += self.pump()
        return finished

    def flush(self, seconds: float) -> None:
        """Store pages that no lower tier holds: on the host, then on the SSD, until `seconds` are over. Call it only if
        no request is open, because it drops finished waits."""
        end = time.monotonic() + seconds
        self.pump()
        while time.monotonic() < end:
            self.ssd.start_writes(everything=True)
            if not self.num_transfers:
                break
            self.wait(0.01)
            self.pump()
        self.drain()

    def sink(self, seconds: float) -> None:
        """Flush, then evict every page from all but the lowest tier, so that the next request must load it."""
        self.flush(seconds)
        self.pool.evict_all()
        if self.ssd.store is not None:
            self.host.evict_all()

    def close(self) -> None:
        """Write pages that only the host holds to the SSD if time allows, and close all tiers."""
        self.flush(FLUSH_SECONDS)
        self.ssd.close()
        self.copies.close()

    def stats(self) -> dict[str, TierStats]:
        both = {"host": (self._stats, self.host), "ssd": (self.ssd.stats, self.ssd.blocks)}
        for stats, blocks in both.values():
            stats.used, stats.capacity, stats.evictions = blocks.num_used, blocks.capacity, blocks.evictions
        self.ssd.stats.up = self.ssd.store is not None
        return {name: both[name][0] for name in self._reported}

    def take_load_seconds(self) -> list[tuple[str, float]]:
        """Return (tier, seconds) of the loads that ended since the last call."""
        seconds, self._load_seconds = self._load_seconds, []
        return seconds

    def check(self) -> None:
        """Raise `AssertionError` unless each tier's blocks are consistent and agree with the index."""
        for blocks, name in ((self.host, "host"), (self.ssd.blocks, "extent")):
            blocks.check()
            at = {getattr(e, name): e for e in self.index.entries() if getattr(e, name) >= 0}
            assert at == dict(blocks.entries()), f"the {name} blocks disagree with the index"
        if not self.num_transfers and self.ssd.quiet:
            assert not self.host.num_held, "an idle host slot is held"
            assert not self.ssd.blocks.num_held, "an idle extent is held"
