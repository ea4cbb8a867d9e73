"""`CopyEngine`: moves KV pages between a device's pool and the host pool during computation.

A page is contiguous on both sides, so a copy is one DMA. There are two implementations: a thread on the CPU
(`cpu_transfer.py`), and pinned memory with streams and events on a GPU (`cuda_transfer.py`).

The caller guarantees that the source is complete and the target has no readers. The scheduler copies only pages of
committed iterations, whose end event the host has awaited, and allocates only pages whose fence has passed
(docs/pitfalls.md 21). Until `done()`, both sides belong to the copy.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.engine.errors import OutOfMemory

ALIGNMENT = 4096  # alignment in bytes of addresses, lengths and offsets for O_DIRECT
GIB = 2**30
Pairs = Sequence[tuple[int, int]]  # (GPU page, host slot)
Bytes = npt.NDArray[np.uint8]
SHARE = 32  # blocks (slots or extents) per remainder


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class PageSizes(NamedTuple):
    """Bytes of a page on the device, and packed in the lower tiers."""

    page: int
    packed: int

    def stored(self, *, raw: bool) -> int:
        """Return the stored bytes of a page; `raw` if it could not be packed."""
        return self.page if raw else self.packed


def remainders_for(blocks: int) -> int:
    return -(-blocks // SHARE)


class Remainders:
    """Storage for the ends of pages that could not be packed, because slots and extents are sized for packed pages.
    Such pages are rare, so there is storage for few (`remainders_for`); beyond that, a page is not kept. Assigns
    remainders to blocks (numbers of slots or extents). Thread-safe. A block loses its remainder when something else is
    written there (`drop`), not when it becomes free."""

    def __init__(self, count: int, memory: Bytes | None = None, remainder_bytes: int = 0) -> None:
        """`memory [count, stride]` holds remainders on the host, each in the first `remainder_bytes` of a row."""
        self.memory = memory if memory is not None else np.empty((count, 0), np.uint8)
        self.remainder_bytes = remainder_bytes
        self._free = list(range(count - 1, -1, -1))
        self._at: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, block: int) -> int | None:
        """Return the remainder of a block; None if its page is packed or it has none."""
        return self._at.get(block)

    def bytes_of(self, block: int) -> Bytes | None:
        """Return the memory `[remainder_bytes]` of a block's remainder, or None."""
        remainder = self._at.get(block)
        return None if remainder is None else self.memory[remainder, : self.remainder_bytes]

    def take(self, block: int) -> int | None:
        """Return the remainder of a block, assigning a free one if needed; None if none is free."""
        with self._lock:
            if block not in self._at:
                if not self._free:
                    return None
                self._at[block] = self._free.pop()
            return self._at[block]

    def reserve(self, block: int) -> Bytes | None:
        """Like `take`, but return the memory."""
        self.take(block)
        return self.bytes_of(block)

    def claim(self, block: int, remainder: int) -> bool:
        """Assign a remainder found at start to its block. Returns False if another block has it."""
        with self._lock:
            if remainder not in self._free:
                return False
            self._free.remove(remainder)
            self._at[block] = remainder
            return True

    def drop(self, block: int) -> None:
        """Free the remainder of a block, if it has one."""
        with self._lock:
            if (remainder := self._at.pop(block, None)) is not None:
                self._free.append(remainder)


class Copy(Protocol):
    """A running batch of page copies."""

    def done(self) -> bool:
        """Return whether the batch has completed or failed. Does not block."""

    @property
    def failed(self) -> bool:
        """Whether it failed. Valid once `done()`."""

    @property
    def raw(self) -> Collection[int]:
        """Slots of pages that could not be packed. Valid once `done()`."""

    @property
    def unkept(self) -> Collection[int]:
        """Slots left empty although the batch has not failed: their pages could not be packed, and no remainder was
        free. Valid once `done()`."""

    @property
    def seconds(self) -> float:
        """Seconds from the first byte to the last, including waits at gates. Valid once `done()`."""


class Gate(Protocol):
    """A point in an iteration that a stream can wait for: a CUDA event."""

    def wait(self, stream: Any = None) -> None: ...


class CopyEngine(Protocol):
    @property
    def host(self) -> Bytes:
        """The host pool, `[slots, stride]` uint8, slots aligned to `ALIGNMENT`. A page takes `sizes.packed` bytes."""

    @property
    def remainders(self) -> Remainders | None:
        """The ends of pages that could not be packed; None if pages are not packed at all."""

    @property
    def sizes(self) -> PageSizes: ...

    def out(self, pairs: Pairs) -> Copy:
        """Start copies of device pages to host slots."""

    def back(self, pairs: Pairs) -> Copy:
        """Start copies of host slots to device pages."""

    def wait(self, copies: Sequence[Copy], seconds: float) -> None:
        """Return when one of `copies` may be done, or after `seconds`."""

    def close(self) -> None:
        """Wait for running copies and free the host pool."""


def map_host_pool(slots: int, row_bytes: int) -> Bytes:
    """Map anonymous memory `[slots, stride]`, which is allocated on first touch. Raises `OutOfMemory`."""
    stride = aligned(row_bytes)
    try:
        memory = mmap.mmap(-1, slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise OutOfMemory(f"cannot map {slots * stride / GIB:.1f} GiB of host memory: lower --host-kv-gib") from None
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(slots, stride)


def map_remainders(slots: int, sizes: PageSizes) -> Remainders:
    """Map the remainders of a host pool of `slots` slots. Raises `OutOfMemory`."""
    count, remainder_bytes = remainders_for(slots), sizes.page - sizes.packed
    return Remainders(count, map_host_pool(count, remainder_bytes), remainder_bytes)
