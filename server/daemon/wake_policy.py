"""`WakePolicy`: which models are awake, and which goes to sleep for another one. Decisions alone: others carry them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.server.observe.shared_state import SleepState

EPSILON = 1e-9
"""of sums of shares"""


class SleepMove(NamedTuple):
    """A model is to take no more requests, end those it has, and sleep."""

    model: int


class WakeMove(NamedTuple):
    """A model is to wake: there is room for it."""

    model: int


class WakePolicy:
    """Attributes:
    rest: of each model. Every model that is not asleep, nor dead, has its share of the memory.
    wanted: models that are to wake, in the order in which that was asked.
    """

    def __init__(self, shares: Sequence[float], most: int | None = None) -> None:
        """`shares`: of the memory, by model, each 1 at most. `most`: models awake at once.

        At first those are awake, in their order, that fit together."""
        self._shares = list(shares)
        self._most = len(shares) if most is None else most
        self.sleep_states = [SleepState.ASLEEP] * len(shares)
        self.wanted: dict[int, None] = {}
        for model in range(len(shares)):
            if self._fits(model, self._up()):
                self.sleep_states[model] = SleepState.AWAKE

    def _up(self) -> list[int]:
        """Models that have memory."""
        return [m for m, state in enumerate(self.sleep_states) if state not in (SleepState.ASLEEP, SleepState.DEAD)]

    def _fits(self, model: int, beside: Sequence[int]) -> bool:
        if len(beside) >= self._most:
            return False
        return self._shares[model] + sum(self._shares[other] for other in beside) <= 1 + EPSILON

    def want(self, model: int) -> None:
        """It is to be awake."""
        if self.sleep_states[model] not in (SleepState.AWAKE, SleepState.DEAD):
            self.wanted.setdefault(model)

    def forgo(self, model: int) -> None:
        """It need not wake any more. Idempotent."""
        self.wanted.pop(model, None)

    def order(self, model: int) -> bool:
        """An operator puts it to sleep. False where it is not awake."""
        if self.sleep_states[model] is not SleepState.AWAKE:
            return False
        self.sleep_states[model] = SleepState.FALLING_ASLEEP
        return True

    def moves(self, used: Sequence[float], expected: Sequence[int] = ()) -> list[SleepMove | WakeMove]:
        """What is to begin now; it counts as begun. `used`: when each model was last asked something. `expected`:
        models that requests are just about to enter: they sleep for nobody.

        Who asked first wakes first: nobody behind takes the room that is being made for it.
        """
        found: list[SleepMove | WakeMove] = []
        for model in list(self.wanted):
            if self.sleep_states[model] in (SleepState.AWAKE, SleepState.DEAD):
                self.forgo(model)
            if self.sleep_states[model] is not SleepState.ASLEEP:
                continue
            if self._fits(model, self._up()):
                self.sleep_states[model] = SleepState.WAKING
                found.append(WakeMove(model))
                continue
            while not self._fits(
                model, [m for m in self._up() if self.sleep_states[m] is not SleepState.FALLING_ASLEEP]
            ):
                free = [m for m, state in enumerate(self.sleep_states) if state is SleepState.AWAKE and m not in expected]
                if not free:
                    break
                least = min(free, key=lambda m: used[m])
                self.sleep_states[least] = SleepState.FALLING_ASLEEP
                found.append(SleepMove(least))
            break
        return found

    # -- how it went

    def slept(self, model: int) -> None:
        assert self.sleep_states[model] in (SleepState.FALLING_ASLEEP, SleepState.WAKING)
        self.sleep_states[model] = SleepState.ASLEEP

    def stayed(self, model: int) -> int | None:
        """It has requests that take too long to wait for, and goes on. Returns the model that now will not wake."""
        assert self.sleep_states[model] is SleepState.FALLING_ASLEEP
        self.sleep_states[model] = SleepState.AWAKE
        self.forgo(model)
        loser = next((m for m in self.wanted if self.sleep_states[m] is SleepState.ASLEEP), None)
        if loser is not None:
            self.forgo(loser)
        return loser

    def woke(self, model: int) -> None:
        assert self.sleep_states[model] is SleepState.WAKING
        self.sleep_states[model] = SleepState.AWAKE
        self.forgo(model)

    def died(self, model: int) -> None:
        """It has ended for good."""
        self.sleep_states[model] = SleepState.DEAD
        self.forgo(model)

    def check(self) -> None:
        """Raise `AssertionError` unless those with memory fit together."""
        up = self._up()
        assert len(up) <= self._most
        assert sum(self._shares[m] for m in up) <= 1 + EPSILON
        assert not any(self.sleep_states[m] is SleepState.DEAD for m in self.wanted)
