"""`RingWriter` and `RingReader`: orders from rank 0 to the other ranks, in shared memory.

An order is a kind and arrays of numbers. Rank 0 writes it once into the next slots of a ring and rings every rank. Each
rank copies it out of the slots before use and publishes its position. A large order takes several slots. Orders arrive
in the order in which they were sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from weft.engine.ranks.links import LOOK_SECONDS, Bytes, Links

_HEAD = 4
"""Header words of a slot: its number, bytes of the complete order, offset of this piece, bytes of this piece."""
_HEAD_BYTES = 8 * _HEAD
_FULL_SECONDS = 2e-4  # Seconds between checks of a full ring.


class Kind(IntEnum):
    BATCH = 1  # Run an iteration.
    POOL = 2
    """Allocate a host pool with the given number of slots, then meet at a barrier."""
    OUT = 3  # Copy pages to the host pool.
    BACK = 4  # Copy pages from the host pool.
    SCAN = 5
    """Open the store, again if a disk failed, and keep only the pages that rank 0 has under the same extents."""
    WRITE = 6
    READ = 7
    ERASE = 8
    RESET = 9
    CLOSE_POOL = 10
    END = 11
    READ_ADAPTER = 12  # Read a LoRA adapter from its directory.
    ADD_ADAPTER = 13
    """Give an adapter that was read its number in batches. The orders of adapters keep their place among iterations."""
    DROP_ADAPTER = 14
    EMBEDDINGS = 15  # Write embeddings of an image to these rows of the pool, before later iterations read them.


class Order(NamedTuple):
    kind: Kind
    arrays: list[Bytes]  # Raw bytes to be viewed as the types that `kind` implies. The receiver owns them.


def _padded(size: int) -> int:
    return -(-size // 8) * 8


class RingWriter:
    """Rank 0's end."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._slots = links.ring_slots()
        self._heads = self._slots[:, :_HEAD_BYTES].view(np.int64)
        self._states = [links.state(rank) for rank in links.peers]
        self._sent = 0
        self._sending = threading.Lock()  # a thread opens the store again

    def send(self, kind: Kind, *arrays: np.ndarray) -> None:
        """Send an order. Raises `RankLost` if the ring is full and a rank has ended."""
        data = _encoded(kind, [np.ascontiguousarray(a) for a in arrays])
        with self._sending:
            self._send(data)

    def _send(self, data: Bytes) -> None:
        capacity = self._slots.shape[1] - _HEAD_BYTES
        for begin in range(0, len(data), capacity):
            piece = data[begin : begin + capacity]
            while self._sent - min(state.taken for state in self._states) >= len(self._slots):
                self._links.check()
                time.sleep(_FULL_SECONDS)
            turn = self._sent % len(self._slots)
            self._slots[turn, _HEAD_BYTES : _HEAD_BYTES + len(piece)] = piece
            self._sent += 1
            self._heads[turn] = self._sent, len(data), begin, len(piece)
            for bell in self._links.doorbells.values():
                bell.ring()


def _encoded(kind: Kind, arrays: Sequence[np.ndarray]) -> Bytes:
    head = np.array([kind, len(arrays), *(a.nbytes for a in arrays)], np.int64)
    out = np.empty(head.nbytes + sum(_padded(a.nbytes) for a in arrays), np.uint8)
    out[: head.nbytes] = head.view(np.uint8)
    at = head.nbytes
    for array in arrays:
        out[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += _padded(array.nbytes)
    return out


def _decoded(data: Bytes) -> Order:
    kind, count = data[:16].view(np.int64).tolist()
    sizes = data[16 : 16 + 8 * count].view(np.int64).tolist()
    arrays, at = [], 16 + 8 * count
    for size in sizes:
        arrays.append(data[at : at + size])
        at += _padded(size)
    return Order(Kind(kind), arrays)


class RingReader:
    """A follower's end."""

    def __init__(self, links: Links) -> None:
        self._slots = links.ring_slots()
        self._heads = self._slots[:, :_HEAD_BYTES].view(np.int64)
        self._state = links.state(links.rank)
        self._bell = links.doorbells[links.rank]
        self._taken = 0
        self._data = np.empty(0, np.uint8)

    def receive(self, seconds: float = LOOK_SECONDS) -> Order | None:
        """Return the next order, or None if no complete order arrives within `seconds`."""
        if not self._bell.wait(seconds):
            return None
        turn = self._taken % len(self._slots)
        number, total, begin, size = self._heads[turn].tolist()
        assert number == self._taken + 1, f"slot {turn} holds {number}, not {self._taken + 1}"
        if not begin:
            self._data = np.empty(total, np.uint8)
        self._data[begin : begin + size] = self._slots[turn, _HEAD_BYTES : _HEAD_BYTES + size]
        self._taken += 1
        self._state.taken = self._taken
        return _decoded(self._data) if begin + size == total else None
