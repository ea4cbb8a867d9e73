"""`Preparation`: a plan's pipelines made ready while the serial plan serves.

They are compiled elsewhere, then loaded and captured in slices between iterations, on the engine's own thread when it
calls `advance`: nothing else is launched meanwhile. Knows nothing of GPUs: a pipeline is `Work`, steps that a runner
gives it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from weft.engine.wire.messages import PlanStats

Step = Callable[[], None]
"""something short that cannot be cut"""
SLICE_SECONDS = 0.01
"""after which a slice begins no further step"""
BUSY_SHARE = 0.05
"""of the time that slices take while requests run: what a long step took is made up for by a longer pause"""
COMPILER_POLL_SECONDS = 0.1
"""between looks at what has been compiled, while nothing else is to be done"""


class Stage(Enum):
    COMPILING = "compiling"
    LOADING = "loading"
    CAPTURING = "capturing"
    SERVING = "serving"
    LEFT_OUT = "left out"

    @property
    def final(self) -> bool:
        return self in (Stage.SERVING, Stage.LEFT_OUT)


class Work(NamedTuple):
    """A pipeline to be made ready."""

    name: str
    load: Callable[[], Iterator[Step]]
    """its kernels, a step at a time"""
    capture: Callable[[], Iterator[Step]]
    enable: Step
    """iterations may use it from now on"""


class Compiling(Protocol):
    """Where the kernels come from: a `CompileJob`, or a cache that has them all."""

    def outcome(self, pipeline: int) -> str | None:
        """Empty once all kernels of that pipeline of the plan are there, else why they will not be; None: not known
        yet. Returns at once."""
        ...

    def stop(self) -> None: ...


class Compiled:
    """All kernels are there."""

    def outcome(self, _pipeline: int) -> str | None:
        return ""

    def stop(self) -> None: ...


class Preparation:
    """The pipelines of a plan, each in its stage. They are taken one after the other, as their kernels come.

    works: in the order of the plan; empty where all that there are serve already. serving: how many these are.
    """

    def __init__(
        self,
        works: Sequence[Work] = (),
        compiling: Compiling | None = None,
        *,
        serving: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._works, self._compiling, self._clock = works, compiling or Compiled(), clock
        self._served = serving
        self._begun = clock()
        self._not_before = 0.0
        """when requests run"""
        self._at = 0
        """the pipeline whose steps are taken"""
        self._steps: Iterator[Step] | None = None
        self.stages = [Stage.COMPILING for _ in works]
        self.reasons: dict[int, str] = {}
        """why a pipeline is left out"""
        if works:
            self._say(f"the serial plan serves; plan: 0 of {len(works)} pipelines")
        else:
            self.stop()

    @property
    def done(self) -> bool:
        """Every pipeline serves or is left out."""
        return all(stage.final for stage in self.stages)

    @property
    def stats(self) -> PlanStats:
        return PlanStats(
            pipelines=len(self._works) + self._served,
            serving=self.stages.count(Stage.SERVING) + self._served,
            left_out=self.stages.count(Stage.LEFT_OUT),
        )

    @property
    def pause(self) -> float | None:
        """Seconds that a caller without work may let pass before it calls `advance` again; None: any number."""
        if self.done:
            return None
        return COMPILER_POLL_SECONDS if self._steps is None and self._next() is None else 0.0

    def advance(self, *, busy: bool) -> bool:
        """A slice of the work that is left. Returns whether a pipeline has come to its end, whichever.

        busy: requests run; then slices keep to their share of the time. What a step raises leaves its pipeline out.
        """
        begin = self._clock()
        if self.done or (busy and begin < self._not_before):
            return False
        ended = sum(stage.final for stage in self.stages)
        while self._step() and self._clock() - begin < SLICE_SECONDS:
            pass
        now = self._clock()
        self._not_before = now + (now - begin) * (1 / BUSY_SHARE - 1)
        return sum(stage.final for stage in self.stages) > ended

    def stop(self) -> None:
        """No further step; nothing is compiled any more. Idempotent."""
        self._steps = None
        for i, stage in enumerate(self.stages):
            if not stage.final:
                self.stages[i] = Stage.LEFT_OUT
        self._compiling.stop()

    def _next(self) -> int | None:
        """The first pipeline whose compilation is over."""
        for i, stage in enumerate(self.stages):
            if stage is Stage.COMPILING and self._compiling.outcome(i) is not None:
                return i
        return None

    def _step(self) -> bool:
        """Whether there was anything to do."""
        if self._steps is None:
            if (at := self._next()) is None:
                return False
            self._at = at
            if why := self._compiling.outcome(at):
                self._leave_out(why)
                return True
            self._steps = self._of(at)
        try:
            if (step := next(self._steps, None)) is not None:
                step()
            else:
                self._enable()
        except Exception as error:  # torch's, Triton's or the driver's: the serial plan goes on
            self._leave_out(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return True

    def _of(self, at: int) -> Iterator[Step]:
        work = self._works[at]
        self.stages[at] = Stage.LOADING
        yield from work.load()
        self.stages[at] = Stage.CAPTURING
        yield from work.capture()

    def _enable(self) -> None:
        self._works[self._at].enable()
        self.stages[self._at] = Stage.SERVING
        self._ended(f"plan: {self.stats.serving} of {self.stats.pipelines} pipelines")

    def _leave_out(self, why: str) -> None:
        self.stages[self._at], self.reasons[self._at] = Stage.LEFT_OUT, why
        self._ended(f"plan: the pipeline {self._works[self._at].name} is left out, the serial plan serves there: {why}")

    def _ended(self, line: str) -> None:
        self._steps = None
        self._say(f"{line}, {self._clock() - self._begun:.1f} s after the engine was ready" if self.done else line)
        if self.done:
            self._compiling.stop()

    @staticmethod
    def _say(line: str) -> None:
        print(f"weft: {line}", file=sys.stderr, flush=True)
