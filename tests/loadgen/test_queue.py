"""A server with one queue and a constant service time is an M/D/1 queue: its mean wait is known."""

from __future__ import annotations

import numpy as np
import pytest
from driving import content, drive, workload
from sse_server import serving

from weft.loadgen.arrivals import renewal
from weft.loadgen.measures import Measures
from weft.loadgen.workload import ArrivalOptions

SERVICE, LOAD = 0.01, 0.6
RATE = LOAD / SERVICE


def waits(times: np.ndarray) -> np.ndarray:
    """Lindley's recursion: the wait of each arrival at a server that is busy `SERVICE` seconds with each."""
    out = np.zeros(len(times))
    for i in range(1, len(times)):
        out[i] = max(0.0, out[i - 1] + SERVICE - (times[i] - times[i - 1]))
    return out


CLOSED_FORM = LOAD * SERVICE / (2 * (1 - LOAD))
"""Pollaczek and Khinchine's mean wait with a constant service time"""


def test_the_schedule_alone_gives_the_mean_wait_of_the_closed_form() -> None:
    means = []
    for seed in range(30):
        times = renewal("poisson", RATE, np.random.default_rng(seed), duration=None, count=20_000, burstiness=1.0)
        means.append(waits(times)[1000:].mean())
    error = np.std(means, ddof=1) / np.sqrt(len(means))
    assert np.mean(means) == pytest.approx(CLOSED_FORM, abs=4 * error)
    assert error < 0.02 * CLOSED_FORM


@pytest.mark.slow
async def test_the_measured_mean_wait_is_that_of_an_md1_queue() -> None:
    n = 240
    load = workload(ArrivalOptions("poisson", RATE, count=n), content(8, 1))
    async with serving(service=SERVICE) as stub:
        outcomes = await drive(stub, load)
    measures = Measures(outcomes.records)
    assert measures.ok.all()
    arrivals, written = np.array(stub.arrivals), np.array(stub.written)[:, 0]
    # Each latency is the server's latency; the median, because this machine may be busy with something else.
    assert np.median(np.abs(measures.e2e - (written - arrivals))) < 0.002
    # The delay of the server's timers is not time in the queue.
    measured = float((measures.e2e - SERVICE).mean() - (written - np.array(stub.served)).mean())
    assert measured == pytest.approx(waits(arrivals).mean(), abs=0.002)
    if measures.lateness.max() > SERVICE / 2:
        return  # the machine paused: requests that were due meanwhile left at once, which is not a Poisson stream
    # Compared with the closed form: the mean of so few waits scatters; a simulation gives the scatter.
    samples = [
        waits(renewal("poisson", RATE, np.random.default_rng(s), duration=None, count=n, burstiness=1.0)).mean()
        for s in range(100, 300)
    ]
    assert measured == pytest.approx(CLOSED_FORM, abs=4 * float(np.std(samples)) + 0.002)
