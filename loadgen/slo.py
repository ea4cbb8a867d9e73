"""Service level objectives such as `ttft:p99:500ms`, and their attainment and goodput."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.loadgen.errors import LoadError
from weft.loadgen.measures import FORMULAS, TITLES, Measures
from weft.loadgen.statistics import Values, percentile, wilson
from weft.loadgen.units import seconds, show_seconds

PRESETS = {"nanoflow": ("normalized:mean:200ms",)}  # `nanoflow`: section 6.3 of the NanoFlow paper.

RULES = {
    "attainment": (
        "share of all requests that were answered and individually met every limit; failures, 503s and timeouts stay "
        "in the denominator; Wilson's 95 % interval"
    ),
    "goodput": "requests that met every limit / time from the first arrival to the last answer",
    "percentile objectives": "over all requests; a failed one counts as infinitely late (itl: as one such gap)",
    "mean objectives": "over answered requests; missed if more requests failed than --max-failures allows",
}


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective. `statistic`: a percentile, or None for the mean. `limit` is in seconds."""

    measure: str
    statistic: float | None
    limit: float

    def __str__(self) -> str:
        statistic = {None: "mean", 100.0: "max"}.get(self.statistic) or f"p{self.statistic:g}"
        return f"{self.measure}:{statistic}:{show_seconds(self.limit).replace(' ', '')}"

    def title(self) -> str:
        words = {None: "mean", 50.0: "median", 100.0: "maximum"}
        statistic = words.get(self.statistic) or f"{self.statistic:g}th percentile"
        return f"{TITLES[self.measure]}, {statistic}, at most {show_seconds(self.limit)}"

    def of(self, values: Values) -> float:
        """Return the statistic of some values; NaN if there are none."""
        if self.statistic is None:
            return float(values.mean()) if len(values) else math.nan
        return percentile(values, self.statistic)


def parse(text: str) -> list[Objective]:
    """Parse one `--slo`: MEASURE:STATISTIC:LIMIT, or the name of a preset. Raises `LoadError`."""
    if text in PRESETS:
        return [objective for part in PRESETS[text] for objective in parse(part)]
    parts = text.split(":")
    if len(parts) != 3:
        raise LoadError(
            f"--slo: {text!r} is neither MEASURE:STATISTIC:LIMIT such as ttft:p99:500ms nor {', '.join(PRESETS)}"
        )
    measure, statistic, limit = parts
    if measure not in FORMULAS:
        raise LoadError(f"--slo: {measure!r} in {text!r} must be one of {', '.join(FORMULAS)}")
    match = re.fullmatch(r"mean|p(\d{1,2}(?:\.\d+)?)|max|median", statistic)
    if match is None:
        raise LoadError(f"--slo: {statistic!r} in {text!r} must be mean, median, max, p50, p99, p99.9 …")
    q = None if statistic == "mean" else {"max": 100.0, "median": 50.0}.get(statistic) or float(match[1])
    at_most = seconds(limit, "--slo")
    if at_most <= 0:
        raise LoadError(f"--slo: the limit in {text!r} must be more than 0")
    return [Objective(measure, q, at_most)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one objective in a run. `attainment`: share of all requests that individually met the limit."""

    objective: Objective
    value: float
    met: bool
    attainment: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """The result of all objectives in a run: `good` of `total` requests met every limit. `goodput` is per second."""

    verdicts: tuple[Verdict, ...]
    good: int
    total: int
    interval: tuple[float, float]
    goodput: float
    met: bool

    @property
    def share(self) -> float:
        return self.good / self.total if self.total else math.nan


def meets(objective: Objective, measures: Measures) -> NDArray[np.bool_]:
    """Return `[n]`: which requests were answered and met the limit. One-token requests meet any limit on tpot and itl.

    For `itl`, the statistic is computed over each request's gaps."""
    if objective.measure == "itl":
        own = np.array([objective.of(measures.itl_of(record)) for record in measures.records], np.float64)
    else:
        own = getattr(measures, objective.measure)
    return measures.ok & (np.where(np.isnan(own), 0.0, own) <= objective.limit)


def judge(objectives: Sequence[Objective], measures: Measures, span: float, max_failures: float) -> Attainment:
    """Evaluate objectives. `span`: seconds from first arrival to last answer. `max_failures`: limit for means."""
    total = len(measures.records)
    failed = total - int(measures.ok.sum())
    all_met = measures.ok.copy()
    verdicts = []
    for objective in objectives:
        kept = meets(objective, measures)
        all_met &= kept
        values, too_many = measures.values(objective.measure), False
        if objective.statistic is None:
            too_many = failed > max_failures * total
        else:
            values = np.concatenate((values, np.full(failed, np.inf)))
        value = objective.of(values)
        met = value <= objective.limit and not too_many
        verdicts.append(Verdict(objective, value, met, float(kept.mean()) if total else math.nan))
    good = int(all_met.sum())
    goodput = good / span if span > 0 else 0.0
    return Attainment(
        tuple(verdicts), good, total, wilson(good, total), goodput, total > 0 and all(v.met for v in verdicts)
    )
