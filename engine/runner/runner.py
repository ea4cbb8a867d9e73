"""`Runner`: what the engine asks of a device. One implementation for CPUs, one for CUDA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from weft.engine.memory.transfer import Gate
from weft.engine.runner.batch import Batch, StepResult


class InFlight(Protocol):
    """An iteration that was launched. `wait()` gives its result, or raises what went wrong."""

    @property
    def batch(self) -> Batch: ...

    def wait(self) -> StepResult: ...


class Runner(Protocol):
    """Owns a device's weights, KV pool and resident arrays; runs batches in the order of launch."""

    @property
    def num_pages(self) -> int: ...

    @property
    def kv(self) -> Tensor:
        """`[pages, layers, 2, page_size, Hkv, D]`"""
        ...

    @property
    def copy_gates(self) -> Sequence[Gate]:
        """Where, in order, copies to the host have their place in the iteration launched last; open if it has none."""
        ...

    def launch(self, batch: Batch) -> InFlight:
        """Start an iteration and return at once."""
        ...

    def close(self) -> None: ...
