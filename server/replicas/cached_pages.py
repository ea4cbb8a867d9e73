"""`CachedPages`: an API process's view of the KV pages that an engine has cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from weft.engine.wire.messages import PageChanges
from weft.engine.wire.page_keys import BRIEF


class CachedPages:
    """The pages that the engine reported, and those that requests just sent there will compute.

    A stale entry only costs time: the engine checks its own prefix index.
    """

    def __init__(self, pages: bytes = b"") -> None:
        """`pages`: concatenated brief keys, as engines report them."""
        self._reported = set(_split(pages))
        self._expected: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._reported)

    def update(self, news: PageChanges) -> None:
        if news.entered:
            self._reported.update(_split(news.entered))
        if news.left:
            self._reported.difference_update(_split(news.left))

    def expect(self, keys: Iterable[bytes]) -> None:
        """Add the pages of a request that was sent to the engine, until `settle`."""
        self._expected.update(keys)

    def settle(self, keys: Iterable[bytes]) -> None:
        """Drop expected pages: the engine has computed and reported them, or never will."""
        for key in keys:
            if self._expected[key] > 1:
                self._expected[key] -= 1
            else:
                del self._expected[key]

    def match(self, keys: Sequence[bytes]) -> int:
        """The number of leading pages of a prompt that are cached or expected."""
        reported, expected = self._reported, self._expected
        for i, key in enumerate(keys):
            if key not in reported and key not in expected:
                return i
        return len(keys)


def _split(pages: bytes) -> list[bytes]:
    return [pages[i : i + BRIEF] for i in range(0, len(pages), BRIEF)]
