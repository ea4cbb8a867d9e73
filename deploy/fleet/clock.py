"""`Clock`: virtual time; `Processor`: who computes beside whom, and so how fast."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Seconds since the beginning of a simulation. Actions of one instant happen in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when: float, action: Action) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, on_progress: Callable[[float], None] | None = None, every: int = 2000) -> None:
        """Until nothing is due. `on_progress` is told the time now and then."""
        done = 0
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
            done += 1
            if on_progress is not None and not done % every:
                on_progress(self.now)


class Processor:
    """`cores` that all its jobs share in equal parts, a core at most each thread of a job.

    None: as many as there are jobs, as GPUs are each engine's own.
    """

    def __init__(self, clock: Clock, cores: float | None = None, threads: int = 1) -> None:
        """threads: of each job."""
        self._clock = clock
        self._cores = cores
        self._threads = max(1, threads)
        self._jobs: dict[int, tuple[float, Action]] = {}
        """seconds left of each, as of `_since`, were it alone"""
        self._since = 0.0
        self._numbers = count()
        self._version = 0

    def start(self, seconds: float, done: Action) -> None:
        """A job that takes so long alone."""
        if self._cores is None:
            self._clock.after(seconds, done)
            return
        self._advance()
        self._jobs[next(self._numbers)] = (seconds, done)
        self._expect()

    @property
    def _speed(self) -> float:
        assert self._cores is not None
        return min(1.0, self._cores / (len(self._jobs) * self._threads))

    def _advance(self) -> None:
        """Take off what was computed since the last look."""
        if self._jobs:
            worked = (self._clock.now - self._since) * self._speed
            self._jobs = {i: (left - worked, done) for i, (left, done) in self._jobs.items()}
        self._since = self._clock.now

    def _expect(self) -> None:
        """Look again when the next one ends, if nothing changes until then."""
        self._version += 1
        if not self._jobs:
            return
        version, first = self._version, min(self._jobs, key=lambda i: (self._jobs[i][0], i))

        def look() -> None:
            if version != self._version:
                return
            self._advance()
            _, done = self._jobs.pop(first)
            self._expect()
            done()

        self._clock.after(max(0.0, self._jobs[first][0]) / self._speed, look)
