"""`CacheControl`: a mark that says that everything up to it is to be kept in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from weft.server.bodies import Body

MINUTES, HOUR = 300.0, 3600.0
"""seconds of the two times there are"""


class CacheControl(Body):
    """As Anthropic has it, on a tool, a block or a part of content, or the whole request."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return HOUR if self.ttl == "1h" else MINUTES


def longest_mark(things: Iterable[Any]) -> Any:
    """Of parts of JSON that may have a mark: one of those for the longest time. None where there is none."""
    marks = [mark for thing in things if isinstance(thing, dict) and (mark := thing.get("cache_control")) is not None]
    return next((mark for mark in marks if isinstance(mark, dict) and mark.get("ttl") == "1h"), next(iter(marks), None))
