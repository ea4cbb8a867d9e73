"""Defines `Record`, the plan and the result of one request. Times are seconds after the start of the run."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

NAN = float("nan")


class Outcome(enum.StrEnum):
    """How a request ended. Every outcome but `OK` is a failure and stays in every denominator."""

    OK = "ok"
    OVERLOADED = "overloaded"  # Status 503 or 429.
    REFUSED = "refused"  # Any other status but 200.
    TIMEOUT = "timeout"  # `--timeout` expired.
    CONNECTION = "connection"  # No connection, or it broke before the answer began.
    BROKEN = "broken"
    """The answer began but ended in an error event, or without a finish reason and [DONE]."""
    UNFINISHED = "unfinished"
    """Still running `--drain` after the last arrival, or when the run was interrupted."""


@dataclass(slots=True)
class Record:
    index: int
    due: float  # Scheduled time of sending.
    input_tokens: int  # Planned prompt tokens; 0 for a prompt of unknown length from a file.
    output_tokens: int  # Requested output tokens.
    session: int = -1
    turn: int = 0
    start: float = NAN  # Actual start of sending, before opening a connection.
    first: float = NAN  # Arrival of the first event with a token.
    end: float = NAN  # Arrival of the answer's last event.
    times: array[float] = field(default_factory=lambda: array("d"))  # Arrival of every event with a token.
    prompt_tokens: int = -1  # Prompt tokens counted by the server; -1: not reported.
    completion_tokens: int = -1
    cached_tokens: int = -1
    outcome: Outcome = Outcome.UNFINISHED
    status: int = 0  # HTTP status; 0: none.
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def received_tokens(self) -> int:
        """Output tokens by the server's count, or else the number of events with tokens."""
        return self.completion_tokens if self.completion_tokens >= 0 else len(self.times)
