"""`CacheControl`: a mark that retains everything up to it in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from weft.server.bodies import Body

MINUTES, HOUR = 300.0, 3600.0  # Retention times in seconds.


class CacheControl(Body):
    """Anthropic's `cache_control`, on a tool, a content block or the request."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return HOUR if self.ttl == "1h" else MINUTES


def longest_mark(things: Iterable[Any]) -> Any:
    """Return the mark with the longest retention among these JSON objects; None if there is none."""
    marks = [mark for thing in things if isinstance(thing, dict) and (mark := thing.get("cache_control")) is not None]
    return next((mark for mark in marks if isinstance(mark, dict) and mark.get("ttl") == "1h"), next(iter(marks), None))
