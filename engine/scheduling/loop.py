"""`Loop`: schedules, launches and commits iterations, with some launched ahead, and notifies listeners.

It does not wait: `Engine` waits for the device, the fleet simulator for its virtual clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.runner.iteration.iteration_totals import IterationTotals
from weft.engine.scheduling.events import Events
from weft.engine.scheduling.listeners import Listeners
from weft.engine.scheduling.scheduler import Scheduler

Launched = TypeVar("Launched", covariant=True)  # the runner's handle of an iteration in flight


class Launcher(Protocol[Launched]):
    """The method of a runner that the loop uses."""

    def launch(self, batch: Batch, /) -> Launched: ...


class Loop(Generic[Launched]):
    """One pass is `launch`, `due`, wait for the iteration that is due, `commit`."""

    def __init__(
        self, scheduler: Scheduler, runner: Launcher[Launched], listeners: Listeners, *, depth: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`depth` is the number of iterations launched ahead of the one that runs."""
        self.scheduler, self.listeners, self.depth = scheduler, listeners, depth
        self.totals = IterationTotals()
        self.in_flight: deque[Launched] = deque()
        self._runner, self._clock = runner, clock
        self._step = 0
        self._host_seconds = 0.0

    def launch(self) -> Batch | None:
        """Schedule and launch the next iteration. Returns None if nothing can run now."""
        begin, listeners = self._clock(), self.listeners
        for on_schedule in listeners.on_schedule:
            on_schedule()
        batch = self.scheduler.schedule(self._step + 1)
        if batch is None:
            self._host_seconds = self._clock() - begin
            return None
        self._step += 1
        if self.totals.launched(self._step):
            for on_busy in listeners.on_busy:
                on_busy(self._step, self._clock())
        self.in_flight.append(self._runner.launch(batch))
        self._host_seconds = self._clock() - begin
        for on_launch in listeners.on_launch:
            on_launch(batch, self._host_seconds)
        return batch

    def due(self, launched: Batch | None) -> Launched | None:
        """Take the iteration to wait for, given what `launch` returned. None means that nothing is in flight, or that
        another iteration should be launched first."""
        if not self.in_flight or (launched is not None and len(self.in_flight) <= self.depth):
            return None
        return self.in_flight.popleft()

    def commit(self, result: StepResult) -> Events:
        """Commit an iteration that has ended and return its events."""
        begin = self._clock()
        for on_result in self.listeners.on_result:
            on_result(result, begin)
        events = self.scheduler.commit(result)
        busy = self.scheduler.num_requests > 0 or bool(self.in_flight)
        for on_commit in self.listeners.on_commit:
            on_commit(busy)
        self.totals.committed(result, self._host_seconds + self._clock() - begin, busy=busy)
        return events
