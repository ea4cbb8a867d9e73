"""`Files`: uploads and batch output, in a folder that all API processes share.

A file consists of its content and a JSON description. They are written in this order, each by a rename, and removed in
reverse, so that readers only see complete files, even after a kill.
"""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.server.observe.steady_clock import SteadyClock

DAY = 86400
KEPT_SECONDS = 30 * DAY  # default and maximum lifetime of a file
MAX_FILES = 10_000
MAX_FILE_BYTES = 200 * 2**20
PROBE_BYTES = 2**16  # bytes written to find out whether the disk works again
LEFT_OVER_SECONDS = 3600  # age after which an unfinished upload is removed
_ID = re.compile(r"file-[0-9a-f]{32}")

R = TypeVar("R")


class StoreFull(Exception):
    """There is no space for another file, or there are too many."""


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    owner: str  # only the owner sees the file

    def to_json(self) -> dict[str, Any]:
        """As clients see it."""
        fields = msgspec.structs.asdict(self)
        del fields["owner"]
        return {"object": "file", **fields, "status": "processed"}


def replace(path: Path, data: bytes, *, by: Path) -> None:
    """Write a file atomically via the path `by`. Raises `OSError` and then leaves no file behind."""
    try:
        by.write_bytes(data)
        by.replace(path)
    except OSError:
        by.unlink(missing_ok=True)
        raise


def read(path: Path, kind: type[R], *, strict: bool = False) -> R | None:
    """A stored record; None if the file is missing or not one. If the disk fails, it raises `OSError` if `strict`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    except OSError:
        if strict:
            raise
        return None


def oldest_first(records: Iterable[Any]) -> list[Any]:
    """The records that are not None, by creation time."""
    return sorted((r for r in records if r is not None), key=lambda r: (r.created_at, r.id))


class Upload:
    """A file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = path.open("xb")

    def write(self, data: bytes) -> None:
        """Raises `StoreFull` and `OSError`."""
        self.size += len(data)
        if self.size > MAX_FILE_BYTES:
            raise StoreFull(f"The file is larger than {MAX_FILE_BYTES} bytes.")
        self._file.write(data)

    def close(self) -> None:
        """Delete the upload unless it was taken. Idempotent."""
        with suppress(OSError):  # the end of the content could not be written
            self._file.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def end(self) -> None:
        """Finish writing. Raises `OSError`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class Files:
    """Stored files. Several processes may use the same folder. All methods block on the disk."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        """Call `make` before use."""
        self._root = root / "files"
        self._partial = root / "partial"
        self._max_bytes = max_bytes
        self.clock = SteadyClock(root / "clock.json")

    def make(self) -> None:
        """Make the folders. Raises `OSError` if they cannot be used."""
        for folder in (self._root, self._partial):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise PermissionError(f"{self._root} is not writable")

    def probe(self) -> None:
        """Write and remove a file. Raises `OSError`."""
        upload = Upload(self._partial / uuid.uuid4().hex)
        try:
            upload.write(bytes(PROBE_BYTES))
            upload.end()
        finally:
            upload.close()

    def begin(self) -> Upload:
        """Begin an upload. Raises `StoreFull` and `OSError`."""
        self._check_space(1)
        return Upload(self._partial / uuid.uuid4().hex)

    def take(
        self, path: Path, *, filename: str, purpose: str, owner: str, kept: int = KEPT_SECONDS, id: str | None = None
    ) -> StoredFile:
        """Move a written file into the store. Raises `OSError`, and `StoreFull` unless `id` is given. `kept`: lifetime
        in seconds. `id`: makes the call repeatable after a kill."""
        with self._lock():
            if id is None:
                self._check_space(0)
            name = id or f"file-{uuid.uuid4().hex}"
            content = self.content(name)
            if id is None or path.exists():
                path.replace(content)
            size, now = content.stat().st_size, int(self.clock.latest())
            about = {"filename": filename, "purpose": purpose, "owner": owner}
            file = StoredFile(id=name, bytes=size, created_at=now, expires_at=now + kept, **about)
            replace(self._description(name), msgspec.json.encode(file), by=self._partial / uuid.uuid4().hex)
            return file

    def get(self, id: str, owner: str, *, strict: bool = True) -> StoredFile | None:
        """A file; None if it is missing, expired or belongs to another owner. If the disk fails, it raises `OSError` if
        `strict`."""
        file = read(self._description(id), StoredFile, strict=strict) if _ID.fullmatch(id) else None
        if file is None or file.owner != owner or file.expires_at <= self.clock.earliest():
            return None
        return file

    def owned_by(self, owner: str) -> list[StoredFile]:
        """All readable files of an owner, oldest first."""
        return oldest_first(self.get(path.stem, owner, strict=False) for path in self._root.glob("*.json"))

    def content(self, id: str) -> Path:
        return self._root / f"{id}.jsonl"

    def remove(self, id: str) -> None:
        self._description(id).unlink(missing_ok=True)
        self.content(id).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove expired files and leftovers of killed processes."""
        self.clock.save()
        now, bound = self.clock.earliest(), self.clock.bound()
        for path in self._root.glob("*.json"):
            if (file := read(path, StoredFile)) is None:
                continue
            if file.expires_at <= now:
                self.remove(path.stem)
            elif file.created_at > bound:
                kept = file.expires_at - file.created_at
                file.created_at = int(self.clock.latest())
                file.expires_at = file.created_at + kept
                replace(path, msgspec.json.encode(file), by=self._partial / uuid.uuid4().hex)
        with self._lock():
            orphans = (p for p in self._root.glob("*.jsonl") if not p.with_suffix(".json").exists())
            for path in (*self._partial.iterdir(), *orphans):
                with suppress(OSError):
                    if now - path.stat().st_mtime > LEFT_OVER_SECONDS:
                        path.unlink()

    def _check_space(self, more: int) -> None:
        entries = [e for folder in (self._root, self._partial) for e in os.scandir(folder)]
        if len(entries) // 2 + more > MAX_FILES:
            raise StoreFull(f"There are already {MAX_FILES} files; delete some.")
        used = 0
        for entry in entries:
            with suppress(FileNotFoundError):
                used += entry.stat().st_size
        if used + more > self._max_bytes:
            raise StoreFull(f"The files use {used} of {self._max_bytes} bytes; delete some.")

    def _description(self, id: str) -> Path:
        return self._root / f"{id}.json"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock out other processes. The kernel releases the lock of a process that dies."""
        fd = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
