"""`Ledger`: the outcome of every request as clients saw it, and whether the daemon's counters agree to the request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass
class Ledger:
    """One line for each request whose connection was made."""

    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    """by endpoint and status: the answer was complete"""
    broken: Counter[str] = field(default_factory=Counter)
    """by endpoint: the connection broke before the answer's end"""
    left: Counter[str] = field(default_factory=Counter)
    """by endpoint: the client disconnected on purpose"""
    refused: int = 0
    """connections that were not made, so no request was sent"""
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    """requests without a terminal answer within the client's timeout"""

    @property
    def total(self) -> int:
        return self.answered.total() + self.broken.total() + self.left.total()


def totals(exposition: str, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """Samples of a counter, by the values of `labels`."""
    found: Counter[tuple[str, ...]] = Counter()
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += int(sample.value)
    return found


def disagreements(ledger: Ledger, exposition: str, begun: str) -> list[str]:
    """Differences between the daemon's counters and its clients between two scrapes. Empty if they agree to the
    request.

    A client with a broken connection cannot know whether its request was counted as answered, as lost with its process,
    or never read. So each complete answer is counted once, no more requests are counted than were sent, and requests
    counted without a complete answer belong to a connection that broke or was closed.
    """
    name = "weft_requests_total"
    after, before = totals(exposition, name, "endpoint", "status"), totals(begun, name, "endpoint", "status")
    requested = {key[0] for key in ledger.answered} | set(ledger.broken) | set(ledger.left)
    counted = Counter({key: after[key] - before[key] for key in after if key[0] in requested})
    lost = totals(exposition, "weft_requests_lost_total")[()] - totals(begun, "weft_requests_lost_total")[()]
    found = []
    for endpoint in sorted(requested):
        open_ended = ledger.broken[endpoint] + ledger.left[endpoint]
        surplus = 0
        for status in {key[1] for key in (*ledger.answered, *counted) if key[0] == endpoint}:
            seen, reported = ledger.answered[endpoint, status], counted[endpoint, status]
            if reported < seen:
                found.append(f"{endpoint} {status}: clients saw {seen}, the daemon counted {reported}")
            surplus += max(0, reported - seen)
        if surplus > open_ended:
            found.append(
                f"{endpoint}: {surplus} counted that no client saw, {open_ended} connections broke or were left"
            )
    if counted.total() + lost > ledger.total:
        found.append(f"{counted.total()} answered and {lost} lost, but clients made {ledger.total} requests")
    if lost > ledger.broken.total() + ledger.left.total():
        found.append(f"{lost} lost, but {ledger.broken.total()} connections broke")
    return found
