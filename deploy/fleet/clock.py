"""Defines `Clock` (virtual time) and `Processor` (jobs that share cores and slow each other down)."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

Action = Callable[[], None]
GOLDEN = (5**0.5 - 1) / 2


def evenly(start: float) -> Iterator[float]:
    """Yield numbers in [0, 1), evenly spread after any count, so short simulations keep the means of long ones."""
    return ((start + i * GOLDEN) % 1.0 for i in count())


class Clock:
    """Counts seconds of a simulation. Actions due at the same time run in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when: float, action: Action) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, on_progress: Callable[[float], None] | None = None, every: int = 2000) -> None:
        """Run until nothing is due. `on_progress` gets the time after every `every` actions."""
        done = 0
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
            done += 1
            if on_progress is not None and not done % every:
                on_progress(self.now)


class Slowdown(NamedTuple):
    """Slowdown factors of a job by the number of computing jobs.

    `known`: mean factors for 1, 2, … jobs. Beyond these, jobs share `cores` equally, with at most one core per thread.
    `spread`: for the same numbers, factors relative to the mean of equally likely groups of jobs, ascending: threads
    wait in different cores' queues."""

    cores: float
    threads: int = 1
    known: tuple[float, ...] = ()
    spread: tuple[tuple[float, ...], ...] = ()

    def of(self, jobs: int, luck: float | None = None) -> float:
        """Return the factor. luck: uniform in [0, 1), larger is slower; None: the mean."""
        if not self.known:
            return self._equal(jobs)
        measured = min(max(jobs, 1), len(self.known))
        slower = self.known[measured - 1]
        if self.spread and luck is not None:
            shares = self.spread[measured - 1]
            slower *= shares[int(luck * len(shares))]
        return slower if jobs <= measured else slower * self._equal(jobs) / self._equal(measured)

    def _equal(self, jobs: int) -> float:
        return max(1.0, jobs * self.threads / self.cores)


@dataclass(slots=True, eq=False)
class _Job:
    left: float  # Remaining seconds without other jobs.
    slowdown: Slowdown
    luck: float | None
    counts: bool
    done: Action


class Sharing(NamedTuple):
    """Slowdowns of decode-only iterations, and of everything that prompts wait for."""

    decodes: Slowdown
    prompts: Slowdown


class Processor:
    """Cores shared by jobs. Without `sharing`, each job has a separate device, such as an engine's GPU."""

    def __init__(self, clock: Clock, sharing: Sharing | None = None, seed: int = 0) -> None:
        self._clock = clock
        self._sharing = sharing
        lucks = random.Random(seed)
        self._lucks = {prompt: evenly(lucks.random()) for prompt in (False, True)}
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._version = 0

    def start(
        self, seconds: float, done: Action, *, prompt: bool = False, counts: bool = True, spreads: bool = False
    ) -> None:
        """Start a job that takes `seconds` without others. counts: it slows other jobs down, and not only itself.
        spreads: its slowdown varies around the mean; jobs without it never overtake each other."""
        if self._sharing is None:
            self._clock.after(seconds, done)
            return
        self._advance()
        slowdown = self._sharing.prompts if prompt else self._sharing.decodes
        self._jobs.append(_Job(seconds, slowdown, next(self._lucks[prompt]) if spreads else None, counts, done))
        self._schedule_end()

    @property
    def _computing(self) -> int:
        return sum(job.counts for job in self._jobs)

    def _advance(self) -> None:
        """Subtract the work done since the last update."""
        passed, computing = self._clock.now - self._since, self._computing
        for job in self._jobs:
            job.left -= passed / job.slowdown.of(computing, job.luck)
        self._since = self._clock.now

    def _schedule_end(self) -> None:
        """Schedule the end of the next job, unless the jobs change before then."""
        self._version += 1
        if not self._jobs:
            return
        version, computing = self._version, self._computing
        ends = [max(0.0, job.left) * job.slowdown.of(computing, job.luck) for job in self._jobs]
        first = self._jobs[ends.index(min(ends))]

        def end() -> None:
            if version != self._version:
                return
            self._advance()
            self._jobs.remove(first)
            self._schedule_end()
            first.done()

        self._clock.after(min(ends), end)
