"""`Curve`: what an engine did at each bound on running requests, as a file."""

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
    """A distribution of seconds: its mean, and the percentiles of `QUANTILES`; none of either where nothing came."""

    mean: float | None = None
    quantiles: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: np.ndarray) -> Times:
        if not len(values):
            return cls()
        return cls(float(values.mean()), tuple(float(v) for v in np.percentile(values, QUANTILES)))

    def at(self, statistic: float | None) -> float:
        """The mean (None) or a percentile, straight between those that were kept; NaN where nothing came."""
        if self.mean is None:
            return math.nan
        return self.mean if statistic is None else float(np.interp(statistic, QUANTILES, self.quantiles))


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One bound, measured in a steady state: whoever ends is followed by the next."""

    bound: int
    batch: float
    """requests that really ran, mean over time"""
    seconds: float
    iterations: int
    output_per_s: float
    """tokens"""
    itl: Times
    """between a request's tokens, as the engine commits them"""
    ttft: Times
    """from a request's first schedule to its first token: without waiting for a seat"""
    kv_pages: int
    """held at most"""
    kv_share: float
    """of the pool, mean"""
    idle_share: float
    """of the time: the device waited for the CPU between iterations"""
    prefill_share: float
    """of the device's time, by tokens: prompts"""
    joules_per_token: float | None = None
    """per output token, by the device's counter; None where there is none"""
    dram_share: float | None = None
    """of the memory's bandwidth, mean; None where the machine does not show it"""
    sm_share: float | None = None
    """of the SMs busy, likewise"""
    warps_share: float | None = None
    """of the warps that fit, in flight, likewise"""

    def of(self, objective: Objective) -> float:
        """Seconds: L(B)."""
        times: Times = getattr(self, objective.measure)
        return times.at(objective.statistic)


class ReplicaPoint(msgspec.Struct, frozen=True, kw_only=True):
    """So many engines on one device, each with its own bound, measured at the same time."""

    replicas: int
    bound: int
    """of each"""
    batch: float
    """of all"""
    output_per_s: float
    """of all"""
    itl: Times
    idle_share: float = 0.0
    """of each engine's time, mean"""
    joules_per_token: float | None = None


class RateRun(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that came at a rate, at random times."""

    bound: int
    rate: float
    """requests a second"""
    seconds: float
    """for which they came"""
    seed: int
    objectives: tuple[str, ...]
    kept: bool
    """all of the objectives, and no queue grew"""
    requests: int
    """that had a first token; a run ends as soon as it is sure to miss"""
    ttft: Times
    """from its arrival to a request's first token"""
    itl: Times


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured, and what an engine takes of it, in bytes."""

    device: str
    name: str
    memory: int
    """that engines may use"""
    weights: int
    working: int
    """everything else but KV pages"""
    page_bytes: int
    page_size: int
    pages: int
    joules: str = ""
    """whose counter"""
    no_joules: str = ""
    """why there is none"""
    no_activity: str = ""
    """why activity of memory and SMs is not shown"""
    versions: str = ""


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    model: str
    workload: str
    prompt: float
    """tokens, mean"""
    output: float
    """tokens, mean"""
    options: dict[str, str | int | float | bool | list[str]]
    """that the engine was given beside the model"""
    machine: Machine
    points: tuple[Point, ...] = ()
    replicas: tuple[ReplicaPoint, ...] = ()
    rates: tuple[RateRun, ...] = ()

    def throughput(self, point: Point | ReplicaPoint) -> float:
        """T(B): prompt and output tokens a second, as the workload has them."""
        return point.output_per_s * (self.prompt + self.output) / self.output

    def by_batch(self) -> list[Point]:
        return sorted(self.points, key=lambda p: (p.batch, p.bound))

    def with_point(self, point: Point) -> Curve:
        others = [p for p in self.points if p.bound != point.bound]
        return msgspec.structs.replace(self, points=tuple(sorted([*others, point], key=lambda p: p.bound)))

    def known(self, bound: int) -> Point | None:
        return next((p for p in self.points if p.bound == bound), None)

    def runs(self, bound: int, objectives: Sequence[Objective]) -> list[RateRun]:
        """At rates, with this bound and held to these objectives."""
        asked = tuple(map(str, objectives))
        return [run for run in self.rates if run.bound == bound and run.objectives == asked]

    def differs(self, other: Curve) -> str:
        """What was measured under other circumstances; empty where the points belong together."""
        for name in ("model", "workload", "prompt", "output", "options"):
            if (mine := getattr(self, name)) != (theirs := getattr(other, name)):
                return f"{name} {theirs!r}, this is {mine!r}"
        for name in ("name", "device"):
            if (mine := getattr(self.machine, name)) != (theirs := getattr(other.machine, name)):
                return f"machine {theirs!r}, this is {mine!r}"
        return ""


def save(curve: Curve, path: Path) -> None:
    """Whole, or not at all. Raises `ConfigError`."""
    beside = path.with_name(path.name + ".new")
    try:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(curve), indent=1) + b"\n")
        os.replace(beside, path)
    except OSError as error:
        raise ConfigError(unwritable(path, error)) from None


def load(path: Path) -> Curve:
    """Raises `ConfigError`, one line."""
    try:
        curve = msgspec.json.decode(path.read_bytes(), type=Curve)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a file of points that weft advise wrote: {error}") from None
    if curve.format != FORMAT:
        raise ConfigError(f"{path} has the format {curve.format!r}, this weft reads {FORMAT}")
    return curve


def check_measures(objectives: Sequence[Objective]) -> None:
    """Raises `ConfigError` for what no point tells."""
    for objective in objectives:
        if objective.measure not in ("itl", "ttft"):
            raise ConfigError(f"--slo {objective}: weft advise measures itl and ttft")
