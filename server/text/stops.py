"""Stop strings and patterns in text that arrives in pieces, independent of token boundaries."""

from __future__ import annotations

from collections.abc import Sequence

from weft.server.text.stop_regex import PatternSearch, StopPatterns


class StopStrings:
    """Cuts a text at the stop string or match of a pattern that completes first.

    Text that could begin one is held back: at most `max(len(stop)) - 1` characters, `MAX_MATCH_CHARS` with patterns.
    `matched` is the stop string or pattern found; nothing is emitted after it. With `include` the text found is part of
    the text. Both are ignored inside `markup`, from its first mark to its second, or to the end if there is no second.
    """

    def __init__(
        self, stops: Sequence[str], patterns: StopPatterns | None = None, *, include: bool = False,
        markup: tuple[str, str | None] | None = None,
    ) -> None:  # fmt: skip
        self._stops = tuple(stops)
        self._search = None if patterns is None else PatternSearch(patterns)
        self._searched = 0  # characters of `_held` that `_search` has read
        self._include = include
        self._markup = markup
        self._inside = False  # the text is inside markup
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is safe to show so far."""
        if not self._stops and self._search is None:
            return text
        if self.matched is not None or not text:
            return ""
        buffer, self._held = self._held + text, ""
        return self._read(buffer) if self._markup is None else self._read_marked(buffer, *self._markup)

    def flush(self) -> str:
        """End the text without a stop string and return the text held back."""
        held, self._held = self._held, ""
        if self._inside or self._markup is None:
            return held
        shown = self._read(held)  # a possible mark
        held, self._held = self._held, ""
        return shown + held

    def _read(self, buffer: str) -> str:
        """The part of plain text that can be shown; the rest is held back."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        held = self._possible_start(buffer)
        if self._search is not None:
            if (match := self._search.feed(buffer[self._searched :])) is not None:
                before, after, pattern = match
                found.append((len(buffer) - after, len(buffer) - before, pattern))
            held = self._searched = max(held, self._search.held)
        if found:
            end, at, self.matched = min(found)
            return buffer[: end if self._include else at]
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def _read_marked(self, buffer: str, begin: str, end: str | None) -> str:
        """The part of text with markup that can be shown."""
        shown = ""
        while self.matched is None:
            mark = end if self._inside else begin
            if mark is None:
                return shown + buffer
            before, found, rest = buffer.partition(mark)
            held = "" if found else before[len(before) - _beginning(before, mark) :]
            before = before[: len(before) - len(held)]
            shown += before if self._inside else self._read(before)
            if not found:
                self._held += held
                break
            if self.matched is None:
                shown += self._held + mark  # stop strings do not extend into markup
                self._held, self._searched = "", 0
                if self._search is not None:
                    self._search.reset()
            self._inside, buffer = not self._inside, rest
        return shown

    def _possible_start(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while at >= 0 and not stop.startswith(buffer[at:]):
                at = buffer.find(stop[0], at + 1)
            if at >= 0:
                longest = max(longest, len(buffer) - at)
        return longest


def _beginning(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
