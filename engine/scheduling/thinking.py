"""`ThinkingBound`: ends the thinking of one request after its token budget, by allowing only the end tokens.

Within its budget a request is launched ahead like any other. After that it waits for its newest token until thinking
has ended.
"""

from __future__ import annotations

from weft.engine.scheduling.bad_words import only
from weft.engine.scheduling.grammar import Mask
from weft.engine.wire.thinking import Thinking, ThoughtCount


class ThinkingBound:
    """Follows the confirmed output. `settled` is True once nothing is left to do, `mask` is set to force a token."""

    def __init__(self, thinking: Thinking, vocab_size: int) -> None:
        self.settled = not thinking.force
        self.mask: Mask | None = None
        self._thinking, self._vocab_size = thinking, vocab_size
        self._count = ThoughtCount(thinking.begin, thinking.end)
        self._forced = 0  # number of forced tokens
        self._update()

    def may_run_ahead(self, in_flight: int) -> bool:
        """Return whether the token after those in flight is within the budget in any case."""
        return self.settled or (self.mask is None and self._count.tokens + in_flight < self._thinking.budget)

    @property
    def ahead(self) -> int:
        """Tokens after the newest one that are within the budget in any case. Only for a bound that is not settled."""
        return 0 if self.mask is not None else max(0, self._thinking.budget - 1 - self._count.tokens)

    def see(self, token: int) -> None:
        if self.settled:
            return
        if self.mask is None:
            self._count.see(token)
        else:
            self._forced += 1
        self._update()

    def give_up(self) -> None:
        """Stop forcing tokens, because another constraint forbids them."""
        self.settled, self.mask = True, None

    def _update(self) -> None:
        force, count = self._thinking.force, self._count
        if self.settled or (count.over and not self._forced) or self._forced == len(force):
            self.give_up()
        elif self._forced or (count.inside and count.tokens >= self._thinking.budget):
            self.mask = only([force[self._forced]], self._vocab_size)
