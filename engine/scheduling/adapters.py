"""`Adapters`: the LoRA adapters of an engine, by content: loads them on a thread, holds requests meanwhile, evicts.

Names are for clients. Requests name an adapter by the digest of its files, so that a name that gets other content never
mixes with requests, or cached pages, of the old one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from weft.engine.errors import ModelError, WeftError, one_line
from weft.engine.model.adapter import Adapter
from weft.engine.scheduling.events import Outbox
from weft.engine.scheduling.fairness import MOST, PATIENCE
from weft.engine.scheduling.kept_adapters import KeptAdapters
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.request import Request
from weft.engine.wire.messages import AdapterNews, AdapterStats, Finish, LoadAdapter

LOAD_POLL_SECONDS = 0.005  # Seconds between steps while an adapter loads and no request is open.
STATS_SECONDS = 0.2  # Seconds between counts of the requests of each adapter.
MAX_PASSED = 8  # Requests of adapters in memory that may begin while another adapter waits for memory.
STAY = MOST * PATIENCE  # Iterations that requests of an adapter that is to be evicted may run on.
NOBODY = -1  # The owner of an adapter without requests so far.
MAX_KNOWN = 10_000  # Adapters that can be known at once.
NOT_LOADED = "the adapter is not loaded in this engine"

ReadAdapter = Callable[[Path], tuple[str, Adapter]]
"""Returns the digest and the packed matrices of an adapter's directory. Raises `WeftError`."""


@dataclass(eq=False, slots=True)
class _Known:
    """An adapter that was loaded once. It may have been evicted."""

    digest: str
    path: str
    number: int  # Its number in batches.
    in_memory: bool = False
    loading: bool = False
    closing: bool = False  # Requests without a slot wait, so that it can be evicted.
    owner: int = NOBODY  # The tenant of its last request.
    used: int = 0  # Order of its last use.
    held: deque[Request] = field(default_factory=deque)
    """Requests that wait for it to be in memory."""


class _Loaded(NamedTuple):
    """A load that has ended."""

    message: LoadAdapter
    digest: str
    adapter: Adapter | None  # None: it failed.
    error: str


