"""`Store`: responses and conversations that clients come back to, in SQLite: in memory, or a file that processes share.

What is oldest in use goes first where there are too many, too many bytes, or their time is up.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig
from weft.server.errors import ApiError

T = TypeVar("T")

MAX_COUNT = 100_000
"""documents"""
FILE = "responses.sqlite"
WAIT_SECONDS = 10.0
"""that a process waits for another one's turn"""

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
    beat: float
    """Unix time at which somebody worked on it last"""


class Store:
    """Every method but `run` and `close` is called through `run`, which does it in a thread of its own. An `owner` sees
    what is its own."""

    def __init__(self, folder: str | None, *, max_bytes: int, max_seconds: float) -> None:
        """`folder`: None keeps all in memory. Raises `ConfigError`."""
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        path = ":memory:"
        try:
            if folder is not None:
                root = expanded(folder)
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
                path = str(root / FILE)
                Path(path).touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma foreign_keys = on")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--responses-dir {folder} cannot be used: {error}") from None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    @classmethod
    def open(cls, config: ServeConfig) -> Store:
        """Raises `ConfigError`."""
        max_bytes = int(config.responses_max_mib * 2**20)
        return cls(config.responses_dir, max_bytes=max_bytes, max_seconds=config.responses_max_hours * 3600)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do this in the store's thread, as one transaction. It is done even if the caller is cancelled meanwhile.
        Raises `ApiError` where that fails."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_turn, function, *arguments)

    def _in_turn(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            self._db.execute("begin immediate")
            try:
                result = function(*arguments)
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")
        except sqlite3.Error as error:
            what = f"The store of responses cannot be used: {error}."
            raise ApiError(500, what, code="store_unusable") from error
        return result

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._db.close()

    # -- documents

    def put(self, id: str, owner: str, body: dict[str, Any]) -> bool:
        """Keep a document; False where it is larger than all may be."""
        data, now = orjson.dumps(body), time.time()
        if len(data) > self.max_bytes:
            return False
        self._db.execute(
            "insert into documents(id, owner, body, size, used, beat) values(?, ?, ?, ?, ?, ?)",
            (id, owner, data, len(data), now, now),
        )
        self._make_room()
        return True

    def change(self, id: str, body: dict[str, Any]) -> bool:
        """Replace a document; False where it is gone."""
        data = orjson.dumps(body)
        (before,) = self._db.execute("select length(body) from documents where id = ?", (id,)).fetchone() or (None,)
        if before is None:
            return False
        self._db.execute(
            "update documents set body = ?, size = size + ?, used = ? where id = ?",
            (data, len(data) - before, time.time(), id),
        )
        self._make_room()
        return True

    def get(self, id: str, owner: str) -> Stored | None:
        """A document; that counts as use."""
        row = self._db.execute("select body, beat from documents where id = ? and owner = ?", (id, owner)).fetchone()
        if row is None:
            return None
        self._db.execute("update documents set used = ? where id = ?", (time.time(), id))
        return Stored(orjson.loads(row[0]), row[1])

    def delete(self, id: str, owner: str) -> bool:
        return self._db.execute("delete from documents where id = ? and owner = ?", (id, owner)).rowcount > 0

    def _make_room(self) -> None:
        self._db.execute("delete from documents where used < ?", (time.time() - self._max_seconds,))
        while True:
            count, size = self._db.execute("select count, bytes from totals").fetchone()
            if count <= MAX_COUNT and size <= self.max_bytes:
                return
            self._db.execute("delete from documents where id in (select id from documents order by used limit 1)")

    # -- items of a document

    def add_items(self, id: str, items: Sequence[dict[str, Any]], most: int) -> bool:
        """Append to a document; False where it is gone, or would have more than `most`."""
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
        self._make_room()
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
            "update documents set size = size + ?, used = ? where id = ?", (num_bytes, time.time(), id)
        )
        return changed.rowcount > 0

    # -- work in the background

    def beat(self, id: str, events: bytes = b"") -> bool:
        """Somebody works on it, and has these further events; False where it is gone, or was cancelled."""
        row = self._db.execute("select cancelled from documents where id = ?", (id,)).fetchone()
        if row is None or row[0]:
            return False
        self._db.execute("update documents set beat = ? where id = ?", (time.time(), id))
        self.tell(id, events)
        return True

    def tell(self, id: str, events: bytes) -> None:
        """Append events, if it is still there."""
        if events and self._grow(id, len(events)):
            (last,) = self._db.execute("select max(number) from events where document = ?", (id,)).fetchone()
            number = 0 if last is None else last + 1
            self._db.execute("insert into events values(?, ?, ?)", (id, number, events))
            self._make_room()

    def events(self, id: str, after: int) -> tuple[list[bytes], int]:
        """What was told behind the `after`-th time (-1: all), and the number of the last."""
        rows = self._db.execute(
            "select number, data from events where document = ? and number > ? order by number", (id, after)
        ).fetchall()
        return [data for _, data in rows], rows[-1][0] if rows else after

    def cancel(self, id: str, owner: str) -> bool:
        changed = self._db.execute("update documents set cancelled = 1 where id = ? and owner = ?", (id, owner))
        return changed.rowcount > 0
