"""`Bench`: the measurements that a search needs. Implemented by GPUs, by profiles and by tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.runner.iteration.nano import decode_counts
from weft.kernels.tuning.measure import Sustained


class Load(NamedTuple):
    """One iteration: a dense batch in the steady state of a workload."""

    tokens: int  # Size of the dense batch: decodes, then prefill tokens.
    decodes: int
    context: int  # Mean KV tokens that a decode reads.
    prompt: int  # Mean prompt length. A prefill token attends to half of it on average.

    @property
    def kv_tokens(self) -> int:
        """KV tokens of all decodes: the work of decode attention."""
        return self.decodes * self.context

    @property
    def prefill_tokens(self) -> int:
        return max(0, self.tokens - self.decodes)

    def within(self, capacity: int | None) -> Load:
        """Limit the decodes to `capacity` KV tokens (None: unknown). Prefill takes the other tokens of the batch."""
        return self if capacity is None else self._replace(decodes=min(self.decodes, capacity // self.context))

    def assigned(self, ranges: Sequence[tuple[int, int]]) -> tuple[Load, ...]:
        """Return the loads of the nano-batches `[begin, end)`, assigned as in `engine/runner/iteration/nano.py`."""
        sizes = [max(0, min(end, self.tokens) - begin) for begin, end in ranges]
        counts = decode_counts(min(self.decodes, sum(sizes)), sizes)
        return tuple(self._replace(tokens=n, decodes=d) for n, d in zip(sizes, counts, strict=True))


Timing = Sustained  # Sustained ms, watts and mhz.


class PeriodBench(Protocol):
    """The methods of a `Bench` that measure pipelines."""

    num_sms: int

    def period(self, period: Period, load: Load) -> Timing:
        """Run the pipeline over a few layers; returns the time and power of one layer."""
        ...


class Bench(PeriodBench, Protocol):
    """Sustained timings on one accelerator. `load` is the full dense batch; `op` covers a range of its tokens."""

    memory: int  # Bytes of device memory; 0: unknown.
    seconds: float

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        """Repeat one nano-operation on `op.sms` SMs; returns the timing of one run."""
        ...

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        """Repeat each operation on a separate lane, both always busy. Power is that of the full board."""
        ...


@runtime_checkable
class ReductionBench(Bench, Protocol):
    """A bench of ranks that can switch how partial sums are added (`weft bench ranks`)."""

    def sums(self, reduction: str) -> None:
        """Select how partial sums are added. All ranks call this together. Raises `ConfigError` if unsupported."""
        ...
