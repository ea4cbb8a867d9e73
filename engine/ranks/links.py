"""`Links`: what the ranks of one engine share: a block of memory without a name, and bells between each two of them.

Both are descriptors that processes inherit under the same numbers. Nothing of it has a name, so nothing is left behind
by whoever is killed. A bell is an eventfd that counts: what was written before it is rung can be read once it is heard.
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
"""that a rank shows the others at once, twice: it writes one half while others may still read the other"""
RING_SLOTS = 8
SLOT_BYTES = 1 << 20
OPERATIONS = 4096
"""more than are ever under way: copies of pages, reads and writes of a store"""
LOOK_SECONDS = 0.5
"""between two looks at whether the others are still there, while one of them is waited for"""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the shared memory. It is given by the system on first touch: what is not used costs nothing."""

    ranks: int

    @property
    def states(self) -> int:
        """a page for each rank: how far it is, and why it ended"""
        return 0

    @property
    def outcomes(self) -> int:
        """a byte for each rank and operation"""
        return self.ranks * PAGE

    @property
    def ring(self) -> int:
        return self.outcomes + self.ranks * OPERATIONS

    @property
    def exchange(self) -> int:
        return self.ring + RING_SLOTS * SLOT_BYTES

    @property
    def size(self) -> int:
        return self.exchange + 2 * self.ranks * EXCHANGE_BYTES


class Bell:
    """Rung by one, heard by one other, once for each time it was rung."""

    def __init__(self, fd: int, lost: int | None = None) -> None:
        """`lost`: a descriptor that becomes readable when a rank has ended."""
        self.fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        if lost is not None:
            self._poll.register(lost, select.POLLIN)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def heard(self, seconds: float) -> bool:
        """Wait so long at most."""
        for _ in range(2):
            try:
                os.eventfd_read(self.fd)
                return True
            except BlockingIOError:
                self._poll.poll(1000 * seconds)
        return False


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a process inherits."""

    ranks: int
    memory: int
    bells: tuple[tuple[int, ...], ...]
    """`[from][to]`, for collectives; -1 from a rank to itself"""
    doorbells: tuple[int, ...]
    """of the ring, for each rank; -1 for rank 0"""

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
    """A rank's view of what is shared."""

    def __init__(self, rank: int, shared: Descriptors, lost: int | None = None) -> None:
        """`lost`: see `Bell`."""
        self.rank, self.ranks = rank, shared.ranks
        self.layout = layout = Layout(shared.ranks)
        self.memory: Bytes = np.frombuffer(mmap.mmap(shared.memory, layout.size), np.uint8)
        self.peers = [r for r in range(self.ranks) if r != rank]
        self.to = {r: Bell(shared.bells[rank][r]) for r in self.peers}
        self.of = {r: Bell(shared.bells[r][rank], lost) for r in self.peers}
        self.doorbells = {r: Bell(fd, lost) for r, fd in enumerate(shared.doorbells) if fd >= 0}
        self.check: Callable[[], None] = lambda: None
        """called while another rank is waited for; raises `RankLost` when one has ended"""
        self.on_lost: Callable[[], None] = lambda: None
        """called on a thread, once, when a rank has ended"""
        self.moved: Callable[[], None] = lambda: None
        """called with every exchange, and while one is waited for: a sign of life"""

    def block(self, begin: int, *shape: int) -> Bytes:
        size = int(np.prod(shape))
        return self.memory[begin : begin + size].reshape(shape)

    def state(self, rank: int) -> State:
        return State(self.block(self.layout.states + rank * PAGE, PAGE))

    def outcomes(self) -> Bytes:
        """`[ranks, OPERATIONS]`"""
        return self.block(self.layout.outcomes, self.ranks, OPERATIONS)

    def ring_slots(self) -> Bytes:
        return self.block(self.layout.ring, RING_SLOTS, SLOT_BYTES)

    def exchange(self) -> Bytes:
        """`[2, ranks, EXCHANGE_BYTES]`"""
        return self.block(self.layout.exchange, 2, self.ranks, EXCHANGE_BYTES)

    def hear(self, bell: Bell) -> None:
        """Wait for a bell, for as long as all ranks are there. Raises `RankLost`."""
        while not bell.heard(LOOK_SECONDS):
            self.check()
            self.moved()


class State:
    """A rank's own page: written by it, read by all."""

    def __init__(self, page: Bytes) -> None:
        self._numbers = page[:64].view(np.int64)
        self._text = page[64:]

    @property
    def taken(self) -> int:
        """Messages of the ring that the rank has copied out of their slots."""
        return int(self._numbers[0])

    @taken.setter
    def taken(self, value: int) -> None:
        self._numbers[0] = value

    @property
    def why(self) -> str:
        """Why the rank ended, in one line; empty while it has nothing to say."""
        size = int(self._numbers[1])
        return bytes(self._text[:size]).decode("utf-8", "replace")

    def end(self, why: str) -> None:
        encoded = why.encode()[: len(self._text)]
        self._text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        self._numbers[1] = len(encoded)
