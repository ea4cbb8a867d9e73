"""`PrivateDir`: a directory for one daemon's sockets, which does not outlive it for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "weft-"
LOCK = "lock"
YOUNG_SECONDS = 60.0
"""a directory without a lock may be about to get one"""


class PrivateDir:
    """A new directory of mode 0700, locked while this process lives.

    Making one removes those that killed daemons have left.
    """

    def __init__(self) -> None:
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
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
