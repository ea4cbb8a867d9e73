"""`CpuCopyEngine`: copies or packs pages on a separate CPU thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from weft.engine.memory.kv_layout import page_rows
from weft.engine.memory.transfer import Bytes, Copy, PageSizes, Pairs, map_host_pool, map_remainders
from weft.kernels.formats.packed_page import PackedPage


class CpuCopy:
    def __init__(self, work: Callable[[CpuCopy], None]) -> None:
        self._work = work
        self._done = threading.Event()
        self.failed = False
        self.raw: list[int] = []
        self.unkept: list[int] = []
        self.seconds = 0.0

    def run(self) -> None:
        begin = time.perf_counter()
        try:
            self._work(self)
        except (RuntimeError, ValueError):
            self.failed = True
        self.seconds = time.perf_counter() - begin
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)


class CpuCopyEngine:
    """One thread that runs copies in order. numpy releases the interpreter lock while it copies and packs."""

    def __init__(self, kv: Tensor, slots: int, form: PackedPage | None = None) -> None:
        """With `form`, pages are packed in the host pool."""
        self._kv: Bytes = page_rows(kv).numpy()
        self._form = form
        page_bytes = self._kv.shape[1]
        self.sizes = PageSizes(page_bytes, form.nbytes if form is not None else page_bytes)
        self.host = map_host_pool(slots, self.sizes.packed)
        self.remainders = map_remainders(slots, self.sizes) if form is not None else None
        self._queue: queue.SimpleQueue[CpuCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weft-copies", daemon=True)
        self._thread.start()

    def out(self, pairs: Pairs) -> Copy:
        return self._start(lambda copy: self._out(copy, pairs))

    def back(self, pairs: Pairs) -> Copy:
        return self._start(lambda copy: self._back(copy, pairs))

    def _out(self, copy: CpuCopy, pairs: Pairs) -> None:
        first = self.sizes.packed
        for page, slot in pairs:
            there, here = self._kv[page], self.host[slot, :first]
            if self._form is None or self.remainders is None:
                np.copyto(here, there)
                continue
            self.remainders.drop(slot)
            if self._form.pack(there, here):
                continue
            copy.raw.append(slot)
            if (end := self.remainders.reserve(slot)) is None:
                copy.unkept.append(slot)
                continue
            np.copyto(here, there[:first])
            np.copyto(end, there[first:])

    def _back(self, copy: CpuCopy, pairs: Pairs) -> None:
        first = self.sizes.packed
        for page, slot in pairs:
            there, here = self._kv[page], self.host[slot, :first]
            if self._form is None or self.remainders is None:
                np.copyto(there, here)
            elif (end := self.remainders.bytes_of(slot)) is None:
                self._form.unpack(here, there)
            else:
                copy.raw.append(slot)
                np.copyto(there[:first], here)
                np.copyto(there[first:], end)

    def _start(self, work: Callable[[CpuCopy], None]) -> Copy:
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
