"""`Store`: responses and conversations in SQLite, in memory or in a file that processes share.

Documents expire, and the least recently used are deleted if there are too many documents or bytes. A disk that fails
makes calls fail until it works again: nothing is kept open that a later call could not use.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.errors import ApiError
from weft.server.observe.steady_clock import SteadyClock, boottime
from weft.server.observe.storage import Storage

T = TypeVar("T")

MAX_COUNT = 100_000  # documents in the store
FILE = "responses.sqlite"
CLOCK_FILE = "clock.json"
WAIT_SECONDS = 10.0  # seconds to wait for another process's transaction
PATIENCE_SECONDS = 15.0  # seconds to wait for a call, which a slow disk may hold up
PROBE_BYTES = 2**16  # bytes written to find out whether the disk works again

_SPOILT = frozenset({sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""errors after which a connection is of no use"""

_SCHEMA = """
create table if not exists documents(
    id text primary key, owner text not null, body blob not null, size integer not null, used real not null,
    beat real not null default 0, cancelled integer not null default 0);
create index if not exists by_use on documents(used);
create table if not exists items(
    document text not null references documents(id) on delete cascade, number integer not null, id text not null,
    body blob not null, primary key(document, number)) without rowid;
create table if not exists events(
    document text not null references documents(id) on delete cascade, number integer not null, data blob not null,
    primary key(document, number)) without rowid;
create table if not exists totals(count integer not null, bytes integer not null);
insert into totals select 0, 0 where not exists (select 1 from totals);
create trigger if not exists added after insert on documents begin
    update totals set count = count + 1, bytes = bytes + new.size; end;
create trigger if not exists changed after update of size on documents begin
    update totals set bytes = bytes + new.size - old.size; end;
create trigger if not exists removed after delete on documents begin
    update totals set count = count - 1, bytes = bytes - old.size; end;
"""


class Stored(NamedTuple):
    body: dict[str, Any]
    idle: float  # seconds since a process last worked on it; infinite if that was before the machine started


class _GivenUp(Exception):
    """Nobody waits for this transaction any more."""


