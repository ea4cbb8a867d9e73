"""`Rests`: room for the ends of pages that could not be packed: a slot or extent of packed pages is too short for them.

Pages that cannot be packed are rare, so there is room for few (`rests_for`). A page for which none is left is not kept.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SHARE = 32
"""places for each rest"""


def rests_for(places: int) -> int:
    return -(-places // SHARE)


class Rests:
    """Whose each rest is, by the number of a slot or extent. Any thread may call.

    What a place had is let go when something else is written there (`drop`), not when it becomes free.
    """

    def __init__(self, count: int, memory: Bytes | None = None, rest_bytes: int = 0) -> None:
        """memory `[count, stride]`: of those on the host, a rest is a row's first `rest_bytes`."""
        self.memory = memory if memory is not None else np.empty((count, 0), np.uint8)
        self.rest_bytes = rest_bytes
        self._free = list(range(count - 1, -1, -1))
        self._at: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, place: int) -> int | None:
        """None: the place holds a packed page, or none."""
        return self._at.get(place)

    def end(self, place: int) -> Bytes | None:
        """`[rest_bytes]` of the page there; None: it is packed."""
        rest = self._at.get(place)
        return None if rest is None else self.memory[rest, : self.rest_bytes]

    def take(self, place: int) -> int | None:
        """The rest that the place has, or a new one for it; None: none is left."""
        with self._lock:
            if place not in self._at:
                if not self._free:
                    return None
                self._at[place] = self._free.pop()
            return self._at[place]

    def room(self, place: int) -> Bytes | None:
        """As `take`, its memory."""
        self.take(place)
        return self.end(place)

    def claim(self, place: int, rest: int) -> bool:
        """It is the place's already, found at start. False: it is another's."""
        with self._lock:
            if rest not in self._free:
                return False
            self._free.remove(rest)
            self._at[place] = rest
            return True

    def drop(self, place: int) -> None:
        """What is written to the place next needs none, so far."""
        with self._lock:
            if (rest := self._at.pop(place, None)) is not None:
                self._free.append(rest)
