"""`EnergyMeter`: reads the energy that a device uses from its hardware counter, in a thread.

Nothing is estimated: without a counter that this process may read, there is no meter.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from weft.engine.progress import notice

PERIOD_SECONDS = 0.1  # Seconds between readings. Counters update about as often.
POWERCAP = Path("/sys/class/powercap")


class EnergyCounter(Protocol):
    """A counter of joules that never decreases. Reading raises `OSError` once it fails for good."""

    source: str

    def joules(self) -> float: ...


class Reading(NamedTuple):
    time: float  # `time.monotonic()`
    joules: float  # Joules since the meter started.


class NvmlCounter:
    """The sum over NVIDIA GPUs, each including the board's memory and all processes."""

    source = "nvml"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """Raises `OSError` if the driver has no such counter (GPUs before Volta, MIG slices)."""
        import pynvml

        self._error: type[Exception] = pynvml.NVMLError
        self._read = pynvml.nvmlDeviceGetTotalEnergyConsumption
        try:
            pynvml.nvmlInit()
            # By UUID, because torch numbers only the visible devices.
            names = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from None
        self.joules()

    def joules(self) -> float:
        try:
            return sum(float(self._read(handle)) for handle in self._handles) / 1e3
        except self._error as error:
            raise OSError(str(error)) from None


class RaplCounter:
    """The sum over all CPU packages, without memory, of all processes (Linux powercap)."""

    source = "rapl"

    def __init__(self, powercap: Path = POWERCAP) -> None:
        """Raises `OSError` if there is no counter or this process may not read it. Most machines require root."""
        zones = sorted(zone for zone in powercap.glob("intel-rapl:*") if zone.name.count(":") == 1)
        self._files = [zone / "energy_uj" for zone in zones]
        self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        self._last = [int(file.read_text()) for file in self._files]
        self._microjoules = 0
        if not zones:
            raise FileNotFoundError(f"{powercap} lists no CPU package")

    def joules(self) -> float:
        for i, file in enumerate(self._files):
            now = int(file.read_text())
            self._microjoules += (now - self._last[i]) % (self._ranges[i] + 1)  # it wraps
            self._last[i] = now
        return self._microjoules / 1e6


def energy_counter(device: torch.device, ranks: int = 1) -> EnergyCounter:
    """Return the counter of the GPUs of all ranks, `device` and those after it, or of the CPUs. Raises `OSError` with
    the reason if there is none."""
    if device.type != "cuda":
        return RaplCounter()
    return NvmlCounter([torch.device("cuda", (device.index or 0) + rank) for rank in range(ranks)])


class EnergyMeter:
    """Reads a counter ten times a second until it is closed or the counter fails. `why` then has the reason."""

    def __init__(self, counter: EnergyCounter, period: float = PERIOD_SECONDS) -> None:
        """Raises `OSError` if the first reading fails."""
        self.source = counter.source
        self.why = ""
        self._counter = counter
        self._first = counter.joules()
        self.latest = Reading(time.monotonic(), 0.0)
        self._period = period
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-energy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._period):
            before = time.monotonic()
            try:
                joules = self._counter.joules() - self._first
            except (OSError, ValueError) as error:
                self.why = str(error) or type(error).__name__
                notice(f"energy is no longer measured: {self.why}")
                return
            # The driver may be slow: use the middle of the call.
            self.latest = Reading((before + time.monotonic()) / 2, max(joules, self.latest.joules))

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._thread.join(1.0)
