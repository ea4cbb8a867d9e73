"""`SharedFolder`: a temporary folder of one daemon, for what its API processes keep for one another.

It goes with the daemon. One that is killed cannot see to that, and users' responses lie in it: so a daemon holds a lock
on its folder for as long as it lives, and the next one to make such a folder removes those on which nobody does.
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

PREFIX = "weft-responses-"
"""of folders that are locked already"""


class SharedFolder:
    """Attributes:
    name: its path.
    """

    def __init__(self) -> None:
        """Raises `OSError`."""
        _remove_abandoned(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix="weft-"))  # of mode 0700
        lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.name = str(made.rename(made.with_name(PREFIX + made.name.removeprefix("weft-"))))
        self._end = weakref.finalize(self, _remove, self.name, lock)

    def cleanup(self) -> None:
        """Idempotent."""
        self._end()


def shared_folder(config: ServeConfig) -> SharedFolder | None:
    """For the responses that several API processes store, where no other folder is named. Raises `ConfigError`."""
    if config.api_workers == 1 or config.responses_dir is not None or not config.responses_max_mib:
        return None
    try:
        return SharedFolder()
    except OSError as error:
        why = f"API processes have no folder in common: {error.strerror or error}"
        raise ConfigError(f"{why}; set TMPDIR to another directory, or --responses-dir") from None


def _remove(name: str, lock: int) -> None:
    shutil.rmtree(name, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(among: Path) -> None:
    for folder in among.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone, or somebody else's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its daemon lives
            os.close(lock)
        else:
            _remove(str(folder), lock)
