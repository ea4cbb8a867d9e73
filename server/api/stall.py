"""`StallWatch`: notices a client that leaves data unread for too long.

It costs nothing while clients keep up: a transport that takes no more bytes, or is closing, begins
it, and from there a timer looks on.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable

LOOKS = 4
"""at a client within its time"""


class StallWatch:
    """One connection's. Attributes: `stalled`, whether it has ended the connection."""

    __slots__ = ("_left", "_loop", "_on_stall", "_seconds", "_timer", "_transport", "_unread", "stalled")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        seconds: float,
        on_stall: Callable[[], None],
    ) -> None:
        """`seconds`: without progress, 0 for ever."""
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._on_stall = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self._left = 0
        self.stalled = False

    def begin(self) -> None:
        """Look at the client from now on, until the transport has nothing left to send. Idempotent."""
        if self._timer is None and self._seconds and self._transport.get_write_buffer_size():
            self._unread, self._left = -1, LOOKS
            self._wait()

    def end(self) -> None:
        """There is no connection any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._seconds / LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._transport.get_write_buffer_size():
            return
        unread = self._count()
        self._left = self._left - 1 if unread == self._unread else LOOKS - 1
        self._unread = unread
        if self._left:
            self._wait()
        else:
            self.stalled = True
            self._on_stall()

    def _count(self) -> int:
        """Bytes that the client has not acknowledged: the transport's and the kernel's."""
        return self._transport.get_write_buffer_size() + _in_kernel(self._transport)


def _in_kernel(transport: asyncio.Transport) -> int:
    """A slow reader makes room in the kernel's buffer long before the transport may write again."""
    sock = transport.get_extra_info("socket")
    try:
        size: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
    except (OSError, AttributeError):  # closed meanwhile, or no socket
        return 0
    return size
