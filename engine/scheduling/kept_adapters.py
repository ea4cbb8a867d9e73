"""`KeptAdapters`: LoRA adapters that stay in host memory when they are evicted, so that no file is read again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from weft.engine.model.adapter import Adapter


class KeptAdapters:
    """The most recently used adapters by digest. Any thread may use it."""

    def __init__(self, most: int) -> None:
        """most: how many are kept, those in the runner's memory included; 0: none."""
        self._most = most
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Adapter | None:
        with self._lock:
            found = self._adapters.get(digest)
            if found is not None:
                self._adapters.move_to_end(digest)
            return found

    def add(self, digest: str, adapter: Adapter) -> None:
        with self._lock:
            self._adapters[digest] = adapter
            self._adapters.move_to_end(digest)
            while len(self._adapters) > self._most:
                self._adapters.popitem(last=False)

    def forget(self, digest: str) -> None:
        with self._lock:
            self._adapters.pop(digest, None)

    def __len__(self) -> int:
        return len(self._adapters)
