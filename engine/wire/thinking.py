"""`Thinking`: a bound on what a model thinks before it answers; `ThoughtCount`: how much it has thought, told by its
tokens."""

from __future__ import annotations

from collections import deque

import msgspec

PATIENCE = 8
"""tokens of an answer in which its thinking begins, or there is none"""


class Thinking(msgspec.Struct, frozen=True):
    """Once an output has thought for `budget` tokens, it is made to go on with `force`."""

    budget: int
    begin: tuple[int, ...]
    """tokens behind which the thinking begins; none: the output begins with it"""
    end: tuple[int, ...]
    """tokens that end it"""
    force: tuple[int, ...]


class ThoughtCount:
    """Follows one output. `tokens`: that it has thought, without the marks; `inside`: it thinks; `over`: and will not
    any more."""

    def __init__(self, begin: tuple[int, ...], end: tuple[int, ...], *, again: bool = False) -> None:
        """`again`: there may be several pieces of thinking."""
        self.tokens = 0
        self.inside = not begin
        self.over = False
        self._begin, self._end, self._again = begin, end, again
        self._seen = 0
        self._last: deque[int] = deque(maxlen=max(len(begin), len(end), 1))

    def see(self, token: int) -> None:
        if self.over:
            return
        self._seen += 1
        self._last.append(token)
        if self.inside:
            self.tokens += 1
            if self._ends_with(self._end):
                self.tokens -= len(self._end)
                self.inside, self.over = False, not self._again
        elif self._ends_with(self._begin):
            self.inside = True
        elif self._seen >= PATIENCE and not self._again:
            self.over = True

    def _ends_with(self, mark: tuple[int, ...]) -> bool:
        return bool(mark) and tuple(self._last)[-len(mark) :] == mark
