"""`SearchGate`: lets an engine stop the measurements of a search in another process, through shared memory."""

from __future__ import annotations

import mmap
import os

import numpy as np

SIZE = 16


class SearchGate:
    """Two numbers in shared memory: whether the process may use the device, and how often that has ended.

    Only the engine writes them. A process that dies leaves nothing behind: the memory goes with its last descriptor."""

    def __init__(self, fd: int) -> None:
        """fd: a descriptor of `create`. Raises `OSError` or `ValueError`."""
        self.fd = fd
        self._numbers = np.frombuffer(mmap.mmap(fd, SIZE), np.int64)

    @classmethod
    def create(cls) -> SearchGate:
        """Return a closed gate. Raises `OSError`."""
        fd = os.memfd_create("weft-search")
        os.ftruncate(fd, SIZE)
        return cls(fd)

    @property
    def is_open(self) -> bool:
        return bool(self._numbers[0])

    @property
    def closings(self) -> int:
        """Number of times that the gate was closed. A measurement is undisturbed if this is the same after it."""
        return int(self._numbers[1])

    def open(self) -> None:
        self._numbers[0] = 1

    def close(self) -> None:
        if self._numbers[0]:
            self._numbers[0] = 0
            self._numbers[1] += 1
