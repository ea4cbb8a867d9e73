"""`WeightExchange`: where the engines of one device find the weights that one of them has loaded, and whose end they outlive.

Memory is a file descriptor here: of a memory file on a CPU, of the driver's on a GPU. It lies in a socket that nobody
reads: the system keeps what is sent there for as long as somebody has the socket open, the daemon that is, which needs
no library for it. So no engine owns the weights. Whoever starts looks at what lies there; if nothing does, it loads and
puts it there. A lock, which the system takes from an engine that ends, makes sure that only one of them loads.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

POLL_SECONDS = 0.05
COUNT = 3
"""of its descriptors"""


class ExchangedWeights(NamedTuple):
    """What lies there; both descriptors are the caller's to close."""

    name: str
    """of the weights"""
    memory: int
    contents: int
    """a file: where in the memory each tensor is"""

    def close(self) -> None:
        os.close(self.memory)
        os.close(self.contents)


class WeightExchange:
    """Attributes:
    fds: for those that share it; they make theirs with `WeightExchange.of`.
    """

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._put, self._take = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._lock = os.memfd_create("weft-exchange")
        self._begin()

    @classmethod
    def of(cls, fds: Sequence[int]) -> WeightExchange:
        """The one that has these `COUNT` descriptors."""
        self = cls.__new__(cls)
        self._put, self._take, self._lock = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1]), fds[2]
        self._begin()
        return self

    def _begin(self) -> None:
        self._take.setblocking(False)
        self.fds = (self._put.fileno(), self._take.fileno(), self._lock)

    @contextmanager
    def turn(self, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Alone of all processes. waiting: called again and again until then. A process that ends gives its turn up."""
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def find(self) -> ExchangedWeights | None:
        """What was put there last. It stays there."""
        return self._received(socket.MSG_PEEK)

    def put(self, name: str, memory: int, contents: int) -> None:
        """In place of what lay there, whose memory goes with the last engine that has it."""
        self.clear()
        socket.send_fds(self._put, [name.encode()], [memory, contents])

    def clear(self) -> None:
        while (found := self._received(0)) is not None:
            found.close()

    def _received(self, flags: int) -> ExchangedWeights | None:
        fds = array("i")
        try:  # socket.recv_fds leaves flags out
            name, sent, _, _ = self._take.recvmsg(4096, socket.CMSG_SPACE(2 * fds.itemsize), flags)
        except BlockingIOError:
            return None
        for _, _, data in sent:
            fds.frombytes(data)
        return ExchangedWeights(name.decode(), *fds)

    def close(self) -> None:
        """In this process. Idempotent."""
        if self._put.fileno() >= 0:
            self._put.close()
            self._take.close()
            os.close(self._lock)