class Adapters(Listener):
    """Used on the engine's thread; only `read` runs on a thread of its own."""

    def __init__(
        self, read: ReadAdapter, memory: MutableMapping[int, Adapter], most: int,
        open_requests: Callable[[], dict[int, int]], queue: Callable[[Request], None],
        withdraw: Callable[[int, bool], list[Request]], outbox: Outbox, kept: int = 0,
    ) -> None:  # fmt: skip
        """memory: the runner's adapters by number. most: how many may be in it. open_requests: counts requests, and
        iterations in flight, by the number of their adapter. queue: takes requests whose adapter is in memory.
        withdraw: gives back an adapter's requests, those with a slot only if the second argument is true. kept: how
        many adapters stay in host memory."""
        self._read, self._memory, self._most = read, memory, most
        self._open_requests, self._queue, self._withdraw, self._outbox = open_requests, queue, withdraw, outbox
        self._kept = KeptAdapters(kept)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-adapter")
        self._ended: SimpleQueue[_Loaded] = SimpleQueue()
        self._num_loading = 0
        self._known: dict[str, _Known] = {}
        self._names: dict[str, str] = {}  # Digest by name.
        self._unknown: dict[str, deque[Request]] = {}  # Requests whose adapter may be one that loads now, by digest.
        self._waiting: deque[_Known] = deque()  # Adapters with held requests, in the order of their first one.
        self._passed = 0
        self._turns: dict[int, int] = {}  # By tenant: when an adapter was last loaded for it.
        self._iteration = 0
        self._since = 0  # The iteration since which an adapter waits for memory, or since which another one is closing.
        self._numbers, self._clock = itertools.count(1), itertools.count(1)
        self._reports: list[AdapterNews] = []
        self._stats, self._stats_due = AdapterStats(most), 0.0

    # -- names

    def load(self, message: LoadAdapter) -> None:
        """Load an adapter and give it a name, in the background. `take_news` then has a report."""
        if len(self._known) >= MAX_KNOWN:
            self._reports.append(
                AdapterNews(message.name, path=message.path, error=f"{MAX_KNOWN:,} adapters are known already")
            )
            return
        known = self._known.get(message.digest)
        if known is not None and known.path == message.path:
            self._name(message.name, known)  # another process has sent it already
        else:
            self._start(message)

    def load_now(self, message: LoadAdapter) -> None:
        """Load an adapter before the engine serves. Raises `WeftError`."""
        self._enter(message, *self._read_files(message.path))

    def drop(self, name: str) -> None:
        """Forget a name. Open requests of the adapter go on."""
        known = self._known.get(self._names.pop(name, ""))
        if known is not None and not self._named(known):
            self._evict_if_unused(known)
        self._reports.append(AdapterNews(name))

    def take_news(self) -> list[AdapterNews]:
        """Return the reports for all clients since the last call."""
        news, self._reports = self._reports, []
        return news

    def all_news(self) -> list[AdapterNews]:
        """Return a report for each name, for a new client."""
        return [self._news(name, digest) for name, digest in self._names.items()]

    def name(self, digest: str) -> str:
        """Return a name of an adapter; its digest if it has none."""
        return next((name for name, known in list(self._names.items()) if known == digest), digest)

    def _news(self, name: str, digest: str) -> AdapterNews:
        return AdapterNews(name, digest=digest, path=self._known[digest].path)

    # -- requests

    def begin(self, request: Request, digest: str) -> None:
        """Queue a request once its adapter is in memory. Refuses one whose adapter is unknown."""
        known = self._known.get(digest)
        if known is not None:
            if known.in_memory and not known.closing:
                self._passed += bool(self._waiting)
                self._pass(known, request)
                self._make_room()
            else:
                self._hold(known, request)
        elif self._num_loading:
            self._unknown.setdefault(digest, deque()).append(request)
        else:
            self._outbox.refuse(request.handle, NOT_LOADED, Finish.BUSY)

    def take(self, handle: int) -> Request | None:
        """Remove a held request, if there is one with this handle, and return it."""
        for held in (*self._unknown.values(), *(known.held for known in self._waiting)):
            for request in held:
                if request.handle == handle:
                    held.remove(request)
                    return request
        return None

    @property
    def num_held(self) -> int:
        return sum(map(len, self._unknown.values())) + sum(len(known.held) for known in self._waiting)

    def _pass(self, known: _Known, request: Request) -> None:
        request.adapter, known.used, known.owner = known.number, next(self._clock), request.tenant
        self._queue(request)

    def _hold(self, known: _Known, request: Request) -> None:
        known.held.append(request)
        if known not in self._waiting:
            self._waiting.append(known)
            self._passed = 0 if len(self._waiting) == 1 else self._passed
        self._make_room()

    # -- memory

    def _make_room(self) -> None:
        """Load the adapters that requests wait for, as far as memory for them is free or can be freed."""
        for known in list(self._waiting):
            if not known.held:
                self._waiting.remove(known)
            elif known.in_memory and not known.closing:
                self._release(known)
        while self._wanted() and self._has_room():
            tenant, known = self._next()
            self._turns.pop(tenant, None)
            self._turns[tenant] = next(self._clock)
            if len(self._turns) > MAX_KNOWN:
                del self._turns[next(iter(self._turns))]
            self._start(LoadAdapter("", known.path, known.digest))
            known.loading = True
        self._close_one()

    def _wanted(self) -> list[_Known]:
        """Return the adapters that requests wait for and that are not being loaded yet."""
        return [known for known in self._waiting if not known.loading and not known.in_memory]

    def _next(self) -> tuple[int, _Known]:
        """Return the tenant whose last turn was longest ago, and the adapter that it has waited for longest."""
        first: dict[int, _Known] = {}
        for known in self._wanted():
            for request in known.held:
                first.setdefault(request.tenant, known)
        tenant = min(first, key=lambda tenant: self._turns.get(tenant, 0))
        return tenant, first[tenant]

    def _close_one(self) -> None:
        """If an adapter has waited for long, take the requests without a slot from one in memory, so that it can be
        evicted, and later those with a slot."""
        there = [known for known in self._known.values() if known.in_memory]
        closing = next((known for known in there if known.closing), None)
        loading = any(known.loading for known in self._known.values())
        if not self._wanted():
            self._passed, self._since = 0, self._iteration
            if closing is not None and not loading:
                closing.closing = False
                if closing in self._waiting:
                    self._release(closing)
        elif closing is not None:
            if self._iteration - self._since >= STAY:
                self._hold_again(closing, running=True)
        elif there and not loading and (self._passed >= MAX_PASSED or self._iteration - self._since >= PATIENCE):
            counts, owned = self._open_requests(), Counter(known.owner for known in there)
            closing = min(there, key=lambda known: (-owned[known.owner], counts.get(known.number, 0), known.used))
            closing.closing, self._since = True, self._iteration
            self._hold_again(closing, running=False)

    def _hold_again(self, known: _Known, *, running: bool) -> None:
        if requests := self._withdraw(known.number, running):
            known.held.extendleft(reversed(requests))
            if known not in self._waiting:
                self._waiting.append(known)

    def _release(self, known: _Known) -> None:
        """Queue the requests that waited for an adapter."""
        self._waiting.remove(known)
        self._passed, self._since = 0, self._iteration
        while known.held:
            self._pass(known, known.held.popleft())

    def _has_room(self) -> bool:
        """Evict adapters without requests until another fits: of the tenant with the most adapters in memory, least
        recently used first. Returns whether it does."""
        arriving = sum(known.loading for known in self._known.values())
        there = [known for known in self._known.values() if known.in_memory]
        owned = Counter(known.owner for known in there)
        for known in sorted(there, key=lambda known: (not known.closing, -owned[known.owner], known.used)):
            if len(self._memory) + arriving < self._most:
                break
            self._evict_if_unused(known)
        return len(self._memory) + arriving < self._most

    def _evict_if_unused(self, known: _Known) -> None:
        if known.in_memory and not self._open_requests().get(known.number):
            del self._memory[known.number]
            known.in_memory = known.closing = False
        if not (known.in_memory or known.held or known.loading or self._named(known)):
            self._known.pop(known.digest, None)
            self._kept.forget(known.digest)

    def _named(self, known: _Known) -> bool:
        return known.digest in self._names.values()

    # -- loads

    def _start(self, message: LoadAdapter) -> None:
        self._num_loading += 1
        self._thread.submit(self._load, message)

    def _read_files(self, path: str) -> tuple[str, Adapter]:
        digest, adapter = self._read(Path(path))
        self._kept.add(digest, adapter)
        return digest, adapter

    def _load(self, message: LoadAdapter) -> None:
        try:
            if message.digest and (kept := self._kept.get(message.digest)) is not None:
                self._ended.put(_Loaded(message, message.digest, kept, ""))
                return
            digest, adapter = self._read_files(message.path)
            if message.digest not in ("", digest):
                raise ModelError(f"the files in {message.path} have changed: load the adapter again")
            self._ended.put(_Loaded(message, digest, adapter, ""))
        except WeftError as error:
            self._ended.put(_Loaded(message, message.digest, None, str(error)))
        except Exception as error:  # requests wait for this load, so it must end however a file breaks a reader
            traceback.print_exc()
            self._ended.put(_Loaded(message, message.digest, None, f"cannot load {message.path}: {one_line(error)}"))

    def on_schedule(self) -> None:
        self._iteration += 1
        while self._num_loading:
            try:
                ended = self._ended.get_nowait()
            except Empty:
                break
            self._take_in(ended)
        if self._waiting:
            self._make_room()

    def _take_in(self, ended: _Loaded) -> None:
        self._num_loading -= 1
        message, digest, adapter, error = ended
        known = self._known.get(digest)
        if known is not None:
            known.loading = False
        if adapter is None:
            if message.name:
                self._reports.append(AdapterNews(message.name, path=message.path, error=error))
            elif known is not None:
                self._refuse(known.held, error)
        else:
            self._enter(message, digest, adapter)
        if not self._num_loading:
            for left, requests in list(self._unknown.items()):
                if left not in self._known:
                    self._refuse(requests, NOT_LOADED)
                    del self._unknown[left]

    def _enter(self, message: LoadAdapter, digest: str, adapter: Adapter) -> None:
        """Take in an adapter that was read."""
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = _Known(digest, message.path, next(self._numbers))
        known.path = message.path
        if not known.in_memory and self._has_room():  # else it is read again when a request needs it
            self._memory[known.number], known.in_memory, known.used = adapter, True, next(self._clock)
        if message.name:
            self._name(message.name, known)
        for request in self._unknown.pop(digest, ()):
            self._hold(known, request)
        if known in self._waiting:
            self._make_room()

    def _name(self, name: str, known: _Known) -> None:
        before = self._known.get(self._names.get(name, ""))
        self._names[name] = known.digest
        if before is not None and not self._named(before):
            self._evict_if_unused(before)
        self._reports.append(self._news(name, known.digest))

    def _refuse(self, requests: deque[Request], why: str) -> None:
        while requests:
            self._outbox.refuse(requests.popleft().handle, why, Finish.BUSY)

    # -- the loop

    def on_blocked(self, seconds: float) -> bool:
        if not self._num_loading:
            return False
        with contextlib.suppress(Empty):
            self._take_in(self._ended.get(timeout=seconds))
        return True

    def has_news(self) -> bool:
        self.on_schedule()
        return False

    def on_idle(self, _now: float) -> bool:
        self.on_schedule()
        return False

    def pause(self) -> float | None:
        return LOAD_POLL_SECONDS if self._num_loading else None

    def stats(self) -> dict[str, Any]:
        if (now := time.monotonic()) >= self._stats_due:  # not for each iteration: it counts all requests
            self._stats_due = now + STATS_SECONDS
            counts = self._open_requests()
            running = tuple(sorted(self.name(k.digest) for k in self._known.values() if counts.get(k.number)))
            waiting = tuple(sorted(self.name(k.digest) for k in self._waiting if k.held))
            self._stats = AdapterStats(self._most, running, waiting)
        return {"adapters": self._stats}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
