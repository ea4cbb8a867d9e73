"""`PrefixIndex`: finds the pages that already hold the KV of a prompt's beginning.

A full page is keyed by a chained xxh3-128 over (parent key, token ids), the chain's root being the tenant's salt and
the model id. The hash only finds: token ids and parent are compared before an entry is believed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = npt.NDArray[np.int32]


class PrefixEntry:
    """One full page in the index. `parent` is the entry of the page before it, None for a first page."""

    __slots__ = ("children", "key", "page", "parent", "salt", "tokens")

    def __init__(self, key: bytes, page: int, parent: PrefixEntry | None, tokens: bytes, salt: str) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.children = 0


class PrefixIndex:
    """Entries by key, and the idle ones (referenced by no request) in order of last use."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id.encode()
        self._entries: dict[bytes, PrefixEntry] = {}
        self._by_page: dict[int, PrefixEntry] = {}
        self._idle: OrderedDict[int, PrefixEntry] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def idle_entries(self) -> Iterable[PrefixEntry]:
        return self._idle.values()

    def entry_of(self, page: int) -> PrefixEntry | None:
        return self._by_page.get(page)

    def root(self, salt: str) -> bytes:
        """The key before a first page: tenants with different salts share nothing (PITFALLS: timing leaks)."""
        return xxhash.xxh3_128_digest(self._model_id + b"\0" + salt.encode("utf-8", "surrogatepass"))

    @staticmethod
    def chain(parent: bytes, tokens: bytes) -> bytes:
        return xxhash.xxh3_128_digest(parent + tokens)

    def keys(self, tokens: Tokens, page_size: int, salt: str) -> list[bytes]:
        """Keys of the full pages of `tokens`, first page first."""
        raw, width = tokens.tobytes(), page_size * 4
        key, keys = self.root(salt), []
        for start in range(0, len(raw) - width + 1, width):
            key = self.chain(key, raw[start : start + width])
            keys.append(key)
        return keys

    def match(self, tokens: Tokens, keys: list[bytes], page_size: int, salt: str) -> list[PrefixEntry]:
        """The longest chain of entries that holds the beginning of `tokens`, one entry a page.

        The caller passes only as many keys as may be reused: at least one token is always left to compute.
        """
        found: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for i, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or entry.parent is not parent or entry.salt != salt:
                break
            if entry.tokens != tokens[i * page_size : (i + 1) * page_size].tobytes():
                break
            found.append(entry)
            parent = entry
        return found

    def publish(
        self, page: int, parent: PrefixEntry | None, key: bytes, tokens: bytes, salt: str
    ) -> PrefixEntry | None:
        """Enter a full, confirmed page that its request still holds.

        Returns the entry that now stands for these tokens: the new one, or the one of a page that another request
        computed first. None when the key is taken by other tokens (a collision): the chain cannot go on.
        """
        entry = self._entries.get(key)
        if entry is not None:
            same = entry.parent is parent and entry.tokens == tokens and entry.salt == salt
            return entry if same else None
        entry = PrefixEntry(key, page, parent, tokens, salt)
        self._entries[key] = entry
        self._by_page[page] = entry
        if parent is not None:
            parent.children += 1
        return entry

    def contains(self, entry: PrefixEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def mark_idle(self, entry: PrefixEntry) -> None:
        self._idle[entry.page] = entry

    def mark_held(self, entry: PrefixEntry) -> None:
        del self._idle[entry.page]

    def evict(self) -> int:
        """Drop the least recently used idle entry without children; its page is the caller's.

        There is one whenever any entry is idle: who holds a child holds its parent, so the children of an idle entry
        are idle too. Requests release their last page first, so the oldest is normally a leaf already.
        """
        return self._drop(next(e for e in self._idle.values() if e.children == 0))

    def _drop(self, entry: PrefixEntry) -> int:
        del self._idle[entry.page]
        del self._entries[entry.key]
        del self._by_page[entry.page]
        if entry.parent is not None:
            entry.parent.children -= 1
        return entry.page

    def clear(self) -> list[int]:
        """Forget everything; returns the pages that were idle, now the caller's."""
        pages = list(self._idle)
        self._entries.clear()
        self._by_page.clear()
        self._idle.clear()
        return pages

    def check(self) -> None:
        """Raise `AssertionError` when the two views of the index disagree."""
        assert len(self._entries) == len(self._by_page), "a page has two entries"
        for page, entry in self._by_page.items():
            assert entry.page == page, "an entry lies under another page"
            assert self._entries.get(entry.key) is entry, "an entry cannot be found by its key"
        for page, entry in self._idle.items():
            assert self._by_page.get(page) is entry, "an idle page is not indexed"
