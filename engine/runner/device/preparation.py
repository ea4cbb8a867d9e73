"""`Preparation`: makes a plan's pipelines ready while the serial plan serves.

Another process compiles them. The engine's thread then loads and captures them in slices between iterations, when it
calls `advance`. A runner provides the steps of each pipeline as `PipelineWork`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from weft.engine.progress import notice
from weft.engine.wire.messages import PlanStats

Step = Callable[[], None]  # A short indivisible piece of work.
SLICE_SECONDS = 0.01  # Time after which a slice starts no further step.
BUSY_SHARE = 0.05  # Share of time for slices while requests run. A longer pause follows a longer step.
COMPILER_POLL_SECONDS = 0.1  # Seconds between polls of the compiler if there is nothing else to do.


class Stage(Enum):
    COMPILING = "compiling"
    LOADING = "loading"
    CAPTURING = "capturing"
    SERVING = "serving"
    LEFT_OUT = "left out"

    @property
    def final(self) -> bool:
        return self in (Stage.SERVING, Stage.LEFT_OUT)


class PipelineWork(NamedTuple):
    """The steps that make a pipeline ready."""

    name: str
    load: Callable[[], Iterator[Step]]  # Loads its kernels.
    capture: Callable[[], Iterator[Step]]
    enable: Step  # Lets iterations use it.


class Compiling(Protocol):
    """Provides kernels: a `CompileJob`, or a complete cache."""

    def outcome(self, pipeline: int) -> str | None:
        """See `CompileJob.outcome`."""
        ...

    def stop(self) -> None: ...


class Compiled:
    """A cache that has all kernels."""

    def outcome(self, _pipeline: int) -> str | None:
        return ""

    def stop(self) -> None: ...


class Preparation:
    """The pipelines of a plan and their stages. They are prepared one at a time, as their kernels become available.

    works: pipelines to prepare, in the order of the plan. serving: number of pipelines that serve already."""

    def __init__(
        self, works: Sequence[PipelineWork] = (), compiling: Compiling | None = None, *, serving: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._works, self._compiling, self._clock = works, compiling or Compiled(), clock
        self._served = serving
        self._begun = clock()
        self._not_before = 0.0  # Earliest time of the next slice while requests run.
        self._at = 0  # The pipeline in preparation.
        self._steps: Iterator[Step] | None = None
        self.stages = [Stage.COMPILING for _ in works]
        self.reasons: dict[int, str] = {}  # Why a pipeline is left out.
        if works:
            notice(f"the serial plan serves; plan: 0 of {len(works)} pipelines")
        else:
            self.stop()

    @property
    def done(self) -> bool:
        """Whether every pipeline serves or is left out."""
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
        """Seconds until an idle caller should call `advance` again; None: no need to."""
        if self.done:
            return None
        return COMPILER_POLL_SECONDS if self._steps is None and self._next() is None else 0.0

    def advance(self, *, busy: bool) -> bool:
        """Run a slice of the remaining work. Returns whether a pipeline now serves or was left out.

        busy: requests run, so slices keep to their share of the time. A step that raises leaves its pipeline out."""
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
        """End preparation and compilation. Idempotent."""
        self._steps = None
        for i, stage in enumerate(self.stages):
            if not stage.final:
                self.stages[i] = Stage.LEFT_OUT
        self._compiling.stop()

    def _next(self) -> int | None:
        """Return the first pipeline that is compiled."""
        for i, stage in enumerate(self.stages):
            if stage is Stage.COMPILING and self._compiling.outcome(i) is not None:
                return i
        return None

    def _step(self) -> bool:
        """Run one step. Returns whether there was one."""
        if self._steps is None:
            if (at := self._next()) is None:
                return False
            self._at = at
            if why := self._compiling.outcome(at):
                self._leave_out(why)
                return True
            self._steps = self._steps_of(at)
        try:
            if (step := next(self._steps, None)) is not None:
                step()
            else:
                self._enable()
        except Exception as error:  # of torch, Triton or the driver; the serial plan keeps serving
            self._leave_out(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return True

    def _steps_of(self, at: int) -> Iterator[Step]:
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
        self._ended(
            f"plan: the pipeline {self._works[self._at].name} is left out and the serial plan serves instead: {why}"
        )

    def _ended(self, line: str) -> None:
        self._steps = None
        notice(f"{line}, {self._clock() - self._begun:.1f} s after the engine was ready" if self.done else line)
        if self.done:
            self._compiling.stop()
