"""`Heartbeats`: the signs of life of a daemon's processes, in memory that all of them share; `Watch` judges them.

A process writes its own row from the loop that does its work, never from a thread beside it, which would go on while
the loop hangs. Times are of the monotonic clock, which all processes of a machine read alike. Nothing is sent: a heartbeat
is seen however full a socket is, and without the daemon.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

ENGINE = 0
"""the first engine's row; those of the others follow, then those of the API processes"""

HEARTBEAT_SECONDS = 1.0
"""between two heartbeats of a loop that has nothing to do, at most"""
LATE_SECONDS = 5.0
"""without a heartbeat: from then on probes are told"""
NAP_SECONDS = 3.0
"""a watcher that has not looked for so long was asleep itself, and maybe everything else with it"""

_MAX_RANKS = 8
_RANKS_AT, _RANK_CELLS = 16, 3
_CELLS = _RANKS_AT + _MAX_RANKS * _RANK_CELLS
_TEXT_AT = 8 * _CELLS
_TEXT_BYTES = 127
_TEXT = 1 + _TEXT_BYTES
_ROW = _TEXT_AT + _MAX_RANKS * _TEXT
_AT, _ALLOWED, _PID, _STEP, _REQUESTS, _TOKENS, _DECODES, _NANO_BATCHES, _GIVEN_UP = range(9)
_STEP_TIMEOUT, _START_TIMEOUT = range(2)


class LastStep(NamedTuple):
    """The iteration that the engine waited for last."""

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
    """Anonymous shared memory: a row a process, and the bounds that the daemon gives."""

    def __init__(
        self, rows: int = 1, fd: int | None = None, *, step_timeout: float = 600.0, start_timeout: float = 600.0
    ) -> None:
        """`fd`: of heartbeats made by another process; its bounds hold, and it has so many rows at least."""
        self.rows = rows
        self.fd = os.memfd_create("weft-heartbeats") if fd is None else fd
        size = (rows + 1) * _ROW
        if fd is None:
            os.ftruncate(self.fd, size)
        self._map = memoryview(mmap.mmap(self.fd, size))
        self._bounds = self._map[:_TEXT_AT].cast("d")
        if fd is None:
            self._bounds[_STEP_TIMEOUT], self._bounds[_START_TIMEOUT] = step_timeout, start_timeout

    def _cells(self, row: int) -> memoryview[float]:
        return self._map[(row + 1) * _ROW : (row + 1) * _ROW + _TEXT_AT].cast("d")

    def _text(self, row: int, rank: int = 0) -> memoryview[int]:
        begin = (row + 1) * _ROW + _TEXT_AT + rank * _TEXT
        return self._map[begin : begin + _TEXT]

    @property
    def step_timeout(self) -> float:
        """seconds that an iteration may take where its end can be waited for in parts"""
        return self._bounds[_STEP_TIMEOUT]

    @property
    def start_timeout(self) -> float:
        """seconds that a stage of a start may take without progress"""
        return self._bounds[_START_TIMEOUT]

    def of(self, row: int) -> Heartbeat:
        """For the process that the row belongs to, or the daemon before that one runs."""
        return Heartbeat(self._cells(row), self._text(row))

    def rank(self, row: int, rank: int) -> Heartbeat:
        """Of a rank of the engine in this row, but the first, whose heartbeats are the engine's."""
        begin = _RANKS_AT + rank * _RANK_CELLS
        return Heartbeat(self._cells(row)[begin : begin + _RANK_CELLS], self._text(row, rank))

    def ranks(self, row: int) -> list[int]:
        """The ranks beside the first that the engine in this row has started."""
        return [rank for rank in range(_MAX_RANKS) if self.rank(row, rank).at]

    def at(self, row: int) -> float:
        """When the last heartbeat was; 0 before the first one."""
        return self._cells(row)[_AT]

    def allowed(self, row: int) -> float:
        """Seconds that may pass before the next one, as announced; 0 when nothing was."""
        return self._cells(row)[_ALLOWED]

    def pid(self, row: int) -> int:
        """Of the process that wrote the row last; 0 before the first heartbeat."""
        return int(self._cells(row)[_PID])

    def given_up(self, row: int) -> bool:
        """The daemon is about to end the process."""
        return bool(self._cells(row)[_GIVEN_UP])

    def stage(self, row: int, rank: int = 0) -> str:
        """The long work under way, in words; empty while the process does its usual work."""
        text = self._text(row, rank)
        return bytes(text[1 : 1 + text[0]]).decode("utf-8", "replace")

    def last_step(self, row: int) -> LastStep | None:
        """None before the first one."""
        step = LastStep(*map(int, self._cells(row)[_STEP : _NANO_BATCHES + 1].tolist()))
        return step if step.number else None


