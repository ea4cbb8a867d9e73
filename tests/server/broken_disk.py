"""`BrokenDisk`: a folder whose disk fails for a process, open files and SQLite included, as a test says."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("disk.c")
READS = -1  # an "errno": reads fail, too
FOREVER_MS = 10**9

FAULTS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO, "unreadable": READS}
"""errno by name"""


class BrokenDisk:
    """`folder`: it and everything below. `home`: a folder for the shim, elsewhere. Raises `RuntimeError` without a C
    compiler."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        compiler = shutil.which("cc")
        if compiler is None:
            raise RuntimeError("there is no C compiler")
        shim = home / "disk.so"
        subprocess.run((compiler, "-shared", "-fPIC", "-O2", "-o", shim, SOURCE, "-ldl"), check=True)
        state = home / "disk"
        state.write_bytes(struct.pack("ii4088s", 0, 0, os.fsencode(folder)))
        with state.open("r+b") as file:
            self._state = mmap.mmap(file.fileno(), 0)
        self.env = {"LD_PRELOAD": str(shim), "CHAOS_DISK": str(state)}

    def fail(self, error: int) -> None:
        """Fail from now on with this errno, or `READS`."""
        self._set(error, 0)

    def hang(self, milliseconds: int = FOREVER_MS) -> None:
        """Let every write take this long, or until `work`."""
        self._set(0, milliseconds)

    def work(self) -> None:
        self._set(0, 0)

    def _set(self, error: int, milliseconds: int) -> None:
        self._state[:8] = struct.pack("ii", error, milliseconds)
