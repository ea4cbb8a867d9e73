"""`WeightExchange`: lets the engines of one device share the weights that one of them has loaded.

Memory is passed as a file descriptor: of a memory file on a CPU, of the driver on a GPU. The descriptor stays queued in
a socket, which the daemon holds open without any GPU library. So the weights outlive the engine that loaded them. An
engine that starts takes the queued weights, or loads and queues them. A lock, which the system releases when an engine
ends, ensures that only one engine loads.
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
COUNT = 3  # number of descriptors of an exchange


class ExchangedWeights(NamedTuple):
    """The queued weights. The caller must close both descriptors."""

    name: str  # name of the weights
    memory: int
    contents: int  # a file with the location of each tensor in the memory

    def close(self) -> None:
        os.close(self.memory)
        os.close(self.contents)


class WeightExchange:
    """`fds` are the descriptors to pass to other processes, which open the exchange with `WeightExchange.of`."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._put, self._take = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._lock = os.memfd_create("weft-exchange")
        self._begin()

    @classmethod
    def of(cls, fds: Sequence[int]) -> WeightExchange:
        """Open the exchange that has these `COUNT` descriptors."""
        self = cls.__new__(cls)
        self._put, self._take, self._lock = socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1]), fds[2]
        self._begin()
        return self

    def _begin(self) -> None:
        self._take.setblocking(False)
        self.fds = (self._put.fileno(), self._take.fileno(), self._lock)

    @contextmanager
    def lock(self, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the exchange's lock, which a process also releases when it ends. `waiting` is called repeatedly until
        the lock is free."""
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
        """Return the queued weights, which stay queued, or None."""
        return self._received(socket.MSG_PEEK)

    def put(self, name: str, memory: int, contents: int) -> None:
        """Queue weights in place of the current ones, whose memory is freed with the last engine that uses it."""
        self.clear()
        socket.send_fds(self._put, [name.encode()], [memory, contents])

    def clear(self) -> None:
        while (found := self._received(0)) is not None:
            found.close()

    def _received(self, flags: int) -> ExchangedWeights | None:
        fds = array("i")
        try:  # socket.recv_fds ignores flags
            name, sent, _, _ = self._take.recvmsg(4096, socket.CMSG_SPACE(2 * fds.itemsize), flags)
        except BlockingIOError:
            return None
        for _, _, data in sent:
            fds.frombytes(data)
        return ExchangedWeights(name.decode(), *fds)

    def close(self) -> None:
        """Close it in this process. Idempotent."""
        if self._put.fileno() >= 0:
            self._put.close()
            self._take.close()
            os.close(self._lock)
