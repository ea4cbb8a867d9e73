"""`Batches`: batch records, one JSON file each. One process owns and changes them; all others read.

`Folder`: the files and batches in `--files-dir`.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weft.engine.config import expanded
from weft.engine.errors import ConfigError
from weft.server.batches.files import KEPT_SECONDS, Files, oldest_first, read, replace
from weft.server.observe.steady_clock import SteadyClock
from weft.server.observe.storage import Storage

MAX_OPEN = 1000  # unfinished batches of all owners
RUNNING = ("validating", "in_progress", "finalizing")  # statuses of unfinished batches
_ID = re.compile(r"batch_[0-9a-f]{32}")
_WINDOW = re.compile(r"(\d{1,3})([hd])")


_INTERNAL = frozenset({"owner", "kept", "next_status"})  # fields that clients do not see


class TooMany(Exception):
    """There are `MAX_OPEN` unfinished batches."""


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, and its owner."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    owner: str
    kept: int = KEPT_SECONDS  # lifetime of the output in seconds
    status: str = "validating"
    next_status: str | None = None  # the status after "finalizing"
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        return self.status not in RUNNING

    def enter(self, status: str) -> None:
        """Change the status now."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def to_json(self) -> dict[str, Any]:
        """As clients see it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _INTERNAL}
        errors = None if self.errors is None else {"object": "list", "data": self.errors}
        counts = msgspec.structs.asdict(self.request_counts)
        return {"object": "batch", **fields, "errors": errors, "request_counts": counts}


def window_seconds(window: str) -> int | None:
    """The seconds of a completion window such as 24h or 7d; None if it is invalid."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * {"h": 3600, "d": 86400}[match[2]] if match else 0
    return seconds if 0 < seconds <= KEPT_SECONDS else None


class Batches:
    """Batch records. All methods block on the disk."""

    def __init__(self, root: Path) -> None:
        """Call `make` before use."""
        self.root = root / "batches"
        self.clock = SteadyClock(root / "clock.json")
        self._ended: set[str] = set()  # ids of finished batches, which no longer change

    def make(self) -> None:
        """Make the folder. Raises `OSError`."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def try_own(self) -> int | None:
        """Become the owner while the returned file descriptor is open. None if another process is the owner."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def create(self, batch: Batch) -> None:
        """Add a new batch. Raises `TooMany` and `OSError`."""
        if len(self.open()) >= MAX_OPEN:
            raise TooMany
        self.save(batch)

    @staticmethod
    def new_id() -> str:
        return f"batch_{uuid.uuid4().hex}"

    def save(self, batch: Batch) -> None:
        """Write a record; for its creator and the owner. Raises `OSError`."""
        written = self.root / f"{batch.id}.{uuid.uuid4().hex}.new"
        replace(self.root / f"{batch.id}.json", msgspec.json.encode(batch), by=written)

    def get(self, id: str, owner: str, *, strict: bool = True) -> Batch | None:
        """A batch as clients see it; None if it is missing or belongs to another owner. If the disk fails, it raises
        `OSError` if `strict`."""
        batch = self._read(id, strict=strict) if _ID.fullmatch(id) else None
        if batch is None or batch.owner != owner:
            return None
        if batch.status in ("validating", "in_progress") and (asked := self.cancelled(id)):
            batch.status, batch.cancelling_at = "cancelling", asked
        return batch

    def owned_by(self, owner: str) -> list[Batch]:
        """All readable batches of an owner, oldest first."""
        return oldest_first(self.get(path.stem, owner, strict=False) for path in self.root.glob("batch_*.json"))

    def open(self) -> list[Batch]:
        """All readable unfinished batches, oldest first."""
        found = []
        for path in self.root.glob("batch_*.json"):
            if path.stem not in self._ended and (batch := self._read(path.stem)) is not None:
                if batch.ended:
                    self._ended.add(batch.id)
                else:
                    found.append(batch)
        return oldest_first(found)

    def cancel(self, id: str) -> None:
        """Ask the owner, possibly another process, to cancel a batch."""
        (self.root / f"{id}.cancel").touch()

    def cancelled(self, id: str) -> int | None:
        """The time at which cancellation was requested, if it was."""
        try:
            return int((self.root / f"{id}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def output(self, id: str, kind: str) -> Path:
        """The file that collects answers. `kind`: 'out' or 'err'."""
        return self.root / f"{id}.{kind}"

    def sweep(self) -> None:
        """Remove batches that ended long ago and leftovers of killed processes."""
        past, bound = self.clock.earliest() - KEPT_SECONDS, self.clock.bound()
        for path in self.root.iterdir():
            with suppress(OSError):
                batch = self._read(path.name.split(".")[0], strict=True)
                if batch is not None and batch.ended and batch.created_at > bound:
                    batch.created_at = int(self.clock.latest())
                    self.save(batch)
                old = batch is None or (batch.ended and batch.created_at < past)
                if old and path.stat().st_mtime < past:
                    self._ended.discard(path.stem)
                    path.unlink(missing_ok=True)

    def _read(self, id: str, *, strict: bool = False) -> Batch | None:
        return read(self.root / f"{id}.json", Batch, strict=strict)


class Folder(NamedTuple):
    files: Files
    batches: Batches

    @classmethod
    def open(cls, path: str, max_gib: float, storage: Storage | None = None) -> Folder:
        """Open the folder, creating it if needed. `storage`: learns that it cannot be used; without it that raises
        `ConfigError`."""
        root = expanded(path)
        with suppress(OSError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = cls(Files(root, int(max_gib * 2**30)), Batches(root))
        try:
            folder.files.make()
            folder.batches.make()
        except OSError as error:
            why = error.strerror or str(error)
            if storage is None:
                raise ConfigError(f"--files-dir {path} cannot be used: {why}") from None
            storage.failed("files", why)
        return folder
