"""`SharedFolder`: a temporary folder for the responses that a daemon's API processes share.

A daemon removes its folder when it ends. It also locks the folder while it lives, so that the next daemon can remove
folders that a killed daemon left behind: they contain users' responses.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from weft.engine.errors import ConfigError
from weft.server.config import ServeConfig

PREFIX = "weft-responses-"  # Prefix of folders that are already locked.


class SharedFolder:
    """A locked temporary folder.

    Attributes:
    name: its path."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        _remove_abandoned(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix="weft-"))  # mode 0700
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.name = str(made.rename(made.with_name(PREFIX + made.name.removeprefix("weft-"))))
        self._end = weakref.finalize(self, _remove, self.name, lock)

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


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its daemon is alive
            os.close(lock)
        else:
            _remove(str(folder), lock)