class _Database:
    """One thread's connection. It is opened again if the file was replaced, or after some errors."""

    def __init__(self, file: Path | None) -> None:
        """`file`: None for a database in memory."""
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        self.outdated = False  # open it again at its next use

    def get(self) -> sqlite3.Connection:
        """Raises `OSError` and `sqlite3.Error`. It writes nothing if the database exists."""
        if self._db is not None and self._opened == self._there() and not self.outdated:
            return self._db
        self.close()
        self.outdated = False
        path = ":memory:"
        if self._file is not None:
            if not self._file.exists():
                self._file.touch(mode=0o600)
            path = str(self._file)
        db = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            db.execute("pragma foreign_keys = on")
            if db.execute("select 1 from sqlite_master where name = 'removed'").fetchone() is None:
                db.execute("pragma journal_mode = wal")
                db.executescript(_SCHEMA)
            db.execute("pragma synchronous = normal")
        except BaseException:
            db.close()
            raise
        self._db, self._opened = db, self._there()
        return db

    def _there(self) -> tuple[int, int] | None:
        if self._file is None:
            return None
        with suppress(FileNotFoundError):
            there = os.stat(self._file)
            return there.st_dev, there.st_ino
        return (0, 0)

    def recover(self, error: Exception) -> None:
        """Drop what an error may have left behind. A connection that may still work stays: a full disk has no space to
        open another one."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _SPOILT and self._file is not None:
            self.close()
        elif self._db is not None and self._db.in_transaction:
            self._db.execute("rollback")

    def close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None


class Store:
    """Call all methods except `run`, `read`, `refusal`, `probe` and `close` through `run`, or through `read` if they
    only read. Each uses a separate thread, so that reads do not wait for a slow disk's writes. Owners only see their
    own documents."""

    def __init__(
        self, folder: str | None, *, max_bytes: int, max_seconds: float, storage: Storage | None = None
    ) -> None:
        """`folder`: None keeps everything in memory. `storage`: learns whether the folder works; without it, a folder
        that cannot be opened raises `ConfigError`."""
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._storage = storage
        root = None if folder is None else expanded(folder)
        self._writes = _Database(None if root is None else root / FILE)
        self._reads = self._writes if root is None else _Database(root / FILE)
        self._own = threading.local()  # the connection of the current thread
        try:
            if root is not None:
                root.mkdir(mode=0o700, parents=True, exist_ok=True)  # not later: a disk may be missing for a while
            self._writes.get()
            self._reads.get()
        except (OSError, sqlite3.Error) as error:
            if storage is None:
                raise ConfigError(f"--responses-dir {folder} cannot be used: {error}") from None
            storage.failed("responses", str(error))
        self._clock = SteadyClock(None if root is None else root / CLOCK_FILE)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._reader = self._writer if root is None else ThreadPoolExecutor(1, thread_name_prefix="responses-read")
        self._failure: ApiError | None = None  # the last error, until a write works
        self._used: set[str] = set()  # documents whose use is not recorded yet

    @classmethod
    def open(cls, config: ServeConfig, storage: Storage | None = None) -> Store:
        """The store that `config` describes. Raises `ConfigError`."""
        max_bytes = int(config.responses_max_mib * 2**20)
        max_seconds = config.responses_max_hours * 3600
        return cls(config.responses_dir, max_bytes=max_bytes, max_seconds=max_seconds, storage=storage)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function as a transaction that may write, even if the caller is cancelled. Raises `ApiError`: 507 for a
        full disk, 503 for one that takes too long, else 500."""
        result = await self._call(self._writer, self._writes, "begin immediate", function, *arguments)
        self._failure = None
        if self._storage is not None:
            self._storage.worked("responses")
        return result

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that only reads. It needs no write, and does not wait for any. Raises `ApiError`."""
        return await self._call(self._reader, self._reads, "begin", function, *arguments)

    async def refusal(self) -> ApiError | None:
        """The error that a write would meet; None if none is expected. It only tries if the last write failed."""
        if self._failure is None or self._failure.code == "store_slow":
            return self._failure
        try:
            await self.run(self._try_out, 0)
        except ApiError as error:
            return error
        return None

    async def probe(self) -> None:
        """Try to write. Raises `ApiError`."""
        await self.read(lambda: None)  # opens an outdated connection again
        await self.run(self._try_out, PROBE_BYTES)
        await self.run(self._try_out, 0)

    def _try_out(self, num_bytes: int) -> None:
        self._db.execute(f"pragma user_version = {int(boottime() * 1000) % 2**31}")  # a value that is always new
        self._db.execute("delete from documents where id = 'probe'")
        if num_bytes:
            values = (bytes(num_bytes), self._clock.latest())
            self._db.execute("insert into documents(id, owner, body, size, used) values('probe', '-', ?, 0, ?)", values)

    async def _call(
        self, executor: ThreadPoolExecutor, database: _Database, begin: str, function: Callable[..., T], *arguments: Any
    ) -> T:
        given_up = threading.Event()
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(executor, self._transact, database, begin, given_up, function, *arguments)
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # if no caller is left
        if not (await asyncio.wait((call,), timeout=PATIENCE_SECONDS))[0]:
            given_up.set()
            call.cancel()
            what = f"The response store did not answer within {PATIENCE_SECONDS:g} s."
            raise self._failed(ApiError(503, what, code="store_slow", retry_after=10))
        return call.result()

    def _transact(
        self, database: _Database, begin: str, given_up: threading.Event, function: Callable[..., T], *arguments: Any
    ) -> T:
        try:
            self._own.db = db = database.get()
            db.execute(begin)
            try:
                result = function(*arguments)
                if given_up.is_set():
                    raise _GivenUp
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("rollback")
                raise
            db.execute("commit")
        except (OSError, sqlite3.Error) as error:
            with suppress(sqlite3.Error):
                database.recover(error)
            # The connections of a process share the WAL index. One opened on a read-only disk keeps it read-only for
            # all of them until it is closed, even if the disk takes writes again.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_READONLY:
                self._reads.outdated = self._reads is not self._writes
            raise self._failed(_api_error(error)) from error
        if self._used and function != self._record_uses:
            with suppress(RuntimeError):  # closed
                self._writer.submit(self._record)
        return result

    def _record(self) -> None:
        """Record the last use of documents that were read, if the disk takes it."""
        if self._used:
            with suppress(ApiError):
                self._transact(self._writes, "begin immediate", threading.Event(), self._record_uses)

    def _record_uses(self) -> None:
        ids, self._used = self._used, set()
        used = [(self._clock.latest(), id) for id in ids]
        self._db.executemany("update documents set used = max(used, ?) where id = ?", used)

    def _failed(self, error: ApiError) -> ApiError:
        self._failure = error
        if self._storage is not None:
            self._storage.failed("responses", error.message)
        return error

    @property
    def _db(self) -> sqlite3.Connection:
        return getattr(self._own, "db", None) or self._writes.get()

    def close(self) -> None:
        for executor in (self._writer, self._reader):
            executor.shutdown(wait=True, cancel_futures=True)
        for database in (self._reads, self._writes):
            database.close()

    # -- documents

    def put(self, id: str, owner: str, body: dict[str, Any]) -> bool:
        """Add a document. Returns False if it is larger than the store."""
        data = orjson.dumps(body)
        if len(data) > self.max_bytes:
            return False
        self._db.execute(
            "insert into documents(id, owner, body, size, used, beat) values(?, ?, ?, ?, ?, ?)",
            (id, owner, data, len(data), self._clock.latest(), boottime()),
        )
        self._evict()
        return True

    def change(self, id: str, body: dict[str, Any]) -> bool:
        """Replace a document. Returns False if it is missing."""
        data = orjson.dumps(body)
        (before,) = self._db.execute("select length(body) from documents where id = ?", (id,)).fetchone() or (None,)
        if before is None:
            return False
        self._db.execute(
            "update documents set body = ?, size = size + ?, used = max(used, ?) where id = ?",
            (data, len(data) - before, self._clock.latest(), id),
        )
        self._evict()
        return True

    def get(self, id: str, owner: str) -> Stored | None:
        """A document, which counts as used. It only reads; the use is recorded later."""
        row = self._db.execute("select body, beat from documents where id = ? and owner = ?", (id, owner)).fetchone()
        if row is None:
            return None
        self._used.add(id)
        idle = boottime() - row[1]
        return Stored(orjson.loads(row[0]), idle if idle >= 0 else math.inf)

    def delete(self, id: str, owner: str) -> bool:
        return self._db.execute("delete from documents where id = ? and owner = ?", (id, owner)).rowcount > 0

    def _evict(self) -> None:
        self._clock.save()
        self._record_uses()
        # A clock that was ahead must not keep a document for ever.
        self._db.execute("update documents set used = ? where used > ?", (self._clock.latest(), self._clock.bound()))
        self._db.execute("delete from documents where used < ?", (self._clock.earliest() - self._max_seconds,))
        while True:
            count, size = self._db.execute("select count, bytes from totals").fetchone()
            if count <= MAX_COUNT and size <= self.max_bytes:
                return
            self._db.execute("delete from documents where id in (select id from documents order by used limit 1)")

    # -- items of a document

    def add_items(self, id: str, items: Sequence[dict[str, Any]], most: int) -> bool:
        """Append items to a document. Returns False if it is missing or would exceed `most` items."""
        row = self._db.execute("select count(*), max(number) from items where document = ?", (id,)).fetchone()
        if row[0] + len(items) > most:
            return False
        bodies = [orjson.dumps(item) for item in items]
        if not self._grow(id, sum(map(len, bodies))):
            return False
        first = -1 if row[1] is None else row[1]
        self._db.executemany(
            "insert into items values(?, ?, ?, ?)",
            [(id, first + 1 + i, item["id"], body) for i, (item, body) in enumerate(zip(items, bodies, strict=True))],
        )
        self._evict()
        return True

    def items(self, id: str) -> list[dict[str, Any]]:
        rows = self._db.execute("select body from items where document = ? order by number", (id,))
        return [orjson.loads(body) for (body,) in rows]

    def delete_item(self, id: str, item: str) -> bool:
        row = self._db.execute("select length(body) from items where document = ? and id = ?", (id, item)).fetchone()
        if row is None:
            return False
        self._db.execute("delete from items where document = ? and id = ?", (id, item))
        self._grow(id, -row[0])
        return True

    def _grow(self, id: str, num_bytes: int) -> bool:
        changed = self._db.execute(
            "update documents set size = size + ?, used = max(used, ?) where id = ?",
            (num_bytes, self._clock.latest(), id),
        )
        return changed.rowcount > 0

    # -- background responses

    def heartbeat(self, id: str, events: bytes = b"") -> bool:
        """Record progress and further events. Returns False if the document is missing or cancelled."""
        row = self._db.execute("select cancelled from documents where id = ?", (id,)).fetchone()
        if row is None or row[0]:
            return False
        self._db.execute("update documents set beat = ? where id = ?", (boottime(), id))
        self.add_events(id, events)
        return True

    def add_events(self, id: str, events: bytes) -> None:
        """Append events if the document exists."""
        if events and self._grow(id, len(events)):
            (last,) = self._db.execute("select max(number) from events where document = ?", (id,)).fetchone()
            number = 0 if last is None else last + 1
            self._db.execute("insert into events values(?, ?, ?)", (id, number, events))
            self._evict()

    def events(self, id: str, after: int) -> tuple[list[bytes], int]:
        """Event batches after batch number `after` (-1: all), and the number of the last batch."""
        rows = self._db.execute(
            "select number, data from events where document = ? and number > ? order by number", (id, after)
        ).fetchall()
        return [data for _, data in rows], rows[-1][0] if rows else after

    def cancel(self, id: str, owner: str) -> bool:
        changed = self._db.execute("update documents set cancelled = 1 where id = ? and owner = ?", (id, owner))
        return changed.rowcount > 0


def _api_error(error: OSError | sqlite3.Error) -> ApiError:
    """The client's error for a store that cannot be used."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
        return ApiError(507, "The disk of the response store is full.", code="store_full")
    return ApiError(500, f"The response store failed: {error}.", code="store_unusable")
