"""`Fairness`: who may go before the first in line, and how often."""

from __future__ import annotations

import numpy as np

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.waiting import Blocked

MAX_PASSED = 8
"""requests that may pass one that it is the turn of and that lacks pages or a seat"""
MAX_DISPLACED = 3
"""times that a request gives up its seat for a better priority"""
SEATS_AT_ONCE = 4
"""seats that may be on their way to a better priority"""


class Fairness:
    """Policy only: whoever asks does what it says, and tells it what was done."""

    def __init__(self, prefill_share: float = 0.25, *, preempt: bool = True) -> None:
        """`prefill_share`: of an iteration's prefill tokens, and of seats that are short, for the shortest prompts.

        `preempt`: a better priority takes the seat of a worse one.
        """
        self._share = prefill_share
        self._preempt = preempt
        self._credit = 0.0
        """a seat for the shortest prompt, when seats are short, is due at 1: each seat that is given adds the share"""
        self.overtaken = 0
        """requests admitted before one whose turn it was"""
        self.displaced = 0
        """seats given up for a better priority"""

    def share(self, budget: int, chunk_step: int) -> int:
        """Prefill tokens of `budget` for the shortest; what is left is room for a chunk of the first in line."""
        return max(0, min(int(self._share * budget), budget - chunk_step))

    def may_pass(self, head: Request, blocked: Blocked) -> bool:
        """May another request be admitted before the head, given what the head lacked?

        While it only waits for room in an iteration that others were promised, that takes nothing from it.
        """
        if blocked == "tokens":
            return True
        return head.passed < MAX_PASSED and (blocked == "pages" or self._credit >= 1)

    def passes(self, head: Request, blocked: Blocked) -> None:
        """Another request was admitted before the head."""
        if blocked == "tokens":
            return
        head.passed += 1
        self.overtaken += 1
        if blocked == "slots":
            self._credit -= 1 - self._share

    def seated(self) -> None:
        """The first in line was admitted."""
        self._credit = min(1.0, self._credit + self._share)

    def slots_wanted(self, waiting: int) -> int:
        """Seats to be free, or on their way, when so many wait whose priority may take them."""
        return min(waiting, SEATS_AT_ONCE) if self._preempt else 0

    def victim(self, s: SlotTable, head: Request) -> int | None:
        """The slot that gives way to the head: of the worst priority, the youngest; None when nobody has to."""
        if int(s.priority.max()) <= head.priority:
            return None  # what is quickly seen, in most iterations; rows without a request may say otherwise
        running = s.running()
        worse = running[s.priority[running] > head.priority]
        for slot in worse[np.lexsort((s.order[worse], s.priority[worse]))][::-1].tolist():
            request = s.request[slot]
            assert request is not None
            if request.displaced < MAX_DISPLACED:
                return int(slot)
        return None

    def displaces(self, head: Request, request: Request) -> None:
        """`request` gives up its seat. Nobody passes the one that it was taken for."""
        request.displaced += 1
        head.passed = MAX_PASSED
        self.displaced += 1
