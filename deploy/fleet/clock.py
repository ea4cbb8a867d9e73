"""`Clock`: virtual time; `Processor`: who computes beside whom, and so how fast."""

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
    """Numbers from 0 up to 1 that cover it evenly, however few are taken: a short simulation has a long one's means."""
    return ((start + i * GOLDEN) % 1.0 for i in count())


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


class Slowdown(NamedTuple):
    """How many times as long a job takes beside others, by the number of all that compute.

    `known`: from one, in the mean; beyond it, and where nothing is known, `cores` are shared in equal parts, a core at
    most each thread of a job. `spread`: by the same number, how many times the mean it is for jobs of equal shares,
    from the luckiest on: which core's queue a thread stands in.
    """

    cores: float
    threads: int = 1
    known: tuple[float, ...] = ()
    spread: tuple[tuple[float, ...], ...] = ()

    def of(self, jobs: int, luck: float | None = None) -> float:
        """luck: of a job, from 0 up to 1, where all are equally likely; the most is the worst. None: the mean."""
        if not self.known:
            return self._equal(jobs)
        seen = min(max(jobs, 1), len(self.known))
        slower = self.known[seen - 1]
        if self.spread and luck is not None:
            shares = self.spread[seen - 1]
            slower *= shares[int(luck * len(shares))]
        return slower if jobs <= seen else slower * self._equal(jobs) / self._equal(seen)

    def _equal(self, jobs: int) -> float:
        return max(1.0, jobs * self.threads / self.cores)


@dataclass(slots=True, eq=False)
class _Job:
    left: float
    """seconds, were it alone"""
    slowdown: Slowdown
    luck: float | None
    counts: bool
    done: Action


class Sharing(NamedTuple):
    """What slows jobs of a processor: iterations that only decode, and all that prompts wait for."""

    decodes: Slowdown
    prompts: Slowdown


class Processor:
    """Cores that jobs share; without `sharing` each job has its own, as a GPU is each engine's."""

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
        """A job that takes so long alone. counts: it slows the others; else they alone slow it. spreads: it may be
        slowed more, or less, than the mean; of those that do not, none overtakes another."""
        if self._sharing is None:
            self._clock.after(seconds, done)
            return
        self._advance()
        slowdown = self._sharing.prompts if prompt else self._sharing.decodes
        self._jobs.append(_Job(seconds, slowdown, next(self._lucks[prompt]) if spreads else None, counts, done))
        self._expect()

    @property
    def _computing(self) -> int:
        return sum(job.counts for job in self._jobs)

    def _advance(self) -> None:
        """Take off what was computed since the last look."""
        passed, computing = self._clock.now - self._since, self._computing
        for job in self._jobs:
            job.left -= passed / job.slowdown.of(computing, job.luck)
        self._since = self._clock.now

    def _expect(self) -> None:
        """Look again when the next one ends, if nothing changes until then."""
        self._version += 1
        if not self._jobs:
            return
        version, computing = self._version, self._computing
        ends = [max(0.0, job.left) * job.slowdown.of(computing, job.luck) for job in self._jobs]
        first = self._jobs[ends.index(min(ends))]

        def look() -> None:
            if version != self._version:
                return
            self._advance()
            self._jobs.remove(first)
            self._expect()
            first.done()

        self._clock.after(min(ends), look)
