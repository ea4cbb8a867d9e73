"""`PrefixIndex`: the tree of all pages whose KV is kept somewhere, and where each of them is.

A full page is keyed by a chained xxh3-128 over (parent key, token ids), the chain's root being the tenant's salt and
the model id. The hash only finds: token ids and parent are compared before an entry is believed. An entry is the one
truth about where its page lies: on the GPU, in a host slot, in an SSD extent, or in several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.wire import page_keys

Tokens = npt.NDArray[np.int32]
NOWHERE = -1


class PrefixEntry:
    """One full page. `parent` is the entry of the page before it, None for a first page."""

    __slots__ = (
        "children", "extent", "host", "key", "on_ssd", "page", "parent", "promised", "salt", "spilled", "stored",
        "tokens", "used",
    )  # fmt: skip

    def __init__(self, key: bytes, parent: PrefixEntry | None, tokens: bytes, salt: str) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.page = NOWHERE
        """GPU page"""
        self.host = NOWHERE
        """slot of the host pool"""
        self.extent = NOWHERE
        """extent of the SSD store"""
        self.used = 0
        """the index's clock at the last use of its chain"""
        self.spilled = -1
        """the clock of the use after which it was last stored for lying idle"""
        self.promised = 0.0
        """monotonic seconds until which a client was promised that it is evicted last; 0: none was"""
        self.children = 0
        self.stored = 0
        """children that are in a lower tier"""
        self.on_ssd = 0
        """children that are on the SSD"""

    @property
    def lower(self) -> bool:
        """Is it in a tier below the GPU?"""
        return self.host >= 0 or self.extent >= 0

    @property
    def anywhere(self) -> bool:
        return self.page >= 0 or self.host >= 0 or self.extent >= 0

    def spared_by_gpu(self) -> bool:
        """May its GPU page go? Never the last copy of a parent before its children."""
        return self.lower or not self.children

    def spared_by_host(self) -> bool:
        if self.extent >= 0:
            return True
        return not self.stored if self.page >= 0 else not self.children

    def spared_by_ssd(self) -> bool:
        # A child on the SSD without its parent there would be lost to the next start.
        if self.on_ssd:
            return False
        if self.host >= 0:
            return True
        return not self.stored if self.page >= 0 else not self.children


class Change(NamedTuple):
    """A tier has gained, or lost, its copy of an entry."""

    entry: PrefixEntry
    tier: str
    """"page", "host" or "extent": the attribute that says where the copy is"""
    there: bool


class Hits(NamedTuple):
    """Prompt tokens by the fastest tier that has them."""

    gpu: int = 0
    host: int = 0
    ssd: int = 0

    @classmethod
    def of(cls, entries: Sequence[PrefixEntry], page_size: int) -> Hits:
        gpu = sum(e.page >= 0 for e in entries)
        host = sum(e.page < 0 <= e.host for e in entries)
        return cls(gpu * page_size, host * page_size, (len(entries) - gpu - host) * page_size)


NO_HITS = Hits()


