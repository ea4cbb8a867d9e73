"""`PrivateDir`: a directory for one daemon's sockets, which does not outlive it for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from weft.engine.errors import ConfigError

PREFIX = "weft-"
LOCK = "lock"
LONGEST = 107 - len("/engine.sock")
"""bytes of its path: a Unix socket's may have 107"""
YOUNG_SECONDS = 60.0
"""a directory without a lock may be about to get one"""


class PrivateDir:
    """A new directory of mode 0700, locked while this process lives.

    Making one removes those that killed daemons have left.
    """

    def __init__(self) -> None:
        """Raises `ConfigError` where there is no place for it."""
        try:
            remove_stale()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise ConfigError(
                f"no folder for sockets can be made: {error.strerror}: set TMPDIR to another one"
            ) from None
        if len(os.fsencode(self.path)) > LONGEST:
            self.path.rmdir()
            most = LONGEST - len(self.path.name) - 1
            raise ConfigError(f"TMPDIR {self.path.parent} is too long for sockets: set one of at most {most} bytes")
        self._lock = (self.path / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale() -> None:
    """Remove this user's directories whose daemon no longer lives."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_stale(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_stale(path: Path) -> bool:
    about = path.lstat()
    ours = path.is_dir() and not path.is_symlink() and about.st_uid == os.getuid() and about.st_mode & 0o777 == 0o700
    if not ours or not all(entry.is_socket() or entry.name == LOCK for entry in path.iterdir()):
        return False
    if not (path / LOCK).exists():
        return time.time() - about.st_mtime > YOUNG_SECONDS
    lock = os.open(path / LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError is an OSError: its daemon lives
        return True
    finally:
        os.close(lock)
