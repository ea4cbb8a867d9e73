"""`Acceptor`: accepts connections from a listener and closes them if file descriptors run out.

The event loop's own server neither reports refused connections nor leaves queued ones to another process.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress

SPARE = 16
"""File descriptors reserved for the rest of the process."""
BATCH = 64
"""Connections accepted per turn of the event loop."""
PAUSE = 0.1
"""Seconds to wait after accepting fails."""
LOG_SECONDS = 60.0
"""Seconds between log lines about refused connections."""

logger = logging.getLogger("weft")


class Acceptor:
    """Accepts from `start` to `stop`; later connections stay in the listener's queue."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        on_refused: Callable[[], None],
    ) -> None:
        """`tls`: called for each connection. `on_refused`: called for each connection closed unread."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = limit
        self._highest = limit - SPARE if limit != resource.RLIM_INFINITY else 2**31
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._refused = 0
        """Refused connections since the last log line."""
        self._logged_at = -LOG_SECONDS
        listener.setblocking(False)

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._take)

    def stop(self) -> None:
        """Stop accepting. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    def _take(self) -> None:
        for _ in range(BATCH):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has already disconnected
            except OSError:  # no descriptor or no memory, here or in the whole system
                self._refuse()
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(PAUSE, self.start)
                return
            if sock.fileno() >= self._highest:
                sock.close()
                self._refuse()
                continue
            task = self._loop.create_task(self._begin(sock))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, sock, ssl=self._tls())
        except (OSError, ssl.SSLError, asyncio.CancelledError):  # a handshake that failed
            with suppress(OSError):
                sock.close()

    def _refuse(self) -> None:
        self._on_refused()
        self._refused += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            logger.warning(
                "closed %d connections for lack of file descriptors: the process limit is %d (ulimit -n)",
                self._refused,
                self._limit,
            )
            self._refused, self._logged_at = 0, now