class PrefixIndex:
    """Entries by key. Single-threaded: only the scheduler's thread touches it."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._entries: dict[bytes, PrefixEntry] = {}
        self.on_spared: Callable[[PrefixEntry], None] = lambda _entry: None
        """told of an entry that gained a copy, or lost a child or a child's copy: a tier may now do without it"""
        self.changes: list[Change | None] | None = None
        """of entries' copies, in order, for whoever takes them away; None in it: all was forgotten. None: not noted"""
        self.on_key: Callable[[bytes, bool], None] = lambda _key, _entered: None
        """told of a key that entered the index (True) or left it"""
        self.on_broken: Callable[[PrefixEntry], None] = lambda _entry: None
        """told of an entry that left the index although it was promised"""
        self.clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterable[PrefixEntry]:
        return self._entries.values()

    def root(self, salt: str) -> bytes:
        """The key before a first page: tenants with different salts share nothing (docs/pitfalls.md 30)."""
        return page_keys.root(self.model_id, salt)

    @staticmethod
    def chain(parent: bytes, tokens: bytes) -> bytes:
        return page_keys.chain(parent, tokens)

    def keys(self, tokens: Tokens, page_size: int, salt: str) -> list[bytes]:
        """Keys of the full pages of `tokens`, first page first."""
        return page_keys.page_keys(self.root(salt), tokens, page_size, self.chain)

    def match(self, tokens: Tokens, keys: list[bytes], page_size: int, salt: str) -> list[PrefixEntry]:
        """The longest chain of entries that holds the beginning of `tokens`, in whatever tiers, one entry a page.

        The caller passes only as many keys as may be reused: at least one token is always left to compute.
        """
        found: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for i, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or entry.parent is not parent or entry.salt != salt or not entry.anywhere:
                break
            if entry.tokens != tokens[i * page_size : (i + 1) * page_size].tobytes():
                break
            found.append(entry)
            parent = entry
        return found

    def publish(self, parent: PrefixEntry | None, key: bytes, tokens: bytes, salt: str) -> PrefixEntry | None:
        """The entry that stands for these tokens after `parent`: a new one, nowhere yet, or the one that is there.

        None when the key is taken by other tokens (a collision): the chain cannot go on.
        """
        entry = self._entries.get(key)
        if entry is not None:
            same = entry.parent is parent and entry.tokens == tokens and entry.salt == salt
            return entry if same else None
        entry = PrefixEntry(key, parent, tokens, salt)
        self._entries[key] = entry
        self.on_key(key, True)
        if parent is not None:
            parent.children += 1
        return entry

    def contains(self, entry: PrefixEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def find(self, key: bytes) -> PrefixEntry | None:
        return self._entries.get(key)

    def use(self, entries: Iterable[PrefixEntry]) -> None:
        """A chain was used: all of it counts as used now."""
        self.clock += 1
        for entry in entries:
            entry.used = self.clock

    def set_page(self, entry: PrefixEntry, page: int) -> None:
        if self.changes is not None:
            self._note(entry, "page", page)
        entry.page = page
        self._moved(entry, 0, 0)

    def set_host(self, entry: PrefixEntry, slot: int) -> None:
        if self.changes is not None:
            self._note(entry, "host", slot)
        was = entry.lower
        entry.host = slot
        self._moved(entry, entry.lower - was, 0)

    def set_extent(self, entry: PrefixEntry, extent: int) -> None:
        if self.changes is not None:
            self._note(entry, "extent", extent)
        was, had = entry.lower, entry.extent >= 0
        entry.extent = extent
        self._moved(entry, entry.lower - was, (extent >= 0) - had)

    def _note(self, entry: PrefixEntry, tier: str, place: int) -> None:
        """The entry's copy in a tier is about to move; whether there is one is what counts."""
        there = place >= 0
        if self.changes is not None and there != (getattr(entry, tier) >= 0) and self.contains(entry):
            self.changes.append(Change(entry, tier, there))

    def _moved(self, entry: PrefixEntry, stored: int, on_ssd: int) -> None:
        """The entry gained or lost a copy; the changes of its parent's counts are given."""
        parent = entry.parent
        if not self.contains(entry):
            return
        if parent is not None:
            parent.stored += stored
            parent.on_ssd += on_ssd
            if stored < 0 or on_ssd < 0:
                self.on_spared(parent)
        if entry.anywhere:
            self.on_spared(entry)
        else:
            self._drop_if_nowhere(entry)

    def _drop_if_nowhere(self, entry: PrefixEntry) -> None:
        """An entry that a failed load left nowhere stays while it has children: computed again, they are of use."""
        while not entry.anywhere and not entry.children and self.contains(entry):
            del self._entries[entry.key]
            self.on_key(entry.key, False)
            if entry.promised:
                self.on_broken(entry)
            parent = entry.parent
            if parent is None:
                return
            parent.children -= 1
            self.on_spared(parent)
            entry = parent

    def clear(self) -> list[PrefixEntry]:
        """Forget everything; returns what was there."""
        entries = list(self._entries.values())
        self._entries.clear()
        if self.changes is not None:
            self.changes.append(None)
        for entry in entries:
            self.on_key(entry.key, False)
        return entries

    def check(self) -> None:
        """Raise `AssertionError` when the counters of the tree disagree with it."""
        counts: dict[bytes, list[int]] = {key: [0, 0, 0] for key in self._entries}
        for key, entry in self._entries.items():
            assert entry.key == key, "an entry lies under another key"
            assert entry.anywhere or entry.children, "an entry that is nowhere has no children"
            if entry.parent is not None:
                assert self.contains(entry.parent), "a parent was dropped before its child"
                count = counts[entry.parent.key]
                count[0] += 1
                count[1] += entry.lower
                count[2] += entry.extent >= 0
        for key, entry in self._entries.items():
            assert [entry.children, entry.stored, entry.on_ssd] == counts[key], "an entry's children are miscounted"
