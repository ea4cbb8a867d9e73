"""`Meeting`: the reference of how the splits of a tile meet in `mid_hopper`, for tests of every order."""

from __future__ import annotations


class Meeting:
    """The word in which the splits of a tile meet: the reference of `mid_hopper._shares` and `_gone`, step by step.

    Each call is one atomic operation of the kernel. A test makes the splits call in any order.
    """

    def __init__(self, parts: int) -> None:
        self.parts, self.word = parts, 0

    def add(self, number: int) -> int:
        before = self.word
        self.word += number
        return before

    def arrive(self) -> tuple[int, bool, int]:
        """(splits that have arrived, whether this is the last, shares of those that gave up)."""
        before = self.add(1)
        arrived = (before & 255) + 1
        is_last = arrived == self.parts
        return arrived, is_last, (before >> 8) & 255 if is_last else 0

    def look(self) -> int:
        return self.add(0) & 255

    def give_up(self, part: int) -> int:
        """Number of splits that have arrived: all of them, if the last arrived after all."""
        return self.add(256 << part) & 255

    def leave(self) -> None:
        if self.add(65536) >> 16 == self.parts - 1:
            self.word = 0
