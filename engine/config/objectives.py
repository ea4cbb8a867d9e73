"""Service level objectives, such as `itl:p99:50ms`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from weft.engine.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

MEASURES = {
    "itl": "time between two tokens of a request",
    "ttft": "time to the first token",
    "tpot": "time per output token after the first",
    "e2e": "total time of a request",
}
"""Times that an objective can limit."""
_STATISTIC = re.compile(r"mean|median|max|p(\d{1,2}(?:\.\d+)?)")
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


class Objective(NamedTuple):
    """A service level objective in the format of `weft load --slo`: `itl:p99:50ms`."""

    measure: str
    statistic: float | None
    """A percentile; None for the mean."""
    limit: float
    """The limit in seconds."""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Raises `ConfigError` with a one-line message."""
        parts = text.strip().lower().split(":")
        if len(parts) != 3:
            raise ConfigError(f"{text!r} is not MEASURE:STATISTIC:LIMIT, such as itl:p99:50ms")
        measure, statistic, limit = parts
        if measure not in MEASURES:
            raise ConfigError(f"{measure!r} in {text!r} must be one of {', '.join(MEASURES)}")
        if (found := _STATISTIC.fullmatch(statistic)) is None:
            raise ConfigError(f"{statistic!r} in {text!r} must be mean, median, max or a percentile such as p99.9")
        if (number := _LIMIT.fullmatch(limit)) is None or float(number[1]) <= 0:
            raise ConfigError(f"{limit!r} in {text!r} is not a time such as 50ms or 2s")
        q = {"mean": None, "median": 50.0, "max": 100.0}.get(statistic, float(found[1]) if found[1] else None)
        return cls(measure, q, float(number[1]) * _UNITS[number[2] or "s"])

    def __str__(self) -> str:
        statistic = {None: "mean", 100.0: "max"}.get(self.statistic) or f"p{self.statistic:g}"
        limit = f"{self.limit * 1e3:g}ms" if self.limit < 1 else f"{self.limit:g}s"
        return f"{self.measure}:{statistic}:{limit}"

    def of(self, values: np.ndarray) -> float:
        """Return the statistic of `values` in seconds; NaN if there are none."""
        if not len(values):
            return float("nan")
        if self.statistic is None:
            return float(values.mean())
        import numpy as np

        return float(np.percentile(values, self.statistic))


def itl_objective(text: str) -> Objective:
    """Parse an objective for the time between tokens. The measure defaults to itl, the statistic to p99. Raises
    `ConfigError` with a one-line message."""
    words = text.strip().split(":")
    objective = Objective.parse(":".join([*("itl", "p99")[: max(0, 3 - len(words))], *words]))
    if objective.measure != "itl":
        raise ConfigError(f"{objective.measure} is not the time between tokens (itl): write 50ms or p99:50ms")
    return objective


def kept_percentiles(objectives: Iterable[Objective]) -> list[Objective]:
    """Return the objectives that a few late tokens can break: percentiles above the median."""
    return [o for o in objectives if o.statistic is not None and o.statistic > 50]
