"""`Store`: responses and conversations in SQLite, in memory or in a file that processes share.

Documents expire, and the least recently used are deleted if there are too many documents or bytes.
"""

from __future__ import annotations

import asyncio
import math
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.errors import ApiError
from weft.server.observe.steady_clock import SteadyClock, boottime

T = TypeVar("T")

MAX_COUNT = 100_000  # documents in the store
FILE = "responses.sqlite"
CLOCK_FILE = "clock.json"
WAIT_SECONDS = 10.0  # seconds to wait for another process's transaction

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


class Store:
    """Call all methods except `run` and `close` through `run`, which uses a separate thread. Owners only see their own
    documents."""

    def __init__(self, folder: str | None, *, max_bytes: int, max_seconds: float) -> None:
        """`folder`: None keeps everything in memory. Raises `ConfigError`."""
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        path = ":memory:"
        file: Path | None = None
        try:
            if folder is not None:
                root = expanded(folder)
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = str(root / FILE)
                Path(path).touch(mode=0o600)
                file = root / CLOCK_FILE
            self._db = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma foreign_keys = on")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--responses-dir {folder} cannot be used: {error}") from None
        self._clock = SteadyClock(file)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    @classmethod
    def open(cls, config: ServeConfig) -> Store:
        """The store that `config` describes. Raises `ConfigError`."""
        max_bytes = int(config.responses_max_mib * 2**20)
        return cls(config.responses_dir, max_bytes=max_bytes, max_seconds=config.responses_max_hours * 3600)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function in the store's thread as a transaction, even if the caller is cancelled. Raises `ApiError`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, function, *arguments)

    def _transact(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            self._db.execute("begin immediate")
            try:
                result = function(*arguments)
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")
        except sqlite3.Error as error:
            what = f"The response store failed: {error}."
            raise ApiError(500, what, code="store_unusable") from error
        return result

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._db.close()

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
        """A document, which counts as used."""
        row = self._db.execute("select body, beat from documents where id = ? and owner = ?", (id, owner)).fetchone()
        if row is None:
            return None
        self._db.execute("update documents set used = max(used, ?) where id = ?", (self._clock.latest(), id))
        idle = boottime() - row[1]
        return Stored(orjson.loads(row[0]), idle if idle >= 0 else math.inf)

    def delete(self, id: str, owner: str) -> bool:
        return self._db.execute("delete from documents where id = ? and owner = ?", (id, owner)).rowcount > 0

    def _evict(self) -> None:
        self._clock.save()
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
