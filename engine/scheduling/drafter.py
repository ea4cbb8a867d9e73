"""`Drafter`: proposes tokens that a request may sample next, for `Verification` to check several at once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.engine.runner.iteration.batch import I32


class Drafts(NamedTuple):
    """Draft tokens of n slots."""

    tokens: I32  # `[n, k]`. A row's tokens beyond its length are ignored.
    length: I32  # `[n]` drafts of each row.


class Drafter(Protocol):
    """Proposes drafts for the requests in a slot table. The scheduler calls it on the engine's thread."""

    @property
    def active(self) -> bool:
        """Whether an iteration is launched only once those before it are committed, as drafts follow the newest token.
        Read before each launch. If it is False, `propose` is not called."""
        ...

    def propose(self, slots: I32, room: I32, budget: int) -> Drafts:
        """Return drafts for the slots that decode, whose newest tokens are known. `room [n]` is the maximum of each,
        `budget` that of all together. The caller cuts more where a grammar or memory requires it."""
        ...

    def verified(self, slots: I32, drafted: I32, accepted: I32) -> None:
        """Take in how many drafts of `propose` these slots verified and accepted, `[n]` each. The accepted tokens, and
        the token after them, are in the slot table."""
        ...
