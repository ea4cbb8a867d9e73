"""`Runner`: the engine's interface to a device, implemented for CPUs and CUDA GPUs."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Protocol

from weft.engine.memory.transfer import CopyEngine
from weft.engine.model.adapter import Adapter
from weft.engine.runner.device.preparation import Preparation
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.runner.memory.sleep import SleepableMemory, Sleepless


class InFlight(Protocol):
    """A launched iteration. `wait()` returns its result or raises its error."""

    @property
    def batch(self) -> Batch: ...

    @property
    def nano_batches(self) -> int:
        """Nano-batches of its pipeline; 1 for the serial plan."""
        ...

    def ends_within(self, seconds: float, /) -> bool:
        """Wait at most that long. Returns True if the iteration has ended, or if the device supports only `wait()`."""
        ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Owns a device's weights, KV pool and per-slot arrays, and runs batches in launch order."""

    @property
    def num_pages(self) -> int: ...

    @property
    def preparation(self) -> Preparation:
        """Preparation of pipelines between iterations."""
        ...

    @property
    def sleepable(self) -> SleepableMemory | Sleepless:
        """Memory that can be released while the model sleeps."""
        ...

    @property
    def adapters(self) -> MutableMapping[int, Adapter] | None:
        """LoRA adapters by number, to be changed between iterations; None if the runner supports none."""
        ...

    def stage_adapter(self, adapter: Adapter, path: Path, digest: str, /) -> Adapter:
        """Return an adapter as `adapters` takes it. Another thread may call it, so that iterations do not wait for it.

        path, digest: its directory and content, which other ranks read. Raises `WeftError`."""
        ...

    def copy_engine(self, slots: int) -> CopyEngine:
        """Return an engine that copies pages between the KV pool and a new host pool. Raises `OutOfMemory`."""
        ...

    def launch(self, batch: Batch) -> InFlight:
        """Start an iteration without waiting for it."""
        ...

    def close(self) -> None: ...
