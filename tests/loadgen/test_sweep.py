"""The search for the highest rate, against a server whose answer is a known function of the rate."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from weft.loadgen.measures import Measures
from weft.loadgen.record import Outcome, Record
from weft.loadgen.run import Run, RunOptions
from weft.loadgen.slo import parse
from weft.loadgen.sweep import Sweep, SweepOptions, search
from weft.loadgen.workload import Clipping


def run_with(latency: float, lag: float = 0.0, *, interrupted: bool = False) -> Run:
    record = Record(0, 0.0, 1, 1, outcome=Outcome.OK)
    record.start, record.times = 0.0, array("d", [latency])
    record.first = record.end = latency
    measures = Measures([record])
    options = RunOptions(tuple(parse("ttft:mean:100ms")))
    lags = np.full(100, lag)
    clipping = Clipping()
    return Run(
        "s", "http://s", "m", "", 1.0, 0, 1.0, 1.0, measures, measures, lags, 0.1, options, clipping,
        interrupted=interrupted,
    )  # fmt: skip


def server(capacity: float) -> Callable[[float], Run]:
    """Within 100 ms up to `capacity` requests per second."""
    return lambda rate: run_with(0.05 if rate <= capacity else 0.5)


@pytest.mark.parametrize("capacity", [0.13, 1.0, 7.3, 50.0, 333.0])
@pytest.mark.parametrize("precision", [0.3, 0.05, 0.01])
def test_the_capacity_is_enclosed_to_the_precision(capacity: float, precision: float) -> None:
    sweep = search("s", SweepOptions(1.0, 2.0, precision, 60), server(capacity))
    assert sweep.best is not None
    assert sweep.missed is not None
    assert sweep.best <= capacity < sweep.missed
    assert sweep.missed <= sweep.best * (1 + precision)
    # Doubling to the capacity, then halving the logarithm of the interval.
    steps = abs(np.log2(capacity)) + np.log2(np.log(2) / np.log1p(precision)) + 4
    assert len(sweep.points) <= steps
    assert [rate for rate, _ in sweep.by_rate] == sorted(rate for rate, _ in sweep.points)


def test_a_server_that_meets_nothing_or_everything_ends_the_search() -> None:
    nothing = search("s", SweepOptions(), server(0.0))
    assert nothing.best is None
    assert "miss" in nothing.reason
    everything = search("s", SweepOptions(max_runs=5), server(1e9))
    assert (everything.best, everything.missed) == (16.0, None)
    assert "5 runs" in everything.reason


def test_a_miss_while_the_generator_was_late_is_ignored() -> None:
    sweep = search("s", SweepOptions(), lambda rate: run_with(0.05 if rate < 4 else 0.5, lag=0.0 if rate < 4 else 0.05))
    assert (sweep.best, sweep.missed) == (2.0, None)
    assert "generator" in sweep.reason
    # Late, but still within the objective: this run counts.
    assert search("s", SweepOptions(max_runs=2), lambda _: run_with(0.05, lag=0.05)).best == 2.0


def test_an_interrupted_sweep_keeps_its_runs() -> None:
    sweep: Sweep = search("s", SweepOptions(), lambda rate: run_with(0.05, interrupted=rate >= 4))
    assert sweep.best == 2.0
    assert len(sweep.points) == 3


def test_an_interrupt_before_a_run_has_begun_keeps_the_runs_before_it() -> None:
    def measure(rate: float) -> Run:
        if rate >= 4:
            raise KeyboardInterrupt
        return run_with(0.05)

    sweep = search("s", SweepOptions(), measure)
    assert (sweep.best, sweep.interrupted, sweep.reason) == (2.0, True, "the sweep was interrupted")
    with pytest.raises(KeyboardInterrupt):
        search("s", SweepOptions(start_rate=4), measure)
