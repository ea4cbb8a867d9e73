"""`Heartbeats`: heartbeats of a daemon's processes in shared memory; `Watch` detects missing ones.

A process writes its row from its main loop, never from another thread, which would continue while the loop hangs. Times
are of the monotonic clock, which is the same in all processes. Nothing is sent, so heartbeats work with full sockets
and without the daemon.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

ENGINE = 0  # Row of the first engine. Further engines follow, then API processes.

HEARTBEAT_SECONDS = 1.0  # maximum seconds between two heartbeats of an idle loop
LATE_SECONDS = 5.0  # seconds without a heartbeat after which probes report the process as late
NAP_SECONDS = 3.0  # a watcher that has not looked for this many seconds was suspended, and perhaps the machine with it

_MAX_RANKS = 8
_RANKS_AT, _RANK_CELLS = 16, 3
_CELLS = _RANKS_AT + _MAX_RANKS * _RANK_CELLS
_TEXT_AT = 8 * _CELLS
_TEXT_BYTES = 127
_TEXT = 1 + _TEXT_BYTES
_ROW = _TEXT_AT + _MAX_RANKS * _TEXT
_AT, _ALLOWED, _PID, _STEP, _REQUESTS, _TOKENS, _DECODES, _NANO_BATCHES, _CONDEMNED = range(9)


class LastStep(NamedTuple):
    """The iteration that the engine last waited for."""

    number: int
    requests: int
    tokens: int
    decodes: int
    nano_batches: int

    def __str__(self) -> str:
        plan = "the serial plan" if self.nano_batches < 2 else f"a pipeline of {self.nano_batches} nano-batches"
        prefill = self.tokens - self.decodes
        return (
            f"step {self.number}: {self.requests} requests, {self.tokens} tokens "
            f"({self.decodes} of decodes, {prefill} of prefills), {plan}"
        )


class Heartbeats:
    """Anonymous shared memory with a row per process, and the daemon's timeouts."""

    def __init__(
        self, rows: int = 1, fd: int | None = None, *, step_timeout: float = 600.0, start_timeout: float = 600.0
    ) -> None:
        """`fd` opens the heartbeats of another process, which set the timeouts and has at least `rows` rows."""
        self.rows = rows
        self.fd = os.memfd_create("weft-heartbeats") if fd is None else fd
        size = (rows + 1) * _ROW
        if fd is None:
            os.ftruncate(self.fd, size)
        self._map = memoryview(mmap.mmap(self.fd, size))
        bounds = self._map[:_TEXT_AT].cast("d")
        if fd is None:
            bounds[0], bounds[1] = step_timeout, start_timeout
        self.step_timeout = bounds[0]  # maximum seconds of an iteration, if its end can be awaited with a timeout
        self.start_timeout = bounds[1]  # maximum seconds of a stage of the start without progress

    def _cells(self, row: int) -> memoryview[float]:
        return self._map[(row + 1) * _ROW : (row + 1) * _ROW + _TEXT_AT].cast("d")

    def _text(self, row: int, rank: int = 0) -> memoryview[int]:
        begin = (row + 1) * _ROW + _TEXT_AT + rank * _TEXT
        return self._map[begin : begin + _TEXT]

    def of(self, row: int) -> Heartbeat:
        """Return the row for its process, or for the daemon before the process runs."""
        return Heartbeat(self._cells(row), self._text(row))

    def rank(self, row: int, rank: int) -> Heartbeat:
        """Return the heartbeat of a follower rank of the engine in this row. Rank 0 uses the engine's own."""
        begin = _RANKS_AT + rank * _RANK_CELLS
        return Heartbeat(self._cells(row)[begin : begin + _RANK_CELLS], self._text(row, rank))

    def ranks(self, row: int) -> list[int]:
        """Return the follower ranks that the engine in this row has started."""
        return [rank for rank in range(_MAX_RANKS) if self.rank(row, rank).at]

    def stage(self, row: int, rank: int = 0) -> str:
        """Return the name of the long operation that runs; empty in normal operation."""
        text = self._text(row, rank)
        return bytes(text[1 : 1 + text[0]]).decode("utf-8", "replace")

    def last_step(self, row: int) -> LastStep | None:
        """Return the last step; None before the first one."""
        step = LastStep(*map(int, self._cells(row)[_STEP : _NANO_BATCHES + 1].tolist()))
        return step if step.number else None


