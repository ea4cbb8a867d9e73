"""`Bench`: what the search asks of a machine. A GPU implements it, and so does a synthetic machine in the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.runner.iteration.nano import decode_counts
from weft.kernels.tuning.measure import Sustained


class Load(NamedTuple):
    """The iteration that is measured: a dense batch in the steady state of a workload."""

    tokens: int
    """the dense batch: decodes, then prefill tokens"""
    decodes: int
    """requests that decode one token each"""
    context: int
    """mean KV tokens that a decode reads"""
    prompt: int
    """mean prompt length: a prefill token attends to half of it on average"""

    @property
    def kv_tokens(self) -> int:
        """KV tokens of all decodes together: the work of decode attention."""
        return self.decodes * self.context

    @property
    def prefill_tokens(self) -> int:
        return max(0, self.tokens - self.decodes)

    def within(self, capacity: int | None) -> Load:
        """The load with no more decodes than there is room for; prefill takes the tokens that they leave.

        capacity: tokens of KV that the device holds; None: not known.
        """
        return self if capacity is None else self._replace(decodes=min(self.decodes, capacity // self.context))

    def assigned(self, ranges: Sequence[tuple[int, int]]) -> tuple[Load, ...]:
        """The loads of the nano-batches `[begin, end)`, as the engine assigns tokens (`engine/runner/iteration/nano.py`)."""
        room = [max(0, min(end, self.tokens) - begin) for begin, end in ranges]
        counts = decode_counts(min(self.decodes, sum(room)), room)
        return tuple(self._replace(tokens=r, decodes=d) for r, d in zip(room, counts, strict=True))


Timing = Sustained
"""ms, watts and mhz of the same work for a while, at the clock and power that are then left"""


class PeriodBench(Protocol):
    """The part of a `Bench` that pipelines are compared on."""

    num_sms: int

    def period(self, period: Period, load: Load) -> Timing:
        """The pipeline over a few layers: milliseconds and joules of one layer."""
        ...


class Bench(PeriodBench, Protocol):
    """Sustained timings on one accelerator. `load` is always that of the whole dense batch, `op` a part of it."""

    memory: int
    """bytes of its memory; 0: not known"""
    seconds: float
    """how long a measurement runs"""

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        """One nano-operation repeated on `op.sms` SMs: time, watts and clock of one."""
        ...

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        """Each repeated on its own lane, both busy all the time: the time of each; watts are the card's."""
        ...


@runtime_checkable
class SumsBench(Bench, Protocol):
    """A bench of ranks that can switch how their partial sums are added: those of `weft bench ranks`."""

    def sums(self, way: str) -> None:
        """Use `way` from now on. Every rank calls this at once. Raises `ConfigError` if this bench cannot."""
        ...
