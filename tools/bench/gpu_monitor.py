"""Power and clocks of GPUs during a run, and the FLOP/s that their matrix units sustain."""

from __future__ import annotations

import contextlib
import subprocess
import time
from types import TracebackType
from typing import NamedTuple

import torch


class PowerUse(NamedTuple):
    watts: float
    """Watts, summed over GPUs."""
    megahertz: float
    """Megahertz, mean over GPUs."""
    joules: float


PERIOD_MS = 200
"""Milliseconds between two samples of power."""


class PowerMonitor:
    """Samples `nvidia-smi` from enter to exit. `use` is None if it is not installed."""

    def __init__(self, gpus: int) -> None:
        """gpus: how many of the visible GPUs to sample, from the first."""
        self._gpus = gpus
        self._process: subprocess.Popen[str] | None = None
        self.use: PowerUse | None = None

    def __enter__(self) -> PowerMonitor:
        query = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", f"-lms={PERIOD_MS}"]
        # its number differs from the driver's if some GPUs are hidden
        first = torch.cuda.current_device()
        found = (torch.cuda.get_device_properties(first + i) for i in range(self._gpus))
        here = ",".join(f"GPU-{properties.uuid}" for properties in found)
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(["nvidia-smi", "-i", here, *query], stdout=subprocess.PIPE, text=True)
        self._begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin
        if self._process is None:
            return
        self._process.terminate()
        out, _ = self._process.communicate()
        samples = [tuple(map(float, line.split(","))) for line in out.splitlines() if line.count(",") == 1]
        self.use = power_use(samples, self._gpus, seconds)


def power_use(samples: list[tuple[float, ...]], gpus: int, seconds: float) -> PowerUse | None:
    """samples: watts and megahertz of one GPU each, equally many from every GPU. Returns None without samples."""
    if not samples:
        return None
    watts = gpus * sum(s[0] for s in samples) / len(samples)
    return PowerUse(watts, sum(s[1] for s in samples) / len(samples), watts * seconds)


def sustained_flops() -> float:
    """FLOP/s of a bf16 GEMM of the vendor's library, at the clocks it settles at after two seconds."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stop = time.perf_counter() + 2.0
    while time.perf_counter() < stop:
        for _ in range(20):
            torch.mm(a, b, out=out)
        torch.cuda.synchronize()
    begin.record()
    for _ in range(40):
        torch.mm(a, b, out=out)
    end.record()
    torch.cuda.synchronize()
    return 40 * 2 * 8192**3 / (begin.elapsed_time(end) / 1e3)
