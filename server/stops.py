"""Stop strings in a text that comes in pieces, wherever token borders fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text at the stop string that completes first.

    Holds back what could be the beginning of a stop string: at most `max(len(stop)) - 1` characters.
    `matched` is the stop string found; nothing is emitted after it. With `include` it is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text so far that is safe to show."""
        if not self._stops:
            return text
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            self._held = ""
            return buffer[: end if self._include else at]
        held = self._possible_start(buffer)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """The end without a stop string: what was held back is text after all."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest end of `buffer` that begins a stop string."""
        for length in range(min(self._longest - 1, len(buffer)), 0, -1):
            end = buffer[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
