"""`SharedFolder`: a temporary folder for what a daemon's processes share, such as stored responses.

A daemon removes its folder when it ends. It also locks the folder while it lives, so that the next daemon can remove
folders that a killed daemon left behind: they may contain users' responses.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig

PREFIX = "weft-responses-"  # Prefix of folders that are already locked.


class SharedFolder:
    """A locked temporary folder.

    Attributes:
    name: its path.
    lock: a descriptor that holds the lock. Processes that inherit it keep the lock."""

    def __init__(self, prefix: str = PREFIX, before_removal: Callable[[Path], None] = lambda _: None) -> None:
        """before_removal: called with each folder that a killed daemon left behind. Raises `OSError`."""
        _remove_abandoned(Path(tempfile.gettempdir()), prefix, before_removal)
        made = Path(tempfile.mkdtemp(prefix="weft-"))  # mode 0700
        self.lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.name = str(made.rename(made.with_name(prefix + made.name.removeprefix("weft-"))))
        self._end = weakref.finalize(self, _remove, self.name, self.lock)

    def cleanup(self) -> None:
        """Idempotent."""
        self._end()


def shared_folder(config: ServeConfig) -> SharedFolder | None:
    """Create the folder if several API processes store responses without --responses-dir. Raises `ConfigError`."""
    if config.api_workers == 1 or config.responses_dir is not None or not config.responses_max_mib:
        return None
    try:
        return SharedFolder()
    except OSError as error:
        why = f"cannot create a shared folder for API processes: {error.strerror or error}"
        raise ConfigError(f"{why}; set TMPDIR to another directory, or --responses-dir") from None


def _remove(name: str, lock: int) -> None:
    shutil.rmtree(name, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(parent: Path, prefix: str, before_removal: Callable[[Path], None]) -> None:
    for folder in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its daemon is alive
            os.close(lock)
        else:
            before_removal(folder)
            _remove(str(folder), lock)
