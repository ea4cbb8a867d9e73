"""`GatedBench`: a bench that measures only while an engine on the same device has no requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.wire.search_gate import SearchGate

POLL_SECONDS = 0.005  # Seconds between looks at a closed gate.
Result = TypeVar("Result")


class DisturbedError(Exception):
    """The gate was closed during a measurement."""


class GatedBench:
    """Implements `Bench`. A measurement that a request disturbs is repeated.

    Make the inner bench call `check` before each short piece of work: it raises once the gate is closed."""

    def __init__(
        self, gate: SearchGate, *, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._gate, self._clock, self._sleep = gate, clock, sleep
        self._waited = 0.0
        self.joules = 0.0
        self.disturbed = 0  # Measurements that were repeated.
        self._bench: Bench | None = None
        self.num_sms, self.memory = 0, 0

    def over(self, bench: Bench) -> GatedBench:
        """Measure on this bench."""
        self._bench, self.num_sms, self.memory = bench, bench.num_sms, bench.memory
        return self

    @property
    def bench(self) -> Bench:
        assert self._bench is not None
        return self._bench

    @property
    def seconds(self) -> float:
        return self.bench.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self.bench.seconds = value

    def clock(self) -> float:
        """Seconds without those in which work waited for the gate."""
        return self._clock() - self._waited

    def check(self) -> None:
        if not self._gate.is_open:
            raise DisturbedError

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        return self._metered(lambda: (self.bench.alone(op, load),))[0]

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        first, second = self._metered(lambda: self.bench.pair(a, b, load))
        return first, second

    def period(self, period: Period, load: Load) -> Timing:
        return self._metered(lambda: (self.bench.period(period, load),))[0]

    def _metered(self, measure: Callable[[], tuple[Timing, ...]]) -> tuple[Timing, ...]:
        begun = self.clock()
        timings = self.undisturbed(measure)
        self.joules += (self.clock() - begun) * timings[0].watts
        return timings

    def wait(self) -> None:
        """Wait until the gate is open."""
        begun = self._clock()
        while not self._gate.is_open:
            self._sleep(POLL_SECONDS)
        self._waited += self._clock() - begun

    def undisturbed(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, done while the gate was open all the time."""
        while True:
            self.wait()
            closings = self._gate.closings
            try:
                result = work()
            except DisturbedError:
                self.disturbed += 1
                continue
            if self._gate.closings == closings:
                return result
            self.disturbed += 1
