"""`StoreFile`: reads and writes the locked file of an SSD store: superblock, headers, extents and remainders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from weft.engine.errors import ConfigError
from weft.engine.memory.extent import (
    SUPERBLOCK_BYTES,
    Geometry,
    Record,
    pack_header,
    pack_superblock,
    unpack_header,
    unpack_superblock,
)
from weft.engine.memory.transfer import ALIGNMENT

FILE_NAME = "pages.weft"
LOCK_POLL_SECONDS = 0.05
SCAN_BYTES = 4 << 20  # bytes of headers to read at once

T = TypeVar("T")


class StoreUnavailable(Exception):
    """The path cannot be used; the message is one line. Serving continues without the tier."""


def reason_of(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'EIO')} {error.strerror or error}"


def _same_file(fd: int, path: Path) -> bool:
    """Return whether the path leads to the open file. Raises `OSError`, except if there is no file."""
    try:
        there = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    mine = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _open_locked(path: Path, flags: int, patience: float) -> int:
    """Open the file and lock it for as long as it is open; the system releases the lock when the process ends. The lock
    is on the file itself, so removing the path does not let others in. The process that holds it may be about to end,
    so retry for `patience` seconds. Raises `ConfigError` if the file stays locked, or `OSError`."""
    end = time.monotonic() + patience
    while True:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(fd, path):
                return fd
            os.close(fd)  # removed while we waited
            continue
        except BlockingIOError:
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        if time.monotonic() >= end:
            raise ConfigError(f"{path.parent} is in use by another weft: give each daemon its own --ssd-kv-path")
        time.sleep(LOCK_POLL_SECONDS)


class StoreFile:
    """The locked file of a store. It reads and writes full extents, with O_DIRECT if the file system supports it. With
    `geometry` None, the file is used as it is and not changed (`weft cache`). `patience` is how many seconds to wait
    for another process that holds the lock. Raises `ConfigError` if it keeps the lock, `StoreUnavailable` if the system
    refuses."""

    def __init__(self, directory: Path, geometry: Geometry | None, patience: float = 0.0) -> None:
        self.path = directory / FILE_NAME
        self._closed = True
        self.reset_reason: str | None = None  # why existing pages were dropped; None if there were none
        if geometry is None:
            self._require_file()
        try:
            if geometry is not None:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.fd = _open_locked(self.path, os.O_RDWR | (os.O_CREAT if geometry is not None else 0), patience)
        except OSError as error:
            raise StoreUnavailable(f"cannot open {self.path}: {reason_of(error)}") from None
        self._closed = False
        try:
            self.geometry, self.epoch = self._open(geometry)
            self.direct_fd = self._open_direct()
            self.direct = self.direct_fd != self.fd
        except OSError as error:
            self.close()
            raise StoreUnavailable(f"cannot use {self.path}: {reason_of(error)}") from None
        except StoreUnavailable:
            self.close()
            raise

    def _require_file(self) -> None:
        try:
            there = self.path.is_file()
        except OSError as error:
            raise StoreUnavailable(f"cannot open {self.path}: {reason_of(error)}") from None
        if not there:
            raise StoreUnavailable(f"{self.path.parent} holds no KV store ({FILE_NAME} is missing)")

    def _open(self, wanted: Geometry | None) -> tuple[Geometry, int]:
        found = unpack_superblock(os.pread(self.fd, SUPERBLOCK_BYTES, 0))
        if wanted is None:
            if found is None:
                raise StoreUnavailable(f"{self.path} is not a KV store of this version")
            return found
        if found is None or found[0] != wanted:
            # The file is of another model, layout, version or size: reset it.
            self._check_space(wanted.file_bytes)
            if os.fstat(self.fd).st_size:
                self.reset_reason = _difference(found[0], wanted) if found else "another version of weft made it"
            os.ftruncate(self.fd, 0)
            found = wanted, 1
            os.posix_fallocate(self.fd, 0, wanted.file_bytes)
            os.pwrite(self.fd, pack_superblock(*found), 0)
        elif os.fstat(self.fd).st_size < wanted.file_bytes:
            os.posix_fallocate(self.fd, 0, wanted.file_bytes)
        return found

    def _check_space(self, size: int) -> None:
        """Raise `OSError` if the disk is too small, before existing pages are dropped."""
        there = os.fstatvfs(self.fd)
        if size > there.f_bfree * there.f_frsize + os.fstat(self.fd).st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open_direct(self) -> int:
        """Return a descriptor with O_DIRECT if a probe can read through it, else the ordinary one."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return self.fd
        try:
            with mmap.mmap(-1, SUPERBLOCK_BYTES) as probe:
                if os.preadv(fd, [probe], 0) == SUPERBLOCK_BYTES:
                    return fd
        except OSError:
            pass
        os.close(fd)
        return self.fd

    def write_extent(self, extent: int, data: memoryview) -> None:
        self._past_the_cache(lambda fd: self._write_all(fd, data, self.geometry.extent_at(extent)))

    def read_extent(self, extent: int, into: memoryview) -> bool:
        """Return False if the file ends before the extent does."""
        return self._past_the_cache(lambda fd: self._read_all(fd, into, self.geometry.extent_at(extent)))

    def write_remainder(self, remainder: int, data: memoryview) -> None:
        self._past_the_cache(lambda fd: self._write_all(fd, data, self.geometry.remainder_at(remainder)))

    def read_remainder(self, remainder: int, into: memoryview) -> bool:
        """Return False if the file ends before the remainder does."""
        return self._past_the_cache(lambda fd: self._read_all(fd, into, self.geometry.remainder_at(remainder)))

    def _past_the_cache(self, work: Callable[[int], T]) -> T:
        """Call `work(descriptor)` with O_DIRECT. If the file system refuses it once, O_DIRECT is off from then on."""
        if self.direct:
            try:
                return work(self.direct_fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
        return work(self.fd)

    def write_header(self, extent: int, record: Record | None, epoch: int) -> None:
        g = self.geometry
        block = bytes(g.header_bytes) if record is None else pack_header(g, epoch, record)
        self._write_all(self.fd, memoryview(block), g.header_at(extent))

    def headers(self) -> list[tuple[int, Record]]:
        g, found = self.geometry, []
        width = g.header_bytes
        step = max(1, SCAN_BYTES // width)
        for first in range(0, g.num_extents, step):
            block = os.pread(self.fd, min(step, g.num_extents - first) * width, g.header_at(first))
            for i in range(len(block) // width):
                record = unpack_header(g, self.epoch, block[i * width : (i + 1) * width])
                if record is not None:
                    found.append((first + i, record))
        return sorted(found, key=lambda item: item[1].serial)

    def is_there(self) -> bool:
        """Return whether the path still leads to this file; True if unknown."""
        try:
            return _same_file(self.fd, self.path)
        except OSError:
            return True

    def loss(self) -> str | None:
        """Return what happened to the file: "removed" or "truncated"; None if it is whole or that is unknown."""
        if not self.is_there():
            return "removed"
        try:
            return "truncated" if os.fstat(self.fd).st_size < self.geometry.file_bytes else None
        except OSError:
            return None

    def new_epoch(self) -> None:
        """Drop every extent durably: they stay dropped after a power failure. Raises `OSError`, and then the epoch is
        unchanged."""
        self._write_durably(pack_superblock(self.geometry, self.epoch + 1), 0)
        self.epoch += 1

    def prove_writable(self) -> None:
        """Write the superblock again. Raises `StoreUnavailable`."""
        try:
            self._write_durably(pack_superblock(self.geometry, self.epoch), 0)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self.path}: {reason_of(error)}") from None

    def _write_durably(self, block: bytes, at: int) -> None:
        """Write one block durably. A sync of the file would wait for all of its pages."""
        try:
            written = os.pwritev(self.fd, [block], at, os.RWF_DSYNC)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            written = os.pwrite(self.fd, block, at)
            os.fdatasync(self.fd)
        if written != len(block):
            raise OSError(errno.ENOSPC, "short write")

    def remove(self) -> None:
        """Unlink the path; the file stays open. Raises `OSError`."""
        if self.is_there():
            self.path.unlink(missing_ok=True)

    @staticmethod
    def _read_all(fd: int, into: memoryview, at: int) -> bool:
        done = 0
        while done < len(into):
            # A short read that stops inside a block is at the end of the file.
            n = os.preadv(fd, [into[done:]], at + done)
            if n <= 0:
                return False
            done += n
            if done < len(into) and done % ALIGNMENT:
                return False
        return True

    @staticmethod
    def _write_all(fd: int, data: memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            n = os.pwrite(fd, data[done:], at + done)
            if n <= 0:
                raise OSError(errno.ENOSPC, "nothing was written")
            done += n

    def __del__(self) -> None:
        self.close()  # an engine that could not start does not close its store

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for fd in {self.fd, getattr(self, "direct_fd", self.fd)}:
            with contextlib.suppress(OSError):
                os.close(fd)


def _difference(found: Geometry, wanted: Geometry) -> str:
    """Describe why the pages of a store cannot be used."""
    if found.page_tokens != wanted.page_tokens:
        return f"its pages have {found.page_tokens} tokens, not {wanted.page_tokens}"
    if found.owner != wanted.owner:
        return "its pages belong to another model, dtype, rope or --tier-kv-format"
    return f"its size is {found.num_extents} pages, not {wanted.num_extents}"
