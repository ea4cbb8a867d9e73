"""`Journal`: a `Bench` that records its measurements, so that an interrupted search can continue."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.autosearch.profile import cache_path
from weft.autosearch.refine import period_key
from weft.engine.errors import ConfigError
from weft.engine.plans.plan import NanoOperation, Period, Target

KEPT_SECONDS = 30 * 86400.0
"""Age at which the file of an unfinished search is deleted, since drivers, kernels and cards change."""


class Entry(msgspec.Struct):
    """One measurement: a line of the file."""

    key: str  # Identifies what was measured, for how long, and which repetition it was.
    timings: tuple[Timing, ...] = ()
    refused: str = ""  # Reason why this cannot run; empty if it can.
    took: float = 0.0  # Seconds, including compilation.


def unfinished(target: Target, load: Load, what: str, *more: bytes) -> Path:
    """File for a search's results until its plan is written. more: further inputs that the results depend on."""
    digest = hashlib.sha256(b"".join((msgspec.json.encode(load), *more))).hexdigest()[:12]
    profile = cache_path(target)
    return profile.parent.parent / "searches" / f"{profile.stem}-{digest}.{what}"


class Journal:
    """Implements `Bench`. Measurements in the file are not repeated.

    The n-th measurement of a pipeline is the n-th one of the earlier search, so a search that measures in the same
    order quickly reaches the point of interruption. A new search deletes old files. Truncated lines are ignored."""

    def __init__(self, bench: Bench, file: Path) -> None:
        """Raises `ConfigError` if the file's folder cannot be created."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create {file.parent} ({error.strerror or error}): set XDG_CACHE_HOME") from None
        _delete_old(file.parent)
        self._bench, self._file = bench, file
        self.num_sms, self.memory = bench.num_sms, bench.memory
        self._times: Counter[str] = Counter()
        self._known = {entry.key: entry for entry in _read(file)}
        self.reused = 0  # Measurements taken from the file.
        self.took = 0.0  # Seconds that the last measurement took when it was made.

    @property
    def known(self) -> int:
        """Number of measurements in the file at the start."""
        return len(self._known)

    @property
    def seconds(self) -> float:
        return self._bench.seconds

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._bench.seconds = value

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        return self._measured(("alone", op, load), lambda: (self._bench.alone(op, load),))[0]

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        first, second = self._measured(("pair", a, b, load), lambda: self._bench.pair(a, b, load))
        return first, second

    def period(self, period: Period, load: Load) -> Timing:
        what = ("period", period_key(period).decode(), load)
        return self._measured(what, lambda: (self._bench.period(period, load),))[0]

    def _measured(self, what: tuple[object, ...], measure: Callable[[], tuple[Timing, ...]]) -> tuple[Timing, ...]:
        name = hashlib.sha256(msgspec.json.encode((*what, self.seconds))).hexdigest()[:24]
        key = f"{name}-{self._times[name]}"
        self._times[name] += 1
        if (entry := self._known.get(key)) is not None:
            self.reused += 1
        else:
            entry, begun = Entry(key), time.monotonic()
            try:
                entry.timings = measure()
            except ConfigError as error:
                entry.refused = str(error)
            entry.took = time.monotonic() - begun
            with contextlib.suppress(OSError), self._file.open("ab") as file:  # a full disk must not end the search
                file.write(
                    b"\n" + msgspec.json.encode(entry)
                )  # the newline comes first in case the last line is truncated
        self.took = entry.took
        if entry.refused:
            raise ConfigError(entry.refused)
        return entry.timings


def _delete_old(folder: Path) -> None:
    """Delete the files of abandoned searches."""
    for old in folder.iterdir():
        with contextlib.suppress(OSError):  # no permission, or another search has just deleted it
            if old.suffix in (".measured", ".solved") and time.time() - old.stat().st_mtime > KEPT_SECONDS:
                old.unlink()


def _read(file: Path) -> list[Entry]:
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:  # none yet, or the same search has ended in another process
        return []
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except ValueError:  # a truncated or corrupted line
            continue
    return entries
