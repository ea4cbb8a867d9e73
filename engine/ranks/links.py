"""`Links`: anonymous shared memory for the ranks of one engine, and bells between each pair of them.

Both are descriptors that processes inherit under the same numbers. Neither has a name, so a killed process leaves
nothing to clean up. A bell is a counting eventfd: data written before a ring can be read once the ring is received.
"""

from __future__ import annotations

import json
import mmap
import os
import select
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

MAX_RANKS = 8
PAGE = 4096
EXCHANGE_BYTES = 8 << 20
"""Bytes that a rank exchanges at once. Double-buffered: a rank writes one half while others still read the other."""
RING_SLOTS = 8
SLOT_BYTES = 1 << 20
OPERATIONS = 4096  # More operations (page copies, store reads and writes) than are ever in progress on working disks.
LOOK_SECONDS = 0.5  # Seconds between liveness checks while waiting for another rank.

Bytes = npt.NDArray[np.uint8]


class Layout:
    """Offsets in the shared memory. The system allocates pages on first touch, so unused space costs nothing."""

    def __init__(self, ranks: int) -> None:
        self.states = 0  # One page per rank: its `State`.
        self.outcomes = ranks * PAGE  # One byte per rank and operation.
        self.ring = self.outcomes + ranks * OPERATIONS
        self.exchange = self.ring + RING_SLOTS * SLOT_BYTES
        self.size = self.exchange + 2 * ranks * EXCHANGE_BYTES


class Bell:
    """A counting event with one sender and one receiver."""

    def __init__(self, fd: int, lost: int | None = None) -> None:
        """lost: a descriptor that becomes readable when a rank has ended."""
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        if lost is not None:
            self._poll.register(lost, select.POLLIN)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def wait(self, seconds: float) -> bool:
        """Receive one ring. Returns False if none arrives within `seconds`."""
        for _ in range(2):
            try:
                os.eventfd_read(self.fd)
                return True
            except BlockingIOError:
                self._poll.poll(1000 * seconds)
        return False


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The descriptors that a rank's process inherits."""

    ranks: int
    memory: int
    bells: tuple[tuple[int, ...], ...]  # `[from][to]`, for collectives; -1 on the diagonal.
    doorbells: tuple[int, ...]  # Bells of the ring by rank; -1 for rank 0.

    @classmethod
    def make(cls, ranks: int) -> Descriptors:
        memory = os.memfd_create("weft-ranks")
        os.ftruncate(memory, Layout(ranks).size)
        flags = os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC
        bells = tuple(tuple(-1 if a == b else os.eventfd(0, flags) for b in range(ranks)) for a in range(ranks))
        return cls(ranks, memory, bells, (-1, *(os.eventfd(0, flags) for _ in range(ranks - 1))))

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory, *(fd for row in (*self.bells, self.doorbells) for fd in row if fd >= 0))

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Descriptors:
        found = json.loads(text)
        bells = tuple(tuple(row) for row in found["bells"])
        return cls(found["ranks"], found["memory"], bells, tuple(found["doorbells"]))


class Links:
    """A rank's view of the shared memory and bells."""

    def __init__(self, rank: int, shared: Descriptors, lost: int | None = None) -> None:
        """lost: see `Bell`."""
        self.rank, self.ranks = rank, shared.ranks
        self.layout = layout = Layout(shared.ranks)
        self.memory: Bytes = np.frombuffer(mmap.mmap(shared.memory, layout.size), np.uint8)
        self.peers = [r for r in range(self.ranks) if r != rank]
        self.to = {r: Bell(shared.bells[rank][r]) for r in self.peers}
        self.of = {r: Bell(shared.bells[r][rank], lost) for r in self.peers}
        self.doorbells = {r: Bell(fd, lost) for r, fd in enumerate(shared.doorbells) if fd >= 0}
        self.check: Callable[[], None] = lambda: None
        """Called while waiting for another rank. Raises `RankLost` if one has ended."""
        self.on_lost: Callable[[], None] = lambda: None  # Called once, on a thread, when a rank has ended.
        self.on_progress: Callable[[], None] = lambda: None
        """Called on every exchange and while waiting for one, as a sign of life."""

    def block(self, begin: int, *shape: int) -> Bytes:
        size = int(np.prod(shape))
        return self.memory[begin : begin + size].reshape(shape)

    def state(self, rank: int) -> State:
        return State(self.block(self.layout.states + rank * PAGE, PAGE))

    def outcomes(self) -> Bytes:
        """Outcomes of operations, `[ranks, OPERATIONS]`."""
        return self.block(self.layout.outcomes, self.ranks, OPERATIONS)

    def ring_slots(self) -> Bytes:
        return self.block(self.layout.ring, RING_SLOTS, SLOT_BYTES)

    def exchange(self) -> Bytes:
        """The exchange buffers, `[2, ranks, EXCHANGE_BYTES]`."""
        return self.block(self.layout.exchange, 2, self.ranks, EXCHANGE_BYTES)

    def wait_for(self, bell: Bell) -> None:
        """Wait for a bell while all ranks are alive. Raises `RankLost`."""
        while not bell.wait(LOOK_SECONDS):
            self.check()
            self.on_progress()


class State:
    """A page that one rank writes and all ranks read."""

    def __init__(self, page: Bytes) -> None:
        self._numbers = page[:64].view(np.int64)
        self._text = page[64:]

    @property
    def taken(self) -> int:
        """Number of ring messages that the rank has copied out of their slots."""
        return int(self._numbers[0])

    @taken.setter
    def taken(self, value: int) -> None:
        self._numbers[0] = value

    @property
    def store_lost(self) -> bool:
        """Whether the file of the rank's SSD store was removed or truncated."""
        return bool(self._numbers[2])

    @store_lost.setter
    def store_lost(self, value: bool) -> None:
        self._numbers[2] = value

    @property
    def why(self) -> str:
        """One line on why the rank ended; empty while it runs."""
        size = int(self._numbers[1])
        return bytes(self._text[:size]).decode("utf-8", "replace")

    def end(self, why: str) -> None:
        encoded = why.encode()[: len(self._text)]
        self._text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._numbers[1] = len(encoded)
