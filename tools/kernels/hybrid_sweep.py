"""`Sweep`: measures many hybrid batches within a time limit, one row each in a file that a restart resumes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.kernels.tuning.measure import Meter, Sustained
from weft.tools.kernels.hybrid_batches import Hybrid, Planned

ROUNDS = 3
"""Rounds per batch, with each way once per round, so that drift affects all ways; a row has medians."""
SUSTAINED_WAYS = ("whole", "cut", "pod rule", "pod together")
Row = dict[str, Any]
"""A row of the file: `part`, the batch's fields, `regime` ("burst" or "sustained"), `us` by way, the plan, clock and
watts. Bursts add `same` (one launch has its halves' bits) and `load_ms` (host time before the first launch), sustained
rows `joules` by way."""


class Calls(Protocol):
    """Ways to run attention of batches of one model (`hybrid_calls.HybridCalls`)."""

    left_out: dict[str, str]

    def load(self, batch: Hybrid) -> dict[str, int]: ...
    def names(self, every: bool) -> list[str]: ...
    def prepare(self, name: str) -> bool: ...
    def burst(self, name: str, expected_us: float) -> float: ...
    def sustained(self, name: str, meter: Meter, seconds: float, expected_us: float) -> Sustained: ...
    def same_bits(self) -> bool: ...


class OtherRows(Exception):
    """The file's rows were measured with other kernels or on another card."""


class Rows:
    """The file: a line that describes the measurement, then a line per row. Raises `OtherRows`."""

    def __init__(self, file: Path, about: Row) -> None:
        self._file, self.rows = file, list[Row]()
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # the last one may be truncated
        if whole and json.loads(whole[0]) != about:
            raise OtherRows(
                f"{file} has rows of other kernels, another card or other versions: remove it or use another file"
            )
        self.rows = [json.loads(line) for line in whole[1:]]
        file.write_text("".join(whole) or json.dumps(about) + "\n")

    def add(self, row: Row) -> None:
        self.rows.append(row)
        with self._file.open("a") as out:
            out.write(json.dumps(row) + "\n")


class Sweep:
    """Measures `batches`, the most important first, in bursts and then sustained.

    seconds: the time limit, from now on. share: its fraction for sustained measurements, of `hold` seconds each. Every
    batch is timed in our serial kernels and in one launch; as many as time allows, evenly spaced, also in all other
    ways.
    """

    def __init__(
        self, batches: Sequence[Planned], rows: Rows, calls: Mapping[str, Calls], *, seconds: float, share: float = 0.3,
        hold: float = 0.5, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = print,
        every: int = 100,
    ) -> None:  # fmt: skip
        self._batches, self._rows, self._calls = batches, rows, calls
        self._clock, self._say, self._hold, self._every = clock, say, hold, every
        self._begun = clock()
        self._end = self._begun + seconds
        self._bursts_end = self._end - share * seconds
        self._owed = 0.0

    def run(self, meter: Meter | None) -> None:
        done = {(r["regime"], r["part"], _batch_of(r).key) for r in self._rows.rows}
        todo = [p for p in self._batches if ("burst", p.part, p.batch.key) not in done]
        if len(todo) < len(self._batches):
            self._say(f"{len(self._batches) - len(todo)} batches were measured before")
        self._bursts(todo, meter)
        if meter is not None:
            held = [
                p for p in self._batches
                if p.part == "sweep" and ("sustained", p.part, p.batch.key) not in done
            ]  # fmt: skip
            self._sustained(held, meter)

    def _bursts(self, todo: list[Planned], meter: Meter | None) -> None:
        costs: dict[bool, list[float]] = {False: [], True: []}
        for i, planned in enumerate(todo):
            begun = self._clock()
            every = planned.part != "sweep" or self._affords(len(todo) - i, self._bursts_end - begun, costs)
            if begun + _mean(costs[False]) > self._bursts_end:
                self._say(f"no time for {len(todo) - i} batches in bursts")
                return
            self._rows.add(self._burst(planned, every, meter))
            costs[every].append(self._clock() - begun)
            if (i + 1) % self._every == 0:
                self._say(
                    f"{self._clock() - self._begun:6.1f} s: {i + 1} of {len(todo)} batches in bursts, "
                    f"{len(costs[True])} of them in every way; {1e3 * _mean(costs[False]):.0f} ms a batch, "
                    f"{1e3 * _mean(costs[True]):.0f} in every way"
                )

    def _affords(self, batches: int, left: float, costs: dict[bool, list[float]]) -> bool:
        """Return whether this batch is timed in every way, so that exactly the available time is used."""
        core, whole = _mean(costs[False]), _mean(costs[True])
        if not costs[False] or not costs[True]:
            return not costs[True] or len(costs[True]) <= len(costs[False])
        share = (left / batches - core) / max(1e-9, whole - core)
        self._owed += min(1.0, max(0.0, share))
        if self._owed < 1:
            return False
        self._owed -= 1
        return True

    def _burst(self, planned: Planned, every: bool, meter: Meter | None) -> Row:
        batch, calls = planned.batch, self._calls[planned.batch.model]
        at = self._clock()
        plan = calls.load(batch)
        load_ms = 1e3 * (self._clock() - at)
        names = [name for name in calls.names(every) if calls.prepare(name)]
        expected = dict.fromkeys(names, max(20.0, batch.prefill_us + batch.decode_us))
        for name in names:  # once without recording: a graph's first launch is slower; it also gives the expected time
            expected[name] = max(1.0, calls.burst(name, expected[name]))
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(ROUNDS):
            for name in names:
                times[name].append(calls.burst(name, expected[name]))
        row: Row = {"part": planned.part, **batch._asdict(), "regime": "burst"}
        us = row["us"] = {name: round(statistics.median(taken), 2) for name, taken in times.items()}
        by_number = {plan[name[4:]]: taken for name, taken in us.items() if name.startswith("pod ")}
        for name in plan.keys() - {"parts"} if by_number else ():  # settings with the same number
            if plan[name] in by_number:
                us.setdefault(f"pod {name}", by_number[plan[name]])
        row |= {"plan": plan, "load_ms": round(load_ms, 3)}
        if "pod rule" in names:
            row["same"] = calls.same_bits()
        if meter is not None:
            mhz, watts = meter.mean(at)
            row |= {"mhz": round(mhz), "watts": round(watts)}
        return row

    def _sustained(self, todo: list[Planned], meter: Meter) -> None:
        cost = self._hold * len(SUSTAINED_WAYS)
        for i, planned in enumerate(todo):
            if self._clock() + cost > self._end:
                self._say(f"{i} batches sustained")
                return
            batch, calls = planned.batch, self._calls[planned.batch.model]
            row: Row = {"part": planned.part, **batch._asdict(), "regime": "sustained"}
            row |= {"plan": calls.load(batch), "us": {}, "joules": {}, "mhz": {}, "watts": {}}
            for name in SUSTAINED_WAYS:
                found = calls.sustained(name, meter, self._hold, max(20.0, batch.prefill_us + batch.decode_us))
                row["us"][name], row["joules"][name] = round(found.ms * 1e3, 2), round(found.joules, 5)
                row["mhz"][name], row["watts"][name] = round(found.mhz), round(found.watts)
            self._rows.add(row)
        self._say(f"{len(todo)} batches sustained")


def _batch_of(row: Row) -> Hybrid:
    return Hybrid(**{field: row[field] for field in Hybrid._fields})


def _mean(values: list[float]) -> float:
    """Return the mean of the last ones: a batch's cost changes with its size."""
    late = values[-50:]
    return sum(late) / len(late) if late else 0.0
