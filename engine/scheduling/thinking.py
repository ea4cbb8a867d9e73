"""`ThinkingBound`: ends the thinking of one request after so many tokens, by leaving no other token to sample.

Within its budget a request is launched ahead as any other is; beyond, until it has ended, it waits for its newest
token.
"""

from __future__ import annotations

from weft.engine.scheduling.bad_words import only
from weft.engine.scheduling.grammar import Mask
from weft.engine.wire.thinking import Thinking, ThoughtCount


class ThinkingBound:
    """Knows the confirmed output. `settled`: nothing is left to do; `mask`: what alone may come next, if that is so."""

    def __init__(self, thinking: Thinking, vocab_size: int) -> None:
        self.settled = not thinking.force
        self.mask: Mask | None = None
        self._thinking = thinking
        self._vocab_size = vocab_size
        self._count = ThoughtCount(thinking.begin, thinking.end)
        self._forced = 0
        """tokens that were forced"""
        self._look()

    def may_run_ahead(self, in_flight: int) -> bool:
        """Whether the token after those in flight is within the budget whatever they are."""
        return self.settled or (self.mask is None and self._count.tokens + in_flight < self._thinking.budget)

    def see(self, token: int) -> None:
        """The output's next token."""
        if self.settled:
            return
        if self.mask is None:
            self._count.see(token)
        else:
            self._forced += 1
        self._look()

    def give_up(self) -> None:
        """What is to be forced is not allowed."""
        self.settled, self.mask = True, None

    def _look(self) -> None:
        force, count = self._thinking.force, self._count
        if self.settled or (count.over and not self._forced) or self._forced == len(force):
            self.give_up()
        elif self._forced or (count.inside and count.tokens >= self._thinking.budget):
            self.mask = only([force[self._forced]], self._vocab_size)
