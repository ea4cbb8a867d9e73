"""`Record`: what was planned, sent and received for one request. Times are seconds after the start of the run."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

NAN = float("nan")


class Outcome(enum.StrEnum):
    """How a request ended. Everything but `OK` is a failure and stays in every denominator."""

    OK = "ok"
    OVERLOADED = "overloaded"
    """status 503 or 429"""
    REFUSED = "refused"
    """any other status that is not 200"""
    TIMEOUT = "timeout"
    """`--timeout` passed"""
    CONNECTION = "connection"
    """no connection, or it broke before the answer began"""
    BROKEN = "broken"
    """the answer began but did not end as it should: an error event, or no finish reason and no [DONE]"""
    UNFINISHED = "unfinished"
    """still running `--drain` after the last arrival, or when the run was interrupted"""


@dataclass(slots=True)
class Record:
    index: int
    due: float
    """when the schedule wanted it sent"""
    input_tokens: int
    """planned; 0 when a prompt of unknown length came from a file"""
    output_tokens: int
    """asked for"""
    session: int = -1
    turn: int = 0
    start: float = NAN
    """when the generator began to send it, before any connection was opened for it"""
    first: float = NAN
    """arrival of the first event with a token"""
    end: float = NAN
    """arrival of the last event of the answer"""
    times: array[float] = field(default_factory=lambda: array("d"))
    """arrival of every event with a token"""
    prompt_tokens: int = -1
    """as the server counted them; -1: it did not say"""
    completion_tokens: int = -1
    cached_tokens: int = -1
    outcome: Outcome = Outcome.UNFINISHED
    status: int = 0
    """of HTTP; 0: none came"""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def received_tokens(self) -> int:
        """Output tokens: the server's count, else the number of events that carried any."""
        return self.completion_tokens if self.completion_tokens >= 0 else len(self.times)
