"""`CpuCopyEngine`: pages move by `memcpy`, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from weft.engine.memory.kv_layout import page_rows
from weft.engine.memory.transfer import Bytes, Copy, Pairs, map_host_pool


class CpuCopy:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self.failed = False
        self.seconds = 0.0

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            self._work()
        except (RuntimeError, ValueError):
            self.failed = True
        self.seconds = time.perf_counter() - begin
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)


class CpuCopyEngine:
    """One thread that copies in the order asked; numpy releases the interpreter lock while it copies."""

    def __init__(self, kv: Tensor, slots: int) -> None:
        self._kv: Bytes = page_rows(kv).numpy()
        self.page_bytes = self._kv.shape[1]
        self.host = map_host_pool(slots, self.page_bytes)
        self._queue: queue.SimpleQueue[CpuCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weft-copies", daemon=True)
        self._thread.start()

    def out(self, pairs: Pairs) -> Copy:
        return self._start(lambda: self._copy(pairs, to_host=True))

    def back(self, pairs: Pairs) -> Copy:
        return self._start(lambda: self._copy(pairs, to_host=False))

    def _copy(self, pairs: Pairs, to_host: bool) -> None:
        for page, slot in pairs:
            there, here = self._kv[page], self.host[slot, : self.page_bytes]
            if to_host:
                np.copyto(here, there)
            else:
                np.copyto(there, here)

    def _start(self, work: Callable[[], None]) -> Copy:
        copy = CpuCopy(work)
        self._queue.put(copy)
        return copy

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            copy.run()

    def wait(self, copies: Sequence[Copy], seconds: float) -> None:
        first = copies[0]
        assert isinstance(first, CpuCopy)
        first.wait(seconds)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
