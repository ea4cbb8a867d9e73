"""`SharedState`: metrics cells, load and rate limits in memory shared by all processes of one daemon."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np

CELLS = 4096
"""float64 cells per row, for all metrics of a process."""

OPEN, PREFILL, ENTERED, WAITING = range(4)
"""Columns of `SharedState.load`."""


class SleepState(IntEnum):
    """Sleep state of a model."""

    AWAKE = 0
    """Awake, or starting for the first time."""
    FALLING_ASLEEP = 1
    """Accepts no new requests and finishes the open ones."""
    ASLEEP = 2
    WAKING = 3
    DEAD = 4
    """Permanently ended."""

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
        sleep_states: [models] int64, `SleepState`; change it, and admit requests, under `lock()`.
        used: [models] float64, time of the last admitted request, as `time.time()`.
        engine_load: [rows, engines] int64, tokens of a process's requests that an engine has not computed yet.
        closed: [engines] int64, 1 for an engine that gets no new requests; change it under `lock()`.
        given: [engines, 2] float64, (tokens, requests) recently routed to an engine; change them under `lock()`.
        buckets: [keys, 3] float64, written by `limits.RateLimits`; change them under `lock()`.
    """

    def __init__(
        self, rows: int, num_keys: int = 0, fd: int | None = None, *, engines: int = 1, models: int = 1
    ) -> None:
        """`fd`: shared state made by another process with the same rows, engines and models; its keys are used."""
        self.rows = rows
        self.engines = engines
        self.models = models
        self.fd = os.memfd_create("weft-shared_state") if fd is None else fd
        keys = max(1, num_keys)
        if fd is not None:
            others = rows * (CELLS + 4 * models + engines + 1) + 3 * engines + 2 * models
            keys = (os.fstat(fd).st_size // 8 - others) // 3
        parts = [rows * CELLS, rows * models * 4, rows * engines, engines, engines * 2, rows, models, models, keys * 3]
        sizes = np.array(parts) * 8
        if fd is None:
            os.ftruncate(self.fd, int(sizes.sum()))
        self._map = mmap.mmap(self.fd, int(sizes.sum()))
        at = np.concatenate(([0], np.cumsum(sizes))).tolist()
        self.counts = np.frombuffer(self._map, np.float64, rows * CELLS, at[0]).reshape(rows, CELLS)
        self.load = np.frombuffer(self._map, np.int64, rows * models * 4, at[1]).reshape(rows, models, 4)
        self.engine_load = np.frombuffer(self._map, np.int64, rows * engines, at[2]).reshape(rows, engines)
        self.closed = np.frombuffer(self._map, np.int64, engines, at[3])
        self.given = np.frombuffer(self._map, np.float64, engines * 2, at[4]).reshape(engines, 2)
        self.http = np.frombuffer(self._map, np.int64, rows, at[5])
        self.sleep_states = np.frombuffer(self._map, np.int64, models, at[6])
        self.used = np.frombuffer(self._map, np.float64, models, at[7])
        self.buckets = np.frombuffer(self._map, np.float64, keys * 3, at[8]).reshape(keys, 3)

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
