"""A model of mbarriers and of the warps that meet at them: finds warps that wait forever and data overwritten while it
is read.

Agents are generators. The code between two yields runs at once; each yield gives a function that returns whether the
awaited event has happened. A warp that looks late finds the barrier in its current state: as on a GPU, it can miss a
phase.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence

Agent = Generator[Callable[[], bool], None, None]


class Barrier:
    """A phase ends after `count` arrivals and the announced bytes."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, announced: int = 0) -> None:
        self.bytes += announced
        self.pending -= 1
        assert self.pending >= 0, "an arrival too many"
        self._end()

    def land(self, landed: int) -> None:
        self.bytes -= landed
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def past(self, parity: int) -> Callable[[], bool]:
        """Return a check for the end of the phase of this parity, current or previous, as `try_wait.parity` does."""
        return lambda: (self.phase & 1) != parity


class Rendezvous:
    """`bar.sync` of the warps of a warpgroup."""

    def __init__(self, warps: int) -> None:
        self.warps, self.there, self.turn = warps, 0, 0

    def sync(self) -> Callable[[], bool]:
        self.there += 1
        turn = self.turn
        if self.there == self.warps:
            self.there, self.turn = 0, turn + 1
        return lambda: self.turn > turn


def run(agents: Sequence[Agent], seed: int, limit: int = 200_000) -> None:
    """Run all agents to their end, in a random order; some are slow for a while. Raises `AssertionError` if all
    wait."""
    rng = random.Random(seed)
    waits: dict[Agent, Callable[[], bool]] = {agent: lambda: True for agent in agents}
    slow: dict[Agent, int] = {}
    for _ in range(limit):
        if not waits:
            return
        if rng.random() < 0.02:
            slow[rng.choice(list(waits))] = rng.randrange(200)
        ready = [agent for agent, wait in waits.items() if wait()]
        assert ready, f"{len(waits)} agents wait for ever"
        awake = [agent for agent in ready if slow.get(agent, 0) <= 0] or ready
        slow = {agent: left - 1 for agent, left in slow.items() if left > 0}
        agent = rng.choice(awake)
        try:
            waits[agent] = next(agent)
        except StopIteration:
            del waits[agent]
    raise AssertionError("no end")
