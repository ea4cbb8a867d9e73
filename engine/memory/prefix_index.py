"""`PrefixIndex`: the tree of all pages whose KV is kept in some tier, and their locations.

The key of a full page is a chained xxh3-128 over (parent key, token ids, images). The root of a chain is the tenant's
salt and the model id. A hash match is verified by comparing token ids, images and parent. The entry is the only record
of where its page is: on the GPU, in a host slot, in an SSD extent, or in several of these.

A recurrent state at the end of a page is a chain of n entries below that page's entry, one for each of its pages. Their
tokens (`page_keys.state_tokens`) are in no prompt, so everything that moves, evicts or stores entries handles them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.wire import page_keys

Tokens = npt.NDArray[np.int32]
NOWHERE = -1
NO_IMAGES: Mapping[int, bytes] = {}


@dataclass(eq=False, slots=True)
class PrefixEntry:
    """One full page. `parent` is the entry of the page before it, None for a first page."""

    key: bytes
    parent: PrefixEntry | None
    tokens: bytes  # int32 ids, then the parts of the images that the page overlaps (`page_keys.image_parts`)
    salt: str
    page: int = NOWHERE  # GPU page, or `NOWHERE`
    host: int = NOWHERE  # slot of the host pool, or `NOWHERE`
    extent: int = NOWHERE  # extent of the SSD store, or `NOWHERE`
    used: int = 0  # the index's clock at the last use of the chain
    spilled: int = -1  # the value of `used` when it was last stored because it was idle
    retained_until: float = 0.0  # monotonic seconds until which the page is evicted last; 0 if it is not retained
    children: int = 0
    stored: int = 0  # children that are in a lower tier
    on_ssd: int = 0  # children that are on the SSD
    state: PrefixEntry | None = None  # the child with the first, or next, page of the recurrent state here

    @property
    def lower(self) -> bool:
        """Whether the page is in a tier below the GPU."""
        return self.host >= 0 or self.extent >= 0

    @property
    def anywhere(self) -> bool:
        return self.page >= 0 or self.host >= 0 or self.extent >= 0

    @property
    def of_state(self) -> bool:
        """Whether the page holds part of a recurrent state, instead of K and V."""
        return page_keys.of_state(self.tokens)

    def state_pages(self, pages: int) -> list[PrefixEntry]:
        """Return the entries of the recurrent state here, which has this many pages; none unless all are in a tier."""
        found: list[PrefixEntry] = []
        entry = self.state
        while entry is not None and entry.anywhere:
            found.append(entry)
            entry = entry.state
        return found if len(found) == pages else []

    def evictable_from_gpu(self) -> bool:
        """Return whether the GPU may evict the page. The last copy of a parent must outlive its children."""
        return self.lower or not self.children

    def evictable_from_host(self) -> bool:
        if self.extent >= 0:
            return True
        return not self.stored if self.page >= 0 else not self.children

    def evictable_from_ssd(self) -> bool:
        # After a restart, a child on the SSD is useless without its parent there.
        if self.on_ssd:
            return False
        if self.host >= 0:
            return True
        return not self.stored if self.page >= 0 else not self.children


class Change(NamedTuple):
    """A tier has gained or lost its copy of an entry."""

    entry: PrefixEntry
    tier: str  # the attribute with the copy's location: "page", "host" or "extent"
    there: bool


class Hits(NamedTuple):
    """Prompt tokens by the fastest tier that holds them."""

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
    """Entries by key. Single-threaded: only the scheduler's thread uses it."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._entries: dict[bytes, PrefixEntry] = {}
        self.on_evictable: Callable[[PrefixEntry], None] = lambda _entry: None
        """Called with an entry that gained a copy, or lost a child or a child's copy: a tier may now evict it."""
        self.changes: list[Change | None] | None = None
        """Changes in order, until a reader replaces the list; a None item means that the index was cleared. The
        attribute is None if changes are not recorded."""
        self.on_key: Callable[[bytes, bool], None] = lambda _key, _entered: None
        """Called with a key that entered the index (True) or left it (False)."""
        self.on_retained_dropped: Callable[[PrefixEntry], None] = lambda _entry: None
        """Called with a retained entry that left the index."""
        self.clock = 0
        self.states = dict.fromkeys(("page", "host", "extent"), 0)
        """Pages of recurrent states by the attribute of the tier that holds a copy."""

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterable[PrefixEntry]:
        return self._entries.values()

    def root(self, salt: str) -> bytes:
        """Return the parent key of first pages. Tenants with different salts share no pages (docs/pitfalls.md 30)."""
        return page_keys.root(self.model_id, salt)

    @staticmethod
    def chain(parent: bytes, tokens: bytes) -> bytes:
        return page_keys.chain(parent, tokens)

    def keys(self, tokens: Tokens, page_size: int, salt: str, images: Mapping[int, bytes] = NO_IMAGES) -> list[bytes]:
        return page_keys.page_keys(self.root(salt), tokens, page_size, self.chain, images)

    def match(
        self, tokens: Tokens, keys: list[bytes], page_size: int, salt: str, images: Mapping[int, bytes] = NO_IMAGES
    ) -> list[PrefixEntry]:
        """Return the longest chain of entries that holds the beginning of `tokens`, in any tiers, one entry per page.
        Pass only as many keys as may be reused: at least one token must be left to compute. images: the prompt's
        `page_keys.image_parts`."""
        found: list[PrefixEntry] = []
        parent: PrefixEntry | None = None
        for i, key in enumerate(keys):
            entry = self._entries.get(key)
            if entry is None or entry.parent is not parent or entry.salt != salt or not entry.anywhere:
                break
            if entry.tokens != tokens[i * page_size : (i + 1) * page_size].tobytes() + images.get(i, b""):
                break
            found.append(entry)
            parent = entry
        return found

    def publish(self, parent: PrefixEntry | None, key: bytes, tokens: bytes, salt: str) -> PrefixEntry | None:
        """Return the entry of these tokens after `parent`, creating one without a location if needed. None on a hash
        collision: other tokens have the key, and the chain cannot continue."""
        entry = self._entries.get(key)
        if entry is not None:
            same = entry.parent is parent and entry.tokens == tokens and entry.salt == salt
            return entry if same else None
        entry = PrefixEntry(key, parent, tokens, salt)
        self._entries[key] = entry
        self.on_key(key, True)
        if parent is not None:
            parent.children += 1
            if entry.of_state:
                parent.state = entry
        return entry

    def contains(self, entry: PrefixEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def find(self, key: bytes) -> PrefixEntry | None:
        return self._entries.get(key)

    def use(self, entries: Iterable[PrefixEntry]) -> None:
        """Mark all entries of a chain as used now."""
        self.clock += 1
        for entry in entries:
            entry.used = self.clock

    def set_page(self, entry: PrefixEntry, page: int) -> None:
        self._note(entry, "page", page)
        entry.page = page
        self._moved(entry, 0, 0)

    def set_host(self, entry: PrefixEntry, slot: int) -> None:
        self._note(entry, "host", slot)
        was = entry.lower
        entry.host = slot
        self._moved(entry, entry.lower - was, 0)

    def set_extent(self, entry: PrefixEntry, extent: int) -> None:
        self._note(entry, "extent", extent)
        was, had = entry.lower, entry.extent >= 0
        entry.extent = extent
        self._moved(entry, entry.lower - was, (extent >= 0) - had)

    def _note(self, entry: PrefixEntry, tier: str, place: int) -> None:
        """Record a change if the tier is about to gain or lose its copy. States are counted and not reported."""
        there = place >= 0
        if self.changes is None and not entry.of_state:
            return
        if there == (getattr(entry, tier) >= 0) or not self.contains(entry):
            return
        if entry.of_state:
            self.states[tier] += 1 if there else -1
        elif self.changes is not None:
            self.changes.append(Change(entry, tier, there))

    def _moved(self, entry: PrefixEntry, stored: int, on_ssd: int) -> None:
        """Update the tree after the entry gained or lost a copy, given the changes of its parent's counts."""
        parent = entry.parent
        if not self.contains(entry):
            return
        if parent is not None:
            parent.stored += stored
            parent.on_ssd += on_ssd
            if stored < 0 or on_ssd < 0:
                self.on_evictable(parent)
        if entry.anywhere:
            self.on_evictable(entry)
        else:
            self._drop_if_nowhere(entry)

    def _drop_if_nowhere(self, entry: PrefixEntry) -> None:
        """Drop the entry if it is nowhere. One that a failed load left nowhere stays while it has children, which are
        usable once it is computed again."""
        while not entry.anywhere and not entry.children and self.contains(entry):
            del self._entries[entry.key]
            self.on_key(entry.key, False)
            if entry.retained_until:
                self.on_retained_dropped(entry)
            parent = entry.parent
            if parent is None:
                return
            parent.children -= 1
            if parent.state is entry:
                parent.state = None
            self.on_evictable(parent)
            entry = parent

    def clear(self) -> list[PrefixEntry]:
        entries = list(self._entries.values())
        self._entries.clear()
        self.states = dict.fromkeys(self.states, 0)
        if self.changes is not None:
            self.changes.append(None)
        for entry in entries:
            self.on_key(entry.key, False)
        return entries

    def check(self) -> None:
        """Raise `AssertionError` if the counters disagree with the tree."""
        counts: dict[bytes, list[int]] = {key: [0, 0, 0] for key in self._entries}
        for key, entry in self._entries.items():
            assert entry.key == key, "an entry is stored under another key"
            assert entry.anywhere or entry.children, "an entry that is nowhere has no children"
            if entry.parent is not None:
                assert self.contains(entry.parent), "a parent was dropped before its child"
                count = counts[entry.parent.key]
                count[0] += 1
                count[1] += entry.lower
                count[2] += entry.extent >= 0
        of_states = [entry for entry in self._entries.values() if entry.of_state]
        for tier, pages in self.states.items():
            assert pages == sum(getattr(e, tier) >= 0 for e in of_states), "pages of states are miscounted"
        for entry in of_states:
            assert entry.parent is not None, "a state has no page before it"
            assert entry.parent.state is entry, "a state is not found below its page"
        for key, entry in self._entries.items():
            assert entry.state is None or self.contains(entry.state), "a state that was dropped is found"
            assert [entry.children, entry.stored, entry.on_ssd] == counts[key], "an entry's children are miscounted"
