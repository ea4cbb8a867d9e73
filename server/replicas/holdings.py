"""`Holdings`: which KV pages an engine keeps, as far as an API process knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from weft.engine.wire.messages import PageNews
from weft.engine.wire.page_keys import BRIEF


class Holdings:
    """What the engine has told, and what requests that were just sent there will make it keep.

    A mistake costs time alone: the engine looks for itself what it has.
    """

    def __init__(self, pages: bytes = b"") -> None:
        """`pages`: brief keys, one after the other, as an engine tells them."""
        self._kept = set(_split(pages))
        self._coming: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def hear(self, news: PageNews) -> None:
        if news.entered:
            self._kept.update(_split(news.entered))
        if news.left:
            self._kept.difference_update(_split(news.left))

    def expect(self, keys: Iterable[bytes]) -> None:
        """A request with these pages was sent there. `settle` follows."""
        self._coming.update(keys)

    def settle(self, keys: Iterable[bytes]) -> None:
        """It has computed them, and told so, or never will."""
        for key in keys:
            if self._coming[key] > 1:
                self._coming[key] -= 1
            else:
                del self._coming[key]

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's pages, from its first one on, are there or about to be."""
        kept, coming = self._kept, self._coming
        for i, key in enumerate(keys):
            if key not in kept and key not in coming:
                return i
        return len(keys)


def _split(pages: bytes) -> list[bytes]:
    return [pages[i : i + BRIEF] for i in range(0, len(pages), BRIEF)]
