"""`Curve`: an engine's measurements at each slot limit, as a file. The file calls the slot limit `bound`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from weft import unwritable
from weft.engine.config import Objective
from weft.engine.errors import ConfigError

FORMAT = "weft-curve-1"
QUANTILES = (0.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 100.0)


class Times(msgspec.Struct, frozen=True):
    """A distribution of seconds: its mean and the percentiles `QUANTILES`. Both are missing if there are no values."""

    mean: float | None = None
    quantiles: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: np.ndarray) -> Times:
        if not len(values):
            return cls()
        return cls(float(values.mean()), tuple(float(v) for v in np.percentile(values, QUANTILES)))

    def at(self, statistic: float | None) -> float:
        """Return the mean (None) or an interpolated percentile; NaN if there are no values."""
        if self.mean is None:
            return math.nan
        return self.mean if statistic is None else float(np.interp(statistic, QUANTILES, self.quantiles))


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One slot limit, measured in a steady state with a full queue."""

    bound: int
    batch: float  # Requests that ran, mean over time.
    seconds: float
    iterations: int
    output_per_s: float
    itl: Times  # Time between the tokens of a request, as the engine commits them.
    ttft: Times
    """Time from a request's first schedule to its first token, without the wait for a slot."""
    kv_pages: int  # Maximum of pages held; `kv_share` is their mean share of the pool.
    kv_share: float
    idle_share: float  # Share of the time in which the device waited for the CPU between iterations.
    prefill_share: float  # Share of device time for prompts, by tokens.
    joules_per_token: float | None = None
    """Energy per output token, by the device's counter; None if there is none."""
    dram_share: float | None = None
    sm_share: float | None = None
    warps_share: float | None = None  # Means as in `activity.Shares`; None if unavailable.

    def of(self, objective: Objective) -> float:
        """Return L(B) in seconds."""
        times: Times = getattr(self, objective.measure)
        return times.at(objective.statistic)


class ReplicaPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Concurrent engines on one device. `bound` applies to each, `idle_share` is a mean, the others are sums."""

    replicas: int
    bound: int
    batch: float
    output_per_s: float
    itl: Times
    idle_share: float = 0.0
    joules_per_token: float | None = None


class RateRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run with Poisson arrivals at `rate` requests per second for `seconds`."""

    bound: int
    rate: float
    seconds: float
    seed: int
    objectives: tuple[str, ...]
    kept: bool  # All objectives were met and the queue did not grow.
    requests: int  # Requests with a first token. A run ends early once it is sure to miss.
    ttft: Times  # Time from a request's arrival to its first token.
    itl: Times


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine, and the memory that an engine uses there, in bytes."""

    device: str
    name: str
    memory: int  # Memory available to engines.
    weights: int
    working: int  # Everything except weights and KV pages.
    page_bytes: int
    page_size: int
    pages: int
    joules: str = ""  # Source of the energy counter.
    no_joules: str = ""
    no_activity: str = ""  # Reasons why there is no energy counter, and no memory and SM activity.
    versions: str = ""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    model: str
    workload: str
    prompt: float
    output: float  # Mean tokens per request.
    options: dict[str, str | int | float | bool | list[str]]  # Engine options that were set, without the model.
    machine: Machine
    points: tuple[Point, ...] = ()
    replicas: tuple[ReplicaPoint, ...] = ()
    rates: tuple[RateRun, ...] = ()

    def throughput(self, point: Point | ReplicaPoint) -> float:
        """Return T(B): prompt and output tokens per second."""
        return point.output_per_s * (self.prompt + self.output) / self.output

    def by_batch(self) -> list[Point]:
        return sorted(self.points, key=lambda p: (p.batch, p.bound))

    def with_point(self, point: Point) -> Curve:
        others = [p for p in self.points if p.bound != point.bound]
        return msgspec.structs.replace(self, points=tuple(sorted([*others, point], key=lambda p: p.bound)))

    def known(self, bound: int) -> Point | None:
        return next((p for p in self.points if p.bound == bound), None)

    def runs(self, bound: int, objectives: Sequence[Objective]) -> list[RateRun]:
        """Return the runs with this slot limit and these objectives."""
        names = tuple(map(str, objectives))
        return [run for run in self.rates if run.bound == bound and run.objectives == names]

    def differs(self, other: Curve) -> str:
        """Describe how the conditions of measurement differ; empty if they are the same."""
        for name in ("model", "workload", "prompt", "output", "options"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name} {theirs!r}, this is {mine!r}"
        for name in ("name", "device"):
            if (mine := getattr(self.machine, name)) != (theirs := getattr(other.machine, name)):
                return f"machine {theirs!r}, this is {mine!r}"
        return ""


def save(curve: Curve, path: Path) -> None:
    """Write a curve atomically. Raises `ConfigError`."""
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(curve), indent=1) + b"\n")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(unwritable(path, error)) from None


def load(path: Path) -> Curve:
    """Read a curve. Raises `ConfigError`."""
    try:
        curve = msgspec.json.decode(path.read_bytes(), type=Curve)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a points file of weft advise: {error}") from None
    if curve.format != FORMAT:
        raise ConfigError(f"{path} has the format {curve.format!r}, this weft reads {FORMAT}")
    return curve


def check_measures(objectives: Sequence[Objective]) -> None:
    """Raise `ConfigError` for objectives that points do not measure."""
    for objective in objectives:
        if objective.measure not in ("itl", "ttft"):
            raise ConfigError(f"--slo {objective}: weft advise measures itl and ttft")
