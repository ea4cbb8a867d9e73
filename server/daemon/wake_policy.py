"""`WakePolicy` decides which models are awake and which one sleeps to make room. `SleepManager` carries it out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from weft.server.observe.shared_state import SleepState

EPSILON = 1e-9  # Tolerance for sums of memory shares.


class SleepMove(NamedTuple):
    """Stop accepting requests for a model, finish its open requests and put it to sleep."""

    model: int


class WakeMove(NamedTuple):
    """Wake a model; there is memory for it."""

    model: int


class WakePolicy:
    """Chooses the models that are awake, within the memory.

    The bound: while requests wait for a sleeping model that no paused model blocks, each other model wakes at most once
    before it.

    Attributes:
    sleep_states: the state of each model. Every model that is neither asleep nor dead occupies its memory share.
    wanted: models to wake, in the order of the requests."""

    def __init__(self, shares: Sequence[float], most: int | None = None) -> None:
        """`shares`: each model's fraction of the memory, at most 1. `most`: models awake at once. Initially the first
        models that fit together are awake."""
        self._shares = list(shares)
        self._most = len(shares) if most is None else most
        self.sleep_states = [SleepState.ASLEEP] * len(shares)
        self.wanted: dict[int, None] = {}
        self._places: dict[int, int] = {}
        """By model: its place in line. It keeps it until it wakes, even if its requests are refused meanwhile."""
        self._last_place = 0
        for model in range(len(shares)):
            if self._fits(model, self._resident()):
                self.sleep_states[model] = SleepState.AWAKE

    def _resident(self) -> list[int]:
        """Return the models that occupy memory."""
        return [m for m, state in enumerate(self.sleep_states) if state not in (SleepState.ASLEEP, SleepState.DEAD)]

    def _fits(self, model: int, others: Sequence[int]) -> bool:
        if len(others) >= self._most:
            return False
        return self._shares[model] + sum(self._shares[other] for other in others) <= 1 + EPSILON

    def request_wake(self, model: int) -> None:
        """Queue a model for waking."""
        if self.sleep_states[model] in (SleepState.AWAKE, SleepState.DEAD) or model in self.wanted:
            return
        if model not in self._places:
            self._last_place += 1
            self._places[model] = self._last_place
        self.wanted = dict.fromkeys(sorted((*self.wanted, model), key=self._places.__getitem__))

    def cancel_wake(self, model: int) -> None:
        """Remove a model from the queue. Idempotent."""
        self.wanted.pop(model, None)

    def begin_sleep(self, model: int) -> bool:
        """Put a model to sleep on an operator's request. Returns False if it is not awake or paused."""
        if self.sleep_states[model] not in (SleepState.AWAKE, SleepState.PAUSED):
            return False
        self.sleep_states[model] = SleepState.FALLING_ASLEEP
        return True

    def moves(
        self, used: Sequence[float], expected: Collection[int] = (), busy: Collection[int] = ()
    ) -> list[SleepMove | WakeMove]:
        """Return the moves to begin now, and update the states as if they had begun.

        `used`: time of each model's last request. `expected`: models with requests about to enter; they are not put to
        sleep. `busy`: models with open requests, which sleep only if no other can. Models wake in the order of their
        requests: later ones never take memory freed for an earlier one. Those that only a paused model keeps asleep
        are left out."""
        found: list[SleepMove | WakeMove] = []
        for model in list(self.wanted):
            if self.sleep_states[model] in (SleepState.AWAKE, SleepState.DEAD):
                self._leave_line(model)
            if self.sleep_states[model] is not SleepState.ASLEEP:
                continue
            if self._fits(model, self._resident()):
                self.sleep_states[model] = SleepState.WAKING
                found.append(WakeMove(model))
                continue
            if self._needs_operator(model):
                continue
            while not self._fits(model, self._staying()):
                free = [m for m, s in enumerate(self.sleep_states) if s is SleepState.AWAKE and m not in expected]
                if not free:
                    break
                least = min(free, key=lambda m: (m in busy, used[m]))
                self.sleep_states[least] = SleepState.FALLING_ASLEEP
                found.append(SleepMove(least))
            break
        return found

    def _needs_operator(self, model: int) -> bool:
        """Return whether paused models keep this one asleep."""
        return not self._fits(model, [m for m, s in enumerate(self.sleep_states) if s is SleepState.PAUSED])

    def _staying(self) -> list[int]:
        return [m for m in self._resident() if self.sleep_states[m] is not SleepState.FALLING_ASLEEP]

    # -- outcomes of moves

    def slept(self, model: int) -> None:
        assert self.sleep_states[model] in (SleepState.FALLING_ASLEEP, SleepState.WAKING)
        if self.sleep_states[model] is SleepState.WAKING:
            self._leave_line(model)  # it could not be woken
        self.sleep_states[model] = SleepState.ASLEEP

    def paused(self, model: int) -> None:
        assert self.sleep_states[model] is SleepState.FALLING_ASLEEP
        self.sleep_states[model] = SleepState.PAUSED

    def resumed(self, model: int) -> None:
        assert self.sleep_states[model] is SleepState.PAUSED
        self.sleep_states[model] = SleepState.AWAKE
        self._leave_line(model)

    def sleep_cancelled(self, model: int) -> int | None:
        """Keep a model awake if its requests take too long. Returns the model that therefore stays asleep, if any."""
        assert self.sleep_states[model] is SleepState.FALLING_ASLEEP
        self.sleep_states[model] = SleepState.AWAKE
        self._leave_line(model)
        asleep = (m for m in self.wanted if self.sleep_states[m] is SleepState.ASLEEP)
        loser = next((m for m in asleep if not self._needs_operator(m)), None)
        if loser is not None:
            self.cancel_wake(loser)
        return loser

    def woke(self, model: int) -> None:
        assert self.sleep_states[model] is SleepState.WAKING
        self.sleep_states[model] = SleepState.AWAKE
        self._leave_line(model)

    def died(self, model: int) -> None:
        """Mark a model as dead: all its engines have been given up."""
        self.sleep_states[model] = SleepState.DEAD
        self._leave_line(model)

    def _leave_line(self, model: int) -> None:
        self.cancel_wake(model)
        self._places.pop(model, None)

    def check(self) -> None:
        """Raise `AssertionError` unless the models in memory fit together."""
        resident = self._resident()
        assert len(resident) <= self._most
        assert sum(self._shares[m] for m in resident) <= 1 + EPSILON
        assert not any(self.sleep_states[m] is SleepState.DEAD for m in self.wanted)
