"""`PixelShelf`: the pixels of images, as files in a private directory in shared memory, from API processes to engines.

An API process puts an image's tiles there before it sends the request, and discards the file when the request has
ended: an engine may read it again after a preemption. Nothing in a file is trusted: the engine checks the name, the
kind and owner of the file and its size, and reads a copy.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

PREFIX = "weft-pixels-"
LIMIT = 1 << 30
"""Most bytes that one API process keeps on the shelf."""
_NAME = re.compile(r"\d{1,10}-[0-9a-f]{32}")
_SHARED_MEMORY = Path("/dev/shm")


class ShelfFull(Exception):
    """There is no room for an image now."""


class PixelShelf:
    """One process's view of the directory. It counts the bytes of the files that it has put there itself."""

    def __init__(self, directory: str | Path, limit: int = LIMIT) -> None:
        self.directory, self._limit = Path(directory), limit
        self._sizes: dict[str, int] = {}
        """Bytes of each file that this process put here."""

    @classmethod
    def make(cls, limit: int = LIMIT) -> PixelShelf:
        """Make the directory, for this process's user only, in shared memory if there is some. Removes the directories
        of daemons that have ended."""
        where = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        _remove_abandoned(where)
        return cls(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where), limit)

    def close(self) -> None:
        """Remove the directory with all files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that this process keeps on the shelf."""
        return sum(self._sizes.values())

    def put(self, client: int, tiles: Sequence[bytes | memoryview]) -> str:
        """Write tiles back to back to a new file of a client and return its name. Raises `ShelfFull`."""
        size = sum(memoryview(tile).nbytes for tile in tiles)
        if self.num_bytes + size > self._limit:
            raise ShelfFull(f"{self._limit >> 20} MiB of pixels are waiting")
        name = f"{client}-{secrets.token_hex(16)}"
        path = self.directory / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
            try:
                for tile in tiles:
                    left = memoryview(tile).cast("B")
                    while len(left):
                        left = left[os.write(fd, left) :]
            finally:
                os.close(fd)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise ShelfFull(f"the pixels could not be written: {error.strerror}") from None
        self._sizes[name] = size
        return name

    def take(self, name: str, size: int) -> bytearray:
        """Return a copy of a file, which must have this size. Raises `FileNotFoundError` if it was discarded, and
        `ValueError` if it is not what `put` writes."""
        if _NAME.fullmatch(name) is None:
            raise ValueError("a file of pixels has an invalid name")
        try:
            fd = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(f"a file of pixels cannot be opened: {error.strerror}") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != size:
                raise ValueError(f"a file of pixels has {found.st_size} bytes instead of {size}, or another owner")
            pixels = bytearray(size)
            at, view = 0, memoryview(pixels)
            while at < size:
                read = os.preadv(fd, [view[at:]], at)
                if not read:
                    raise ValueError("a file of pixels became shorter")
                at += read
            return pixels
        finally:
            os.close(fd)

    def discard(self, names: Iterable[str]) -> None:
        """Remove files. Idempotent."""
        for name in names:
            self._sizes.pop(name, None)
            if _NAME.fullmatch(name) is not None:
                (self.directory / name).unlink(missing_ok=True)

    def discard_client(self, client: int) -> None:
        """Remove the files of an API process that has ended."""
        self.discard([path.name for path in self.directory.glob(f"{client}-*")])


def _remove_abandoned(where: Path) -> None:
    """Remove our directories whose daemons have ended."""
    for path in where.glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(OSError):
            if pid.isdigit() and path.lstat().st_uid == os.geteuid() and not path.is_symlink() and not _lives(int(pid)):
                shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
