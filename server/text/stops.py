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
        longest = 0
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while at >= 0 and not stop.startswith(buffer[at:]):
                at = buffer.find(stop[0], at + 1)
            if at >= 0:
                longest = max(longest, len(buffer) - at)
        return longest