class Heartbeat:
    """A process's own row, or a rank's part of its engine's row: the first cells alone."""

    def __init__(self, cells: memoryview[float], text: memoryview[int]) -> None:
        self._cells = cells
        self._text = text

    def __call__(self) -> None:
        """The loop goes round: nothing long is under way."""
        cells = self._cells
        cells[_AT] = time.monotonic()
        cells[_ALLOWED] = 0.0
        self._text[0] = 0

    def still(self) -> None:
        """What was announced, or what is waited for, goes on."""
        self._cells[_AT] = time.monotonic()

    def stage(self, text: str, seconds: float) -> None:
        """Something long begins, or has come a step further: the next heartbeat may be so many seconds away."""
        encoded = text.encode()[:_TEXT_BYTES]
        self._cells[_ALLOWED] = seconds
        self._cells[_AT] = time.monotonic()
        self._text[1 : 1 + len(encoded)] = encoded
        self._text[0] = len(encoded)

    def step(self, step: LastStep) -> None:
        """An iteration's end is waited for from now on."""
        cells = self._cells
        cells[_STEP], cells[_REQUESTS], cells[_TOKENS], cells[_DECODES], cells[_NANO_BATCHES] = step
        cells[_AT] = time.monotonic()

    def give_up(self) -> None:
        """By the daemon: this process is about to be ended, whatever it still shows."""
        self._cells[_GIVEN_UP] = 1.0

    def begin(self, stage: str, seconds: float, pid: int = 0) -> None:
        """A new process: its row is its predecessor's no more."""
        for cell in range(_PID, len(self._cells)):
            self._cells[cell] = 0.0
        self._cells[_PID] = pid
        self.stage(stage, seconds)

    @property
    def at(self) -> float:
        return self._cells[_AT]

    @property
    def allowed(self) -> float:
        return self._cells[_ALLOWED]

    @property
    def pid(self) -> int:
        return int(self._cells[_PID])


class Watch:
    """One watcher's view of all rows. What it slept through counts for nobody: a machine that was suspended, or a
    container that was paused, has no hung processes."""

    def __init__(self, heartbeats: Heartbeats, clock: Callable[[], float] = time.monotonic) -> None:
        self.heartbeats = heartbeats
        self._clock = clock
        self._looked = self._awake_since = clock()

    def look(self) -> None:
        """To be called about every second."""
        now = self._clock()
        if now - self._looked > NAP_SECONDS:
            self._awake_since = now
        self._looked = now

    def age(self, row: int) -> float:
        """Seconds since the last heartbeat; 0 before the first one."""
        at = self.heartbeats.at(row)
        return max(0.0, self._clock() - at) if at else 0.0

    def rank_age(self, row: int, rank: int) -> float:
        """Seconds since the last heartbeat of another rank of the engine in this row."""
        return max(0.0, self._clock() - self.heartbeats.rank(row, rank).at)

    def silent_rank(self, row: int, bound: float) -> tuple[int, float] | None:
        """A rank of the engine in this row, but the first, whose last heartbeat is more than `bound` seconds away, and more
        than it announced, and how many they are.
        """
        for rank in self.heartbeats.ranks(row):
            heartbeat = self.heartbeats.rank(row, rank)
            age = self._clock() - max(heartbeat.at, self._awake_since)
            if age > max(bound, heartbeat.allowed):
                return rank, age
        return None

    def late(self, row: int, bound: float) -> float | None:
        """Seconds since the last heartbeat if they are more than `bound` and more than was announced, else None.

        An engine is as late as the latest of its ranks.
        """
        if not (at := self.heartbeats.at(row)):
            return None
        age = self._clock() - max(at, self._awake_since)
        if age > max(bound, self.heartbeats.allowed(row)) or self.heartbeats.given_up(row):
            return age
        silent = self.silent_rank(row, bound)
        return None if silent is None else silent[1]