class Heartbeat:
    """The row of a process, or the cells of a follower rank in its engine's row."""

    def __init__(self, cells: memoryview[float], text: memoryview[int]) -> None:
        self._cells, self._text = cells, text

    def __call__(self) -> None:
        """Record a pass of the main loop: no long operation runs."""
        cells = self._cells
        cells[_AT] = time.monotonic()
        cells[_ALLOWED] = 0.0
        self._text[0] = 0

    def still(self) -> None:
        """Record that the announced or awaited operation continues."""
        self._cells[_AT] = time.monotonic()

    def stage(self, text: str, seconds: float) -> None:
        """Announce a long operation or its progress. The next heartbeat may take up to `seconds`."""
        encoded = text.encode()[:_TEXT_BYTES]
        self._cells[_ALLOWED] = seconds
        self._cells[_AT] = time.monotonic()
        self._text[1 : 1 + len(encoded)] = encoded
        self._text[0] = len(encoded)

    def step(self, step: LastStep) -> None:
        """Record that the end of an iteration is awaited."""
        cells = self._cells
        cells[_STEP], cells[_REQUESTS], cells[_TOKENS], cells[_DECODES], cells[_NANO_BATCHES] = step
        cells[_AT] = time.monotonic()

    def condemn(self) -> None:
        """Record, in the daemon, that this process is about to be killed."""
        self._cells[_CONDEMNED] = 1.0

    def begin(self, stage: str, seconds: float, pid: int = 0) -> None:
        """Reset the row for a new process."""
        for cell in range(_PID, len(self._cells)):
            self._cells[cell] = 0.0
        self._cells[_PID] = pid
        self.stage(stage, seconds)

    @property
    def at(self) -> float:
        """Time of the last heartbeat; 0 before the first one."""
        return self._cells[_AT]

    @property
    def allowed(self) -> float:
        """Announced seconds before the next heartbeat; 0 if none were announced."""
        return self._cells[_ALLOWED]

    @property
    def condemned(self) -> bool:
        """Whether the daemon is about to kill the process; not for a follower rank."""
        return bool(self._cells[_CONDEMNED])

    @property
    def pid(self) -> int:
        """Process id; 0 before the first heartbeat."""
        return int(self._cells[_PID])


class Watch:
    """One watcher's view of all rows. Time during which the watcher was suspended does not count, so that no process
    looks hung after a machine or container was paused."""

    def __init__(self, heartbeats: Heartbeats, clock: Callable[[], float] = time.monotonic) -> None:
        self.heartbeats, self._clock = heartbeats, clock
        self._looked = self._awake_since = clock()

    def look(self) -> None:
        """Update the view. Call it about every second."""
        now = self._clock()
        if now - self._looked > NAP_SECONDS:
            self._awake_since = now
        self._looked = now

    def age(self, row: int) -> float:
        """Return the seconds since the last heartbeat; 0 before the first one."""
        at = self.heartbeats.of(row).at
        return max(0.0, self._clock() - at) if at else 0.0

    def rank_age(self, row: int, rank: int) -> float:
        """Return the seconds since the last heartbeat of a follower rank."""
        return max(0.0, self._clock() - self.heartbeats.rank(row, rank).at)

    def silent_rank(self, row: int, bound: float) -> tuple[int, float] | None:
        """Return a follower rank whose last heartbeat is older than `bound` seconds and than announced, with its age;
        None if there is none."""
        for rank in self.heartbeats.ranks(row):
            heartbeat = self.heartbeats.rank(row, rank)
            age = self._clock() - max(heartbeat.at, self._awake_since)
            if age > max(bound, heartbeat.allowed):
                return rank, age
        return None

    def late(self, row: int, bound: float) -> float | None:
        """Return the age of the last heartbeat if it is more than `bound` and than announced, else None. An engine is
        as late as its latest rank."""
        heartbeat = self.heartbeats.of(row)
        if not heartbeat.at:
            return None
        age = self._clock() - max(heartbeat.at, self._awake_since)
        if age > max(bound, heartbeat.allowed) or heartbeat.condemned:
            return age
        silent = self.silent_rank(row, bound)
        return None if silent is None else silent[1]
