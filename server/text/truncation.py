"""`Truncation`: how a prompt that is too long is shortened, when its client asks for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Prompts have `limit` tokens at most; what is beyond is cut off at the `side`."""

    limit: int
    side: Side

    def text(self, text: str, longest: int) -> str:
        """Of a text with more than `longest` characters, those that any of the tokens to keep can be in."""
        return text[-longest:] if self.side == "left" else text[:longest]

    def ids(self, ids: list[int], bos: int | None = None) -> list[int]:
        """`bos`: a token that was put before the text, and stays there."""
        if len(ids) <= self.limit:
            return ids
        if self.side == "right":
            return ids[: self.limit]
        kept = 1 if ids[0] == bos and self.limit else 0
        return ids[:kept] + ids[len(ids) - self.limit + kept :]
