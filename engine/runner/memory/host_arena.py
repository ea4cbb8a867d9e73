"""`HostArena` and `FileBacking`: a model's memory on a CPU, and the file that keeps its weights during sleep."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.runner.memory.sleep import SleepableMemory

GIB = 2**30
CHUNK = GIB  # Bytes of one read or write. Linux limits a call to just under 2 GiB.


def host_sleepable_memory(directory: Path) -> SleepableMemory:
    """Return the memory of a runner on a CPU. directory: folder of the file."""
    return SleepableMemory(HostArena, FileBacking(directory))


class HostArena:
    """`Arena` in anonymous memory, which the system allocates on first touch, as zeros."""

    def __init__(self, num_bytes: int) -> None:
        """Raises `OutOfMemory`."""
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError):
            raise OutOfMemory(
                f"{num_bytes / GIB:.1f} GiB of memory do not fit: lower --kv-cache-gib or --num-pages"
            ) from None
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def acquire(self) -> None:
        """The system allocates memory on first touch."""


class FileBacking:
    """`Backing` in an unnamed file, whose pages the system may write out and drop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file: int | None = None

    def keep(self, tensor: Tensor) -> None:
        if self._file is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory, prefix="weights-") as file:
                self._file = os.dup(file.fileno())
        data = memoryview(tensor.numpy())  # type: ignore[arg-type]
        at = 0
        while at < len(data):
            at += os.pwrite(self._file, data[at : at + CHUNK], at)

    def restore(self, tensor: Tensor) -> None:
        assert self._file is not None
        data = memoryview(tensor.numpy())  # type: ignore[arg-type]
        at = 0
        while at < len(data):
            read = os.preadv(self._file, [data[at : at + CHUNK]], at)
            if not read:
                raise OSError("the file with a sleeping model's weights is truncated")
            at += read
