"""`Meeting`: the twin of how the parts of a tile meet in `mid_hopper`, for tests of every order."""

from __future__ import annotations


class Meeting:
    """The word in which the parts of a tile meet: the twin of `mid_hopper._shares` and `_gone`, step by step.

    Each call is one atomic operation of the kernel; a test lets parts make them in any order.
    """

    def __init__(self, parts: int) -> None:
        self.parts, self.word = parts, 0

    def add(self, number: int) -> int:
        before = self.word
        self.word += number
        return before

    def arrive(self) -> tuple[int, bool, int]:
        """(parts that are there, whether this is the last, shares of those that gave up)."""
        before = self.add(1)
        arrived = (before & 255) + 1
        is_last = arrived == self.parts
        return arrived, is_last, (before >> 8) & 255 if is_last else 0

    def look(self) -> int:
        return self.add(0) & 255

    def give_up(self, part: int) -> int:
        """Parts that are there: all of them, if the last came after all."""
        return self.add(256 << part) & 255

    def leave(self) -> None:
        if self.add(65536) >> 16 == self.parts - 1:
            self.word = 0
