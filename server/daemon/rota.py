"""`Rota`: which models are awake, and which goes to sleep for another one. Decisions alone: others carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.server.observe.board import Rest

EPSILON = 1e-9
"""of sums of shares"""


class Fall(NamedTuple):
    """A model is to take no more requests, end those it has, and sleep."""

    model: int


class Rise(NamedTuple):
    """A model is to wake: there is room for it."""

    model: int


class Rota:
    """Attributes:
    rest: of each model. Every model that is not asleep, nor dead, has its share of the memory.
    wanted: models that are to wake, in the order in which that was asked.
    """

    def __init__(self, shares: Sequence[float], most: int | None = None) -> None:
        """`shares`: of the memory, by model, each 1 at most. `most`: models awake at once.

        At first those are awake, in their order, that fit together."""
        self._shares = list(shares)
        self._most = len(shares) if most is None else most
        self.rest = [Rest.ASLEEP] * len(shares)
        self.wanted: dict[int, None] = {}
        for model in range(len(shares)):
            if self._fits(model, self._up()):
                self.rest[model] = Rest.AWAKE

    def _up(self) -> list[int]:
        """Models that have memory."""
        return [m for m, rest in enumerate(self.rest) if rest not in (Rest.ASLEEP, Rest.DEAD)]

    def _fits(self, model: int, beside: Sequence[int]) -> bool:
        if len(beside) >= self._most:
            return False
        return self._shares[model] + sum(self._shares[other] for other in beside) <= 1 + EPSILON

    def want(self, model: int) -> None:
        """It is to be awake."""
        if self.rest[model] not in (Rest.AWAKE, Rest.DEAD):
            self.wanted.setdefault(model)

    def forgo(self, model: int) -> None:
        """It need not wake any more. Idempotent."""
        self.wanted.pop(model, None)

    def order(self, model: int) -> bool:
        """An operator puts it to sleep. False where it is not awake."""
        if self.rest[model] is not Rest.AWAKE:
            return False
        self.rest[model] = Rest.FALLING_ASLEEP
        return True

    def moves(self, used: Sequence[float], expected: Sequence[int] = ()) -> list[Fall | Rise]:
        """What is to begin now; it counts as begun. `used`: when each model was last asked something. `expected`:
        models that requests are just about to enter: they sleep for nobody.

        Who asked first wakes first: nobody behind takes the room that is being made for it.
        """
        found: list[Fall | Rise] = []
        for model in list(self.wanted):
            if self.rest[model] in (Rest.AWAKE, Rest.DEAD):
                self.forgo(model)
            if self.rest[model] is not Rest.ASLEEP:
                continue
            if self._fits(model, self._up()):
                self.rest[model] = Rest.WAKING
                found.append(Rise(model))
                continue
            while not self._fits(model, [m for m in self._up() if self.rest[m] is not Rest.FALLING_ASLEEP]):
                free = [m for m, rest in enumerate(self.rest) if rest is Rest.AWAKE and m not in expected]
                if not free:
                    break
                least = min(free, key=lambda m: used[m])
                self.rest[least] = Rest.FALLING_ASLEEP
                found.append(Fall(least))
            break
        return found

    # -- how it went

    def slept(self, model: int) -> None:
        assert self.rest[model] in (Rest.FALLING_ASLEEP, Rest.WAKING)
        self.rest[model] = Rest.ASLEEP

    def stayed(self, model: int) -> int | None:
        """It has requests that take too long to wait for, and goes on. Returns the model that now will not wake."""
        assert self.rest[model] is Rest.FALLING_ASLEEP
        self.rest[model] = Rest.AWAKE
        self.forgo(model)
        loser = next((m for m in self.wanted if self.rest[m] is Rest.ASLEEP), None)
        if loser is not None:
            self.forgo(loser)
        return loser

    def woke(self, model: int) -> None:
        assert self.rest[model] is Rest.WAKING
        self.rest[model] = Rest.AWAKE
        self.forgo(model)

    def died(self, model: int) -> None:
        """It has ended for good."""
        self.rest[model] = Rest.DEAD
        self.forgo(model)

    def check(self) -> None:
        """Raise `AssertionError` unless those with memory fit together."""
        up = self._up()
        assert len(up) <= self._most
        assert sum(self._shares[m] for m in up) <= 1 + EPSILON
        assert not any(self.rest[m] is Rest.DEAD for m in self.wanted)
