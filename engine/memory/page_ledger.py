"""`PageLedger`: which pages entered the prefix index and which left it, since that was last told."""

from __future__ import annotations

from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.wire.messages import PageChanges
from weft.engine.wire.page_keys import BRIEF


class PageLedger:
    """Of an index, from now on. A page that came and went between two tellings is told by where that ended, so that
    news may be told to somebody who has them in part already."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._moves: dict[bytes, bool] = {}
        index.on_key = self._note

    def _note(self, key: bytes, entered: bool) -> None:
        self._moves[key] = entered

    def all(self) -> bytes:
        """Brief keys of all pages there are."""
        return b"".join([entry.key[:BRIEF] for entry in self._index.entries()])

    def take(self) -> PageChanges:
        """What has happened since the last call."""
        moves, self._moves = self._moves, {}
        return PageChanges(
            b"".join([key[:BRIEF] for key, entered in moves.items() if entered]),
            b"".join([key[:BRIEF] for key, entered in moves.items() if not entered]),
        )
