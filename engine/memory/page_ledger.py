"""`PageLedger`: the pages that entered and left the prefix index since the last report."""

from __future__ import annotations

from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.wire.messages import PageChanges
from weft.engine.wire.page_keys import BRIEF


class PageLedger:
    """Records the changes of an index. Only the last change of a page counts, so that a report can also be applied by
    a client that has part of it already."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._moves: dict[bytes, bool] = {}
        index.on_key = self._note

    def _note(self, key: bytes, entered: bool) -> None:
        self._moves[key] = entered

    def all(self) -> bytes:
        """Return brief keys of all pages."""
        return b"".join([entry.key[:BRIEF] for entry in self._index.entries()])

    def take(self) -> PageChanges:
        """Return the changes since the last call."""
        moves, self._moves = self._moves, {}
        return PageChanges(
            b"".join([key[:BRIEF] for key, entered in moves.items() if entered]),
            b"".join([key[:BRIEF] for key, entered in moves.items() if not entered]),
        )
