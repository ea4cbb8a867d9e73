"""`Runner`: what the engine asks of a device. One implementation for CPUs, one for CUDA GPUs."""

from __future__ import annotations

from typing import Protocol

from weft.engine.memory.transfer import CopyEngine
from weft.engine.runner.device.preparation import Preparation
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.runner.memory.sleep import SleepableMemory


class InFlight(Protocol):
    """An iteration that was launched. `wait()` gives its result, or raises what went wrong."""

    @property
    def batch(self) -> Batch: ...

    @property
    def nano_batches(self) -> int:
        """of the pipeline that runs it; 1 for the serial plan"""
        ...

    def ends_within(self, seconds: float, /) -> bool:
        """Wait so long for its end at most. True when it has ended, and on a device that can only be waited for to
        the end: then `wait()` does."""
        ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Owns a device's weights, KV pool and resident arrays; runs batches in the order of launch."""

    @property
    def num_pages(self) -> int: ...

    @property
    def preparation(self) -> Preparation | None:
        """What goes on beside iterations until all its pipelines are there; None where it has none."""
        ...

    @property
    def sleepable(self) -> SleepableMemory | None:
        """What gives its memory back while the model sleeps; None where it was not asked to be able to."""
        ...

    def copy_engine(self, slots: int) -> CopyEngine:
        """What moves pages between its pool and a new host pool of so many slots. Raises `OutOfMemory`."""
        ...

    def launch(self, batch: Batch) -> InFlight:
        """Start an iteration and return at once."""
        ...

    def close(self) -> None: ...
