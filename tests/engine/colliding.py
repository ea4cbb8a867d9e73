"""`CollidingIndex`: a prefix index whose keys have so few bits that different pages collide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import count

from weft.engine.memory.prefix_index import NO_IMAGES, PrefixEntry, PrefixIndex, Tokens


class CollidingIndex(PrefixIndex):
    """The real index over the low `bits` of its hash. Counts the collisions that its comparison detected.

    The model id is chosen so that the tenants "" and "t" have the same root.
    """

    def __init__(self, bits: int = 4) -> None:
        self._mask = (1 << bits) - 1
        for number in count():
            super().__init__(str(number))
            if self.root("") == self.root("t"):
                break
        self.refused: Counter[str] = Counter()
        """by the only difference ("tokens", "parent", "salt"), else "several"; "published": by pages published"""

    def _cut(self, digest: bytes) -> bytes:
        return bytes([digest[0] & self._mask])

    def root(self, salt: str) -> bytes:
        return self._cut(super().root(salt))

    def chain(self, parent: bytes, tokens: bytes) -> bytes:  # type: ignore[override]
        return self._cut(PrefixIndex.chain(parent, tokens))

    def publish(self, parent: PrefixEntry | None, key: bytes, tokens: bytes, salt: str) -> PrefixEntry | None:
        entry = super().publish(parent, key, tokens, salt)
        self.refused["published"] += entry is None
        return entry

    def match(
        self, tokens: Tokens, keys: list[bytes], page_size: int, salt: str, images: Mapping[int, bytes] = NO_IMAGES
    ) -> list[PrefixEntry]:
        found = super().match(tokens, keys, page_size, salt, images)
        there = self.find(keys[len(found)]) if len(found) < len(keys) else None
        if there is not None and there.anywhere:
            page = tokens[len(found) * page_size : (len(found) + 1) * page_size].tobytes()
            page += images.get(len(found), b"")
            parent = found[-1] if found else None
            differs = {"tokens": there.tokens != page, "parent": there.parent is not parent, "salt": there.salt != salt}
            self.refused[max(differs, key=lambda k: differs[k]) if sum(differs.values()) == 1 else "several"] += 1
        return found
