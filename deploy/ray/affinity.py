"""Defines `Affinity`, which chooses replicas by the rule of `server/replicas/router.py` over blocks of text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weft.deploy.ray.prompt import BLOCK, TOKEN_BYTES
from weft.engine.wire.page_keys import BRIEF
from weft.server.replicas.router import POLICY, Candidate, choose

MOST_BLOCKS = 8192
"""Blocks remembered per replica: 2 MiB of text, 64 KiB of keys."""


class Blocks:
    """A bounded set of keys that drops the oldest first."""

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self.most = most
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.most:
            self._keys.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def dump(self) -> bytes:
        """Return all keys, concatenated, for `Affinity.update`."""
        return b"".join(self._keys)


class _Open(NamedTuple):
    replica: str
    size: int


class _Known:
    """Known blocks and load of a replica."""

    def __init__(self, given: float) -> None:
        self.sent = Blocks()
        self.reported: frozenset[bytes] = frozenset()
        self.dump = b""
        self.given = given
        self.load = 0

    def match(self, keys: Sequence[bytes]) -> int:
        for i, key in enumerate(keys):
            if key not in self.sent and key not in self.reported:
                return i
        return len(keys)


class Affinity:
    """Routes requests. Sizes are bytes of text. A wrong choice costs only time; engines look up their own pages."""

    def __init__(self) -> None:
        self._output = POLICY.expected_output * TOKEN_BYTES
        self._known: dict[str, _Known] = {}
        self._open: dict[str, _Open] = {}
        self._requests = 0.0
        self._bytes = 0.0

    def replicas(self, names: Iterable[str]) -> None:
        """Set the current replicas. A new one starts at the mean of given work, or it would get every request."""
        names = set(names)
        for gone in self._known.keys() - names:
            del self._known[gone]
        level = sum(known.given for known in self._known.values()) / len(self._known) if self._known else 0.0
        for name in names - self._known.keys():
            self._known[name] = _Known(level)

    def update(self, name: str, pages: bytes) -> None:
        """Take a replica's report of recently seen blocks."""
        known = self._known[name]
        if pages != known.dump:
            known.dump = pages
            known.reported = frozenset(pages[i : i + BRIEF] for i in range(0, len(pages), BRIEF))

    def choose(self, keys: Sequence[bytes], size: int, avoid: Sequence[str] = ()) -> list[str]:
        """Return the names of all replicas, the best one first, then by load."""
        names = sorted(self._known)
        allowed = [name for name in names if name not in avoid] or names
        if not allowed:
            return []
        candidates = [
            Candidate(names.index(name), known.match(keys) * BLOCK, known.load, known.given)
            for name in allowed
            for known in (self._known[name],)
        ]
        mean = self._bytes / self._requests if self._requests else 0.0
        best = names[choose(candidates, size, mean, POLICY)]
        others = sorted(names, key=lambda name: (name in avoid, self._known[name].load, name))
        return [best, *(name for name in others if name != best)]

    def sent(self, request: str, name: str, keys: Sequence[bytes], size: int) -> None:
        """Record that a request went to this replica; call `ended` later."""
        known = self._known.get(name)
        if known is None:
            return
        work = max(0, size - known.match(keys) * BLOCK) + self._output
        known.sent.add(keys)
        known.load += work
        known.given += work
        self._open[request] = _Open(name, work)
        self._bytes += work
        self._requests += 1
        if self._requests >= POLICY.window:
            self._bytes /= 2
            self._requests /= 2
            for each in self._known.values():
                each.given /= 2

    def ended(self, request: str) -> None:
        """Record the end of a request. Idempotent."""
        if (open_ := self._open.pop(request, None)) is not None and open_.replica in self._known:
            self._known[open_.replica].load -= open_.size

    @property
    def num_open(self) -> int:
        return len(self._open)
