"""`StateTable`: the pages of the running requests' recurrent states, by row of the slot table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class StateTable:
    """Each row owns two states of `pages` pages (n). Before its first step, it may also hold a state of the prefix
    index, which it reads and never writes."""

    def __init__(self, num_slots: int, pages: int) -> None:
        self.pages = pages
        self.own = np.zeros((num_slots, 2, pages), np.int32)
        self.at = np.full((num_slots, 2), -1, np.int32)
        """Tokens that each own state stands for once all launched steps are done; -1: it is unwritten."""
        self.current = np.full(num_slots, -1, np.int8)
        """The own state to read next; -1: `attached`, or none if the row is at position 0."""
        self.attached = np.zeros((num_slots, pages), np.int32)  # pages in the index; 0: none

    def assign(self, slot: int, own: Pages, attached: Pages) -> None:
        """Give a row its pages: `own [2n]`, and `attached [n]` or `[0]`."""
        self.own[slot] = own.reshape(2, self.pages)
        self.at[slot], self.current[slot] = -1, -1
        self.attached[slot] = attached if len(attached) else 0

    def detach(self, slot: int) -> Pages:
        """Remove the pages that the row holds in the index, and return them, to be freed after a fence."""
        pages = self.attached[slot][self.attached[slot] > 0]
        self.attached[slot] = 0
        return pages

    def held(self, slot: int) -> Pages:
        return np.concatenate((self.attached[slot][self.attached[slot] > 0], self.own[slot].reshape(-1)))
