"""`Operations`: what rank 0 began on the other ranks, and how it ended there."""

from __future__ import annotations

import itertools
import time

from weft.engine.ranks.links import OPERATIONS, Links

POLL_SECONDS = 1e-3  # Seconds between checks of whether the other ranks are done.
PENDING, DONE, LOST, BROKEN = range(4)  # Outcomes of an operation on another rank.


class Operations:
    """Numbers the operations in progress and collects their outcomes from the other ranks."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._outcomes = links.outcomes()[1:]
        self._outcomes[:] = DONE
        self._numbers = itertools.count()

    def begin(self) -> int:
        while self.worst(place := next(self._numbers) % OPERATIONS) == PENDING:
            pass  # its disk hangs
        self._outcomes[:, place] = PENDING
        return place

    def worst(self, place: int) -> int:
        """Return the worst outcome of any rank, or `PENDING` while it is pending on one."""
        column = self._outcomes[:, place]
        return PENDING if (column == PENDING).any() else int(column.max())

    def wait(self, place: int) -> int:
        """Return `worst` once no rank is pending. Raises `RankLost`."""
        while (worst := self.worst(place)) == PENDING:
            self._links.check()
            time.sleep(POLL_SECONDS)
        return worst

    def succeeds(self, place: int) -> bool:
        """Return whether no rank failed, once all are done. Raises `RankLost`."""
        return self.wait(place) == DONE
