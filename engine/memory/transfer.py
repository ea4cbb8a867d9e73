"""`CopyEngine`: moves whole KV pages between a device's pool and the host pool, beside the computation.

A page is one contiguous extent on both sides, so a copy is one DMA. Two implementations: a thread on the CPU
(`cpu_transfer.py`), pinned memory, streams and events on a GPU (`cuda_transfer.py`).

Who starts a copy guarantees that what it reads is complete and what it overwrites has no reader left. The scheduler
does: it copies only pages of committed iterations, whose end event the host has awaited, and allocates only pages
behind their fence (docs/pitfalls.md 21). Until `done()`, both sides belong to the copy.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.engine.errors import OutOfMemory
from weft.engine.memory.rests import Rests, rests_for

ALIGNMENT = 4096
"""bytes: what O_DIRECT asks of addresses, lengths and offsets"""
GIB = 2**30
Pairs = Sequence[tuple[int, int]]
"""(GPU page, host slot)"""
Bytes = npt.NDArray[np.uint8]


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class PageSizes(NamedTuple):
    """Bytes of a page on the device, and in the tiers below it where it is packed."""

    page: int
    packed: int

    def stored(self, *, raw: bool) -> int:
        """raw: it could not be packed."""
        return self.page if raw else self.packed


class Copy(Protocol):
    """A batch of page copies under way."""

    def done(self) -> bool:
        """Have all bytes arrived, or has it failed? Does not block."""
        ...

    @property
    def failed(self) -> bool:
        """Known once `done()`."""
        ...

    @property
    def raw(self) -> Collection[int]:
        """Slots of pages that could not be packed; known once `done()`."""
        ...

    @property
    def unkept(self) -> Collection[int]:
        """Slots that hold nothing, though it has not failed: pages that could not be packed, and no room for such was
        left; known once `done()`."""
        ...

    @property
    def seconds(self) -> float:
        """From its first byte to its last, waits at gates included; known once `done()`."""
        ...


class Gate(Protocol):
    """A place in an iteration that a stream can wait for: a CUDA event."""

    def wait(self, stream: Any = None) -> None: ...


class CopyEngine(Protocol):
    @property
    def host(self) -> Bytes:
        """`[slots, stride]` uint8, each slot at a multiple of `ALIGNMENT`; a page fills `sizes.packed` of one."""
        ...

    @property
    def rests(self) -> Rests | None:
        """The ends of pages in there that could not be packed; None where pages are not packed."""
        ...

    @property
    def sizes(self) -> PageSizes: ...

    def out(self, pairs: Pairs) -> Copy:
        """Device pages to host slots."""
        ...

    def back(self, pairs: Pairs) -> Copy:
        """Host slots to device pages."""
        ...

    def wait(self, copies: Sequence[Copy], seconds: float) -> None:
        """Return when one of `copies` may be done, or after so many seconds."""
        ...

    def close(self) -> None:
        """Wait for copies under way and give the host pool back."""
        ...


def map_host_pool(slots: int, row_bytes: int) -> Bytes:
    """Anonymous memory `[slots, stride]`, given by the system on first touch. Raises `OutOfMemory`."""
    stride = aligned(row_bytes)
    try:
        memory = mmap.mmap(-1, slots * stride, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError):
        raise OutOfMemory(f"{slots * stride / GIB:.1f} GiB of host memory do not fit: lower --host-kv-gib") from None
    with contextlib.suppress(OSError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(slots, stride)


def map_rests(slots: int, sizes: PageSizes) -> Rests:
    """For a host pool of so many slots. Raises `OutOfMemory`."""
    count, rest_bytes = rests_for(slots), sizes.page - sizes.packed
    return Rests(count, map_host_pool(count, rest_bytes), rest_bytes)
