"""`StallWatch`: detects a client that leaves data unread for too long.

It costs nothing while clients keep up: it starts a timer only when a transport is full or closing.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable

CHECKS = 4
"""Checks per stall timeout."""


class StallWatch:
    """Watches one connection. `stalled`: it has closed the connection."""

    __slots__ = ("_left", "_loop", "_on_stall", "_seconds", "_timer", "_transport", "_unread", "stalled")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        seconds: float,
        on_stall: Callable[[], None],
    ) -> None:
        """`seconds`: time without progress; 0 disables the watch."""
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._left = 0
        self.stalled = False

    def begin(self) -> None:
        """Watch until the transport has nothing left to send. Idempotent."""
        if self._timer is None and self._seconds and self._transport.get_write_buffer_size():
            self._unread, self._left = -1, CHECKS
            self._wait()

    def end(self) -> None:
        """The connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._seconds / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._transport.get_write_buffer_size():
            return
        unread = self._count()
        self._left = self._left - 1 if unread == self._unread else CHECKS - 1
        self._unread = unread
        if self._left:
            self._wait()
        else:
            self.stalled = True
            self._on_stall()

    def _count(self) -> int:
        """Unacknowledged bytes in the transport and the kernel."""
        return self._transport.get_write_buffer_size() + _in_kernel(self._transport)


def _in_kernel(transport: asyncio.Transport) -> int:
    """Unacknowledged bytes in the kernel, where a slow reader makes progress long before the transport can write."""
    sock = transport.get_extra_info("socket")
    try:
        size: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
    except (OSError, AttributeError):  # closed, or not a socket
        return 0
    return size
