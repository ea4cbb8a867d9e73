"""`ConversationPages`: the last pages of conversations, by the names that their next turns may have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from weft.engine.memory.prefix_index import PrefixEntry, PrefixIndex

MAX_PAGES = 1 << 20
"""Maximum number of remembered page keys, over all conversations."""
KEY_BYTES = 16


class ConversationPages:
    """Keeps keys only, so that it does not affect evictions. Evicted pages are not found."""

    def __init__(self, index: PrefixIndex, max_pages: int = MAX_PAGES) -> None:
        self._index = index
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()
        """Page keys of a chain by name, least recently remembered first."""
        self._max_pages = max_pages
        self._num_pages = 0

    def remember(self, names: Iterable[bytes], chain: Iterable[PrefixEntry]) -> None:
        """Store the chain, first page first, that a conversation with these names ended with."""
        keys = b"".join([entry.key for entry in chain])
        for name in names:
            self._drop(name)
            self._keys[name] = keys
            self._num_pages += len(keys) // KEY_BYTES
        while self._num_pages > self._max_pages:
            self._drop(next(iter(self._keys)))

    def _drop(self, name: bytes) -> None:
        self._num_pages -= len(self._keys.pop(name, b"")) // KEY_BYTES

    def chain(self, names: Iterable[bytes]) -> list[PrefixEntry]:
        """Return the pages still kept, first page first, of the first of these names that is known."""
        keys = next((self._keys[name] for name in names if name in self._keys), b"")
        chain: list[PrefixEntry] = []
        for at in range(0, len(keys), KEY_BYTES):
            entry = self._index.find(keys[at : at + KEY_BYTES])
            if entry is None or not entry.anywhere:
                break
            chain.append(entry)
        return chain
