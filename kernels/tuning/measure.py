"""Times GPU work in bursts and sustained, with clocks and watts.

Calls are captured in a CUDA graph over several copies of their data, so that launches and caches do not distort them.
`burst` timings (milliseconds of work) rank variants; `sustained` ones (seconds, at the power cap) are what a server
achieves.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class Sustained(NamedTuple):
    ms: float
    watts: float
    mhz: float

    @property
    def joules(self) -> float:
        return self.ms * 1e-3 * self.watts


class Meter:
    """Samples clock and power of the GPU ten times a second while open; averages several GPUs."""

    def __init__(self, gpus: int = 1) -> None:
        """gpus: number of GPUs from the current one on, in this process's order."""
        first = torch.cuda.current_device()
        names = [f"GPU-{torch.cuda.get_device_properties(first + i).uuid}" for i in range(gpus)]
        query = [
            "nvidia-smi",
            f"--id={','.join(names)}",
            "--query-gpu=clocks.sm,power.draw.instant",
            "--format=csv,noheader,nounits",
            "-lms",
            "100",
        ]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        self.samples: list[tuple[float, float, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            mhz, watts = line.split(",")[:2]
            self.samples.append((time.monotonic(), float(mhz), float(watts)))

    def mean(self, since: float) -> tuple[float, float]:
        late = [s for s in self.samples if s[0] >= since] or self.samples[-1:] or [(0.0, 0.0, 0.0)]
        return statistics.fmean(s[1] for s in late), statistics.fmean(s[2] for s in late)

    def close(self) -> None:
        self._process.terminate()


def capture(calls: Iterable[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """Capture all calls in one graph and count them. The calls' tensors must live as long as the graph is replayed."""
    calls = list(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph, len(calls)


def burst(calls: Iterable[Callable[[], object]], repeats: int = 9) -> float:
    """Return the median milliseconds of one call."""
    graph, count = capture(calls)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return statistics.median(times)


def sustained(calls: Iterable[Callable[[], object]], meter: Meter, seconds: float = 2.5) -> Sustained:
    """Return milliseconds of one call over the second half of `seconds`, with that half's watts and clock."""
    graph, count = capture(calls)
    start = time.monotonic()
    _replay_until(graph, start + seconds / 2)
    half_at = time.monotonic()
    replays = _replay_until(graph, start + seconds)
    ms = (time.monotonic() - half_at) * 1e3 / (replays * count)
    mhz, watts = meter.mean(half_at)
    return Sustained(ms, watts, mhz)


def _replay_until(graph: torch.cuda.CUDAGraph, end: float) -> int:
    """Replay until `end` and return the count: at least two, because one replay may outlast a measurement."""
    replays = 0
    while not replays or time.monotonic() < end:
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        replays += 2
    return replays
