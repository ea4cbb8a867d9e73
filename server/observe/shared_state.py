"""`SharedState`: metrics cells, load and rate limits in memory shared by all processes of one daemon."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", bound=np.generic)

CELLS = 4096  # float64 cells per row, for all metrics of a process.

OPEN, PREFILL, ENTERED, WAITING = range(4)  # Columns of `SharedState.load`.
STORES = ("responses", "files")  # Columns of `SharedState.failing`.


class SleepState(IntEnum):
    """Sleep state of a model."""

    AWAKE = 0  # Awake, or starting for the first time.
    FALLING_ASLEEP = 1  # Accepts no new requests and finishes the open ones.
    ASLEEP = 2
    WAKING = 3
    DEAD = 4  # All its engines have been given up.
    PAUSED = 5  # Keeps its memory, but accepts no requests until an operator resumes it.

    @property
    def word(self) -> str:
        return self.name.lower()


class SharedState:
    """Anonymous shared memory with one row per process. A process writes only its row; the row outlives the process.

    Attributes:
        counts: [rows, CELLS] float64, laid out by `counters.Store`.
        load: [rows, models, 4] int64: OPEN sequences, prompt tokens without a first output token (PREFILL), admitted
            requests (ENTERED), requests WAITING for the model to wake.
        http: [rows] int64, open HTTP requests.
        failing: [rows, stores] int64, 1 while a process cannot write to a store of `STORES`.
        sleep_states: [models] int64, `SleepState`; change it, and admit requests, under `lock()`.
        used: [models] float64, time of the last admitted request, as `time.monotonic()`.
        engine_load: [rows, engines] int64, tokens of a process's requests that an engine has not computed yet.
        closed: [engines] int64, 1 for an engine that gets no new requests; change it under `lock()`.
        given: [engines, 2] float64, (tokens, requests) recently routed to an engine; change them under `lock()`.
        buckets: [keys, 3] float64, written by `limits.RateLimits`; change them under `lock()`."""

    def __init__(
        self, rows: int, num_keys: int = 0, fd: int | None = None, *, engines: int = 1, models: int = 1
    ) -> None:
        """`fd`: shared state made by another process with the same rows, engines and models; its keys are used."""
        self.rows = rows
        self.engines = engines
        self.models = models
        self.fd = os.memfd_create("weft-shared_state") if fd is None else fd
        others = rows * (CELLS + 4 * models + engines + 1 + len(STORES)) + 3 * engines + 2 * models
        keys = max(1, num_keys) if fd is None else (os.fstat(fd).st_size // 8 - others) // 3
        size = 8 * (others + 3 * keys)
        if fd is None:
            os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        self._used = 0
        self.counts = self._array(np.float64, rows, CELLS)
        self.load = self._array(np.int64, rows, models, 4)
        self.engine_load = self._array(np.int64, rows, engines)
        self.closed = self._array(np.int64, engines)
        self.given = self._array(np.float64, engines, 2)
        self.http = self._array(np.int64, rows)
        self.failing = self._array(np.int64, rows, len(STORES))
        self.sleep_states = self._array(np.int64, models)
        self.used = self._array(np.float64, models)
        self.buckets = self._array(np.float64, keys, 3)

    def _array(self, dtype: type[Number], *shape: int) -> npt.NDArray[Number]:
        """Return an array in the next part of the memory."""
        array = np.frombuffer(self._map, dtype, math.prod(shape), self._used).reshape(shape)
        self._used += array.nbytes
        return array

    def row(self, row: int) -> memoryview[float]:
        """Return a row of `counts` as a memoryview, which updates single items faster than an array."""
        return memoryview(self._map)[row * CELLS * 8 : (row + 1) * CELLS * 8].cast("d")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other processes for a few microseconds. The kernel releases the lock of a process that dies."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)
