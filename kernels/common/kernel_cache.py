"""`KernelCache`: Triton's cache of compiled kernels, which a folder that cannot be written does not stop."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from typing import Any

from triton.runtime.cache import FileCacheManager


@cache
def _own_folder() -> str:
    """Return a folder of this process, which is removed when it ends."""
    folder = tempfile.mkdtemp(prefix="weft-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class KernelCache(FileCacheManager):
    """Reads kernels from Triton's folder, and writes those it lacks there, or to a folder of this process if the disk
    is full, read-only or broken."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError:
            self.key = key
            self._fall_back()

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        try:
            return str(super().put(data, filename, binary))
        except OSError:
            self._fall_back()
            return str(super().put(data, filename, binary))

    def _fall_back(self) -> None:
        self.cache_dir = os.path.join(_own_folder(), self.key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)
