"""`IterationTotals`: what an engine's iterations come to, and since when its device has had work."""

from __future__ import annotations

from weft.engine.runner.iteration.batch import StepResult
from weft.engine.wire.messages import IterationStats


class IterationTotals:
    """Since the engine's start."""

    def __init__(self) -> None:
        self.iterations = 0
        self.pipelined = 0
        """of them, of several nano-batches"""
        self.idle_seconds = 0.0
        self.last = IterationStats()
        self.busy = False
        """requests have been open ever since the device last worked"""
        self._first_step = 0
        """the first one of that time: the device did not idle before it, it had nothing to do"""

    def launched(self, step: int) -> bool:
        """Whether this is the first one of such a time."""
        if self.busy:
            return False
        self._first_step, self.busy = step, True
        return True

    def is_first(self, step: int) -> bool:
        return step == self._first_step

    def committed(self, result: StepResult, schedule_seconds: float, *, busy: bool) -> None:
        """busy: there is more to do."""
        self.iterations += 1
        self.pipelined += result.nano_batches > 1
        self.busy = busy
        if not self.is_first(result.batch.step):
            self.idle_seconds += result.idle_seconds
        self.last = IterationStats(
            tokens=result.batch.num_tokens,
            requests=result.batch.num_requests,
            seconds=result.seconds,
            idle_seconds=result.idle_seconds,
            schedule_seconds=schedule_seconds,
        )
