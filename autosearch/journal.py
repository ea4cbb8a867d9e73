"""`Journal`: a `Bench` that writes down what it measures, so that an interrupted search goes on where it was."""

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
"""that nobody has added to the file of a search before it is forgotten: drivers, kernels and cards change"""


class Entry(msgspec.Struct):
    """A line of the file: one measurement."""

    key: str
    """of what was measured, how long, and how often it had been measured before"""
    timings: tuple[Timing, ...] = ()
    refused: str = ""
    """why this cannot run"""
    took: float = 0.0
    """seconds, what was made ready for it included"""


def unfinished(target: Target, load: Load, what: str, *more: bytes) -> Path:
    """Where a search keeps what it finds until its plan is written. more: what it is valid for besides."""
    digest = hashlib.sha256(b"".join((msgspec.json.encode(load), *more))).hexdigest()[:12]
    profile = cache_path(target)
    return profile.parent.parent / "searches" / f"{profile.stem}-{digest}.{what}"


class Journal:
    """See `Bench`. What the file has is not measured again: the second measurement of a pipeline is the second one of
    the search before, and so on. Who asks in the same order so comes to where that search was, in no time.

    The file is made at the first measurement; old files of other searches go with a new search. A line that was cut off
    when its writer was killed is no line.
    """

    def __init__(self, bench: Bench, file: Path) -> None:
        """Raises `ConfigError` where nothing can be kept in the file's folder."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{file.parent} cannot be made ({error.strerror or error}): set XDG_CACHE_HOME") from None
        _forget_old(file)
        self._bench, self._file = bench, file
        self.num_sms, self.memory = bench.num_sms, bench.memory
        self._times: Counter[str] = Counter()
        self._known = {entry.key: entry for entry in _read(file)}
        self.taken = 0
        """measurements that the file had"""
        self.took = 0.0
        """seconds of the last measurement, when it was made"""

    @property
    def known(self) -> int:
        """Measurements of searches before."""
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
            self.taken += 1
        else:
            entry, begun = Entry(key), time.monotonic()
            try:
                entry.timings = measure()
            except ConfigError as error:
                entry.refused = str(error)
            entry.took = time.monotonic() - begun
            with contextlib.suppress(OSError), self._file.open("ab") as file:  # a full disk ends no search
                file.write(b"\n" + msgspec.json.encode(entry))  # ahead: behind half a line this begins a new one
        self.took = entry.took
        if entry.refused:
            raise ConfigError(entry.refused)
        return entry.timings


def _forget_old(file: Path) -> None:
    """Of searches that nobody went on with."""
    for old in file.parent.iterdir():
        with contextlib.suppress(OSError):  # somebody else's, or another search has just removed it
            if old.suffix in (".measured", ".solved") and time.time() - old.stat().st_mtime > KEPT_SECONDS:
                old.unlink()


def _read(file: Path) -> list[Entry]:
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:  # none yet, or another search of the same has ended meanwhile
        return []
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line, type=Entry))
        except ValueError:  # half a line, or bytes that a disk has lost
            continue
    return entries
