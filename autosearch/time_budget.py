"""`TimeBudget`: the time for a search, its progress, and its early end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Receives the current step and, if known, the completed fraction of the search."""

    def __call__(self, text: str, share: float | None = None, /) -> None: ...


class TimeBudget:
    """The clock starts at creation. `stop_requested()` is true once the user wants the best result so far."""

    def __init__(
        self, seconds: float, progress: Progress = lambda *_: None, stop_requested: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.seconds, self._progress, self.stop_requested, self.clock = seconds, progress, stop_requested, clock
        self._begun = clock()
        self._done = 0.0

    @property
    def end(self) -> float:
        """Time on `clock` at which the budget ends."""
        return self._begun + self.seconds

    @property
    def spent(self) -> float:
        """Elapsed seconds."""
        return self.clock() - self._begun

    @property
    def left(self) -> float:
        """Remaining seconds; 0 once a stop is requested."""
        return 0.0 if self.stop_requested() else max(0.0, self.end - self.clock())

    def exclude(self, seconds: float) -> None:
        """Do not count these elapsed seconds."""
        self._begun += seconds

    def report(self, text: str, done: float = 0.0) -> None:
        """Report progress. done: lower bound of the completed fraction; the elapsed fraction counts if it is larger."""
        self._done = max(self._done, done, min(1.0, self.spent / max(1e-9, self.seconds)))
        self._progress(text, self._done)

    def sub_budget(self, done: float = 0.0) -> TimeBudget:
        """Return a budget of the remaining time. done: lower bound of the completed fraction."""
        first = min(1.0, max(done, self.spent / self.seconds))

        def progress(text: str, share: float | None = None) -> None:
            self._progress(text, None if share is None else first + (1 - first) * share)

        return TimeBudget(self.end - self.clock(), progress, self.stop_requested, self.clock)
