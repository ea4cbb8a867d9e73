"""A model of mbarriers and of the warps that meet at them: who waits for ever, and who overwrites what is read?

Agents are generators. What they do between two yields happens at once; they yield what they wait for, a function that
says whether it has come. A warp that looks late finds the barrier as it is then: as on a GPU, it can miss a phase.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence

Agent = Generator[Callable[[], bool], None, None]


class Barrier:
    """`count` arrivals, and the bytes that were announced, end a phase."""

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
        """Has the phase of this parity ended? Of the present and the one before, as `try_wait.parity` has it."""
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
    """All agents to their end, in a random order; some are slow for a while. Raises `AssertionError` if all wait."""
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
