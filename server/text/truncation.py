"""`Truncation`: how to shorten a prompt that is too long, at the client's request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts prompts to at most `limit` tokens, at `side`."""

    limit: int
    side: Side

    def text(self, text: str, longest: int) -> str:
        """Cut a text to the `longest` characters that the kept tokens can cover."""
        return text[-longest:] if self.side == "left" else text[:longest]

    def ids(self, ids: list[int], bos: int | None = None) -> list[int]:
        """Cut token ids. `bos`: a leading token to keep."""
        if len(ids) <= self.limit:
            return ids
        if self.side == "right":
            return ids[: self.limit]
        kept = 1 if ids[0] == bos and self.limit else 0
        return ids[:kept] + ids[len(ids) - self.limit + kept :]
