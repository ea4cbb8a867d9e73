"""Per-request measures: columns computed from records, and their formulas in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.loadgen.record import Outcome, Record
from weft.loadgen.statistics import Distribution, Values

FORMULAS = {
    "ttft": "time to first token = arrival of the first event with a token − start of sending",
    "itl": "inter-token latency = gap between consecutive events with tokens; every gap of every request counts once",
    "stall": "longest stall = a request's longest gap between consecutive events with tokens; shares of requests with "
    "a stall over a limit are of all answered requests",
    "tpot": "time per output token = (latency − TTFT) / (output tokens − 1), for answers of two tokens or more",
    "e2e": "latency = arrival of the answer's last event − start of sending",
    "normalized": "normalized latency = latency / output tokens",
}
"""Formulas by measure. The start of sending precedes opening a connection for the request."""

TITLES = {
    "ttft": "Time to first token",
    "itl": "Inter-token latency",
    "stall": "Longest stall",
    "tpot": "Time per output token",
    "e2e": "Latency",
    "normalized": "Normalized latency",
}
STALLS = (0.2, 0.5)
"""Limits, in seconds, whose shares of stalled requests are reported (POD-Attention §5.3)."""
PER_REQUEST = ("ttft", "stall", "tpot", "e2e", "normalized")


def _column(name: str) -> cached_property[Values]:
    return cached_property(lambda measures: np.array([getattr(r, name) for r in measures.records], np.float64))


@dataclass(frozen=True)
class Measures:
    """Columns `[n]` over the requests of a run, including failures; NaN if a failed request has no value."""

    records: Sequence[Record]

    due = _column("due")
    start = _column("start")
    first = _column("first")
    end = _column("end")
    tokens = _column("received_tokens")

    @cached_property
    def ok(self) -> NDArray[np.bool_]:
        return np.array([record.ok for record in self.records], bool)

    @cached_property
    def ttft(self) -> Values:
        return np.where(self.ok, self.first - self.start, np.nan)

    @cached_property
    def e2e(self) -> Values:
        return np.where(self.ok, self.end - self.start, np.nan)

    @cached_property
    def tpot(self) -> Values:
        more = self.tokens > 1
        return np.where(more, (self.e2e - self.ttft) / np.where(more, self.tokens - 1, 1), np.nan)

    @cached_property
    def normalized(self) -> Values:
        return self.e2e / np.maximum(self.tokens, 1)

    def itl_of(self, record: Record) -> Values:
        return np.diff(np.asarray(record.times)) if record.ok else np.empty(0)

    @cached_property
    def itl(self) -> Values:
        """All gaps of all answered requests: `[gaps]`."""
        return np.concatenate([np.empty(0), *map(self.itl_of, self.records)])

    @cached_property
    def stall(self) -> Values:
        """NaN without a gap."""
        gaps = map(self.itl_of, self.records)
        return np.array([own.max() if len(own) else np.nan for own in gaps], np.float64)

    def stalled(self, limit: float) -> float:
        """Return the share of answered requests with a stall of more than `limit` seconds; NaN if none was answered."""
        answered = int(self.ok.sum())
        return int((self.stall > limit).sum()) / answered if answered else np.nan

    def values(self, measure: str) -> Values:
        """Return the finite values of a measure over answered requests (`itl`: over their gaps)."""
        column: Values = getattr(self, measure)
        return column[np.isfinite(column)]

    @cached_property
    def distributions(self) -> dict[str, Distribution]:
        return {measure: Distribution.of(self.values(measure)) for measure in FORMULAS}

    @cached_property
    def lateness(self) -> Values:
        """Start of sending minus due time, for requests that were sent."""
        late = self.start - self.due
        return np.maximum(late[np.isfinite(late)], 0.0)

    def outcomes(self) -> dict[str, int]:
        """Count requests by outcome; omits outcomes that did not occur, except `ok`."""
        counts = Counter(record.outcome for record in self.records)
        return {outcome.value: counts[outcome] for outcome in Outcome if counts[outcome] or outcome is Outcome.OK}
