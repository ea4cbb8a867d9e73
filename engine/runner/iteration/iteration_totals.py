"""`IterationTotals`: totals over an engine's iterations, and whether its device has had work since."""

from __future__ import annotations

from weft.engine.runner.iteration.batch import StepResult
from weft.engine.wire.messages import IterationStats


class IterationTotals:
    """Totals since the engine started."""

    def __init__(self) -> None:
        self.iterations = 0
        self.pipelined = 0  # Iterations with several nano-batches.
        self.idle_seconds = 0.0
        self.last = IterationStats()
        self.busy = False  # Requests have been open ever since the device last worked.
        self._first_step = 0
        """First step of the current busy period. The gap before it had no work and is not idle time."""

    def launched(self, step: int) -> bool:
        """Note a launch. Returns whether it begins a busy period."""
        if self.busy:
            return False
        self._first_step, self.busy = step, True
        return True

    def is_first(self, step: int) -> bool:
        return step == self._first_step

    def committed(self, result: StepResult, schedule_seconds: float, *, busy: bool) -> None:
        """Add a result. busy: more work remains."""
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
