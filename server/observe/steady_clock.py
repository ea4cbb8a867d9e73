"""`SteadyClock`: the time of day for deciding what is old, which a wrong system clock does not move."""

from __future__ import annotations

import json
import math
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
        self._alone = True  # The file has not been read yet.
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
        """The time for comparisons with stamps, in Unix seconds: never later than what a clock or the file shows. It is
        0 while the file cannot be read, since the system clock alone may be wrong."""
        try:
            kept = self._kept()
        except OSError:
            return 0.0
        return min(self._steady(), time.time(), math.inf if kept is None else kept)

    def bound(self) -> float:
        """The latest time that a stamp can have, in Unix seconds; later ones are of a clock that was ahead. It is
        infinite while the file cannot be read."""
        try:
            kept = self._kept()
        except OSError:
            return math.inf
        if kept is None and self._file is not None:
            return math.inf
        return max(self.latest(), kept or 0.0) + STEP

    def save(self) -> None:
        """Write the file, at most once a minute. A disk that fails is ignored."""
        if self._file is None or boottime() - self._saved < SAVE_SECONDS:
            return
        with suppress(OSError):
            kept = self._kept()
            if self._alone and kept is not None:
                self._base = kept, boottime()
            self._alone = False
            steady = self._steady()
            self._saved = boottime()
            new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
            new.write_text(json.dumps({"time": steady, "boottime": self._saved, "machine": _machine()}))
            new.replace(self._file)

    def _kept(self) -> float | None:
        """The time by the file; None if there is none. Raises `OSError` for a disk that fails."""
        if self._file is None:
            return None
        try:
            saved = json.loads(self._file.read_bytes())
            passed = boottime() - float(saved["boottime"]) if saved["machine"] == _machine() else 0.0
            return float(saved["time"]) + passed
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None


def _machine() -> str:
    """An id of the machine's current run."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
