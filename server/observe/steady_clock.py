"""`SteadyClock`: the time of day for deciding what is old, which a wrong system clock does not move."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

STEP = 3600.0  # Seconds of a jump of the system clock that are followed at once.
LASTING = 86400.0  # Seconds after which a longer jump is followed, too.
SAVE_SECONDS = 60.0


def boottime() -> float:
    """Seconds since the machine started, with those in which it slept. The same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Counts on from a time that the system clock showed earlier. It has two readings: stamp things with `latest`, and
    compare stamps with `earliest`. Then nothing ages faster than time passes, even while the system clock is wrong.

    Processes that share a file agree, also with a successor. Time in which the machine is off counts once the
    system clock has differed for LASTING seconds."""

    def __init__(self, file: Path | None = None) -> None:
        """`file`: keeps the time for other processes."""
        self._file = file
        self._saved = -SAVE_SECONDS
        self._jump: tuple[float, float] | None = None  # (offset of the system clock, when it was first seen)
        self._base = time.time(), boottime()
        with suppress(OSError, ValueError, TypeError, KeyError):
            saved = json.loads(file.read_bytes()) if file is not None else {}
            at, since = float(saved["time"]), float(saved["boottime"])
            self._base = (at, since if saved["machine"] == _machine() else self._base[1])
        self.save()

    def _steady(self) -> float:
        wall, up = time.time(), boottime()
        at, since = self._base
        steady, offset = at + up - since, wall - up
        if abs(wall - steady) > STEP:
            if self._jump is None or abs(self._jump[0] - offset) > STEP:
                self._jump = offset, up
            if up - self._jump[1] < LASTING:
                return steady
        self._base, self._jump = (wall, up), None
        return wall

    def latest(self) -> float:
        """The time for stamps, in Unix seconds: never earlier than what either clock shows."""
        return max(self._steady(), time.time())

    def earliest(self) -> float:
        """The time for comparisons with stamps, in Unix seconds: never later than what either clock shows."""
        return min(self._steady(), time.time())

    def save(self) -> None:
        """Write the file, at most once a minute. A disk that fails is ignored."""
        if self._file is None or boottime() - self._saved < SAVE_SECONDS:
            return
        steady = self._steady()
        self._saved = boottime()
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        with suppress(OSError):
            new.write_text(json.dumps({"time": steady, "boottime": self._saved, "machine": _machine()}))
            new.replace(self._file)


def _machine() -> str:
    """An id of the machine's current run."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
