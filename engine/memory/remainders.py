"""`Remainders`: storage for the ends of pages that could not be packed: slots and extents are sized for packed pages.

Pages that cannot be packed are rare, so there is storage for few (`remainders_for`). Beyond that, a page is not kept.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SHARE = 32
"""Places (slots or extents) per remainder."""


def remainders_for(places: int) -> int:
    return -(-places // SHARE)


class Remainders:
    """Assigns remainders to places, which are numbers of slots or extents. Thread-safe.

    A place loses its remainder when something else is written there (`drop`), not when it becomes free.
    """

    def __init__(self, count: int, memory: Bytes | None = None, remainder_bytes: int = 0) -> None:
        """`memory [count, stride]` holds remainders on the host, each in the first `remainder_bytes` of a row."""
        self.memory = memory if memory is not None else np.empty((count, 0), np.uint8)
        self.remainder_bytes = remainder_bytes
        self._free = list(range(count - 1, -1, -1))
        self._at: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, place: int) -> int | None:
        """Return the remainder of a place; None if its page is packed or it has none."""
        return self._at.get(place)

    def bytes_of(self, place: int) -> Bytes | None:
        """Return the memory `[remainder_bytes]` of a place's remainder, or None."""
        remainder = self._at.get(place)
        return None if remainder is None else self.memory[remainder, : self.remainder_bytes]

    def take(self, place: int) -> int | None:
        """Return the remainder of a place, assigning a free one if needed; None if none is free."""
        with self._lock:
            if place not in self._at:
                if not self._free:
                    return None
                self._at[place] = self._free.pop()
            return self._at[place]

    def reserve(self, place: int) -> Bytes | None:
        """Like `take`, but return the memory."""
        self.take(place)
        return self.bytes_of(place)

    def claim(self, place: int, remainder: int) -> bool:
        """Assign a remainder found at start to its place. Returns False if another place has it."""
        with self._lock:
            if remainder not in self._free:
                return False
            self._free.remove(remainder)
            self._at[place] = remainder
            return True

    def drop(self, place: int) -> None:
        """Free the remainder of a place, if it has one."""
        with self._lock:
            if (remainder := self._at.pop(place, None)) is not None:
                self._free.append(remainder)
