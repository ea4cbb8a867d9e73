"""`Budget`: the time of a search. Who is told how much is behind it, and who ends it early."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Told what is done now, and the share of the whole that is behind it where that is known."""

    def __call__(self, text: str, share: float | None = None, /) -> None: ...


class Budget:
    """It begins when it is made. `ended`: somebody wants the best that there is by now."""

    def __init__(
        self, seconds: float, progress: Progress = lambda *_: None, ended: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.seconds, self._progress, self.ended, self.clock = seconds, progress, ended, clock
        self._begun = clock()
        self._behind = 0.0

    @property
    def end(self) -> float:
        """On `clock`."""
        return self._begun + self.seconds

    @property
    def spent(self) -> float:
        """Seconds."""
        return self.clock() - self._begun

    @property
    def left(self) -> float:
        """Seconds; none once it has ended."""
        return 0.0 if self.ended() else max(0.0, self.end - self.clock())

    def leave_out(self, seconds: float) -> None:
        """So many seconds that have passed were not of this budget."""
        self._begun += seconds

    def tell(self, text: str, done: float = 0.0) -> None:
        """done: share of the whole that is behind it; more is where more of the time is."""
        self._behind = max(self._behind, done, min(1.0, self.spent / max(1e-9, self.seconds)))
        self._progress(text, self._behind)

    def rest(self, done: float = 0.0) -> Budget:
        """What is left, as a budget of its own. done: share of the whole that is behind it, at least."""
        first = min(1.0, max(done, self.spent / self.seconds))

        def progress(text: str, share: float | None = None) -> None:
            self._progress(text, None if share is None else first + (1 - first) * share)

        return Budget(self.end - self.clock(), progress, self.ended, self.clock)
