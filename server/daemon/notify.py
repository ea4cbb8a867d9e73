"""`Notifier` reports the daemon's state to a service manager with sd_notify: datagrams of NAME=value lines.

It does nothing unless `NOTIFY_SOCKET` is set. See sd_notify(3) and systemd.service(5), `WatchdogSec=`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress

logger = logging.getLogger("weft")


class Notifier:
    """Created once per process. Removes its environment variables, which are not meant for children."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        self.watchdog_seconds: float | None = None
        """Seconds within which the manager expects a message; None if it expects none."""
        if microseconds.isdigit() and int(microseconds) and pid in ("", str(os.getpid())):
            self.watchdog_seconds = int(microseconds) / 1e6
        self._socket: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            # A leading @ stands for the zero byte of an abstract address.
            self._address = "\0" + address[1:] if address[0] == "@" else address

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """Set the line shown by `systemctl status`."""
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        """Announce a reload; `ready` follows."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    async def watch(self, healthy: Callable[[], bool] = lambda: True) -> None:
        """Send watchdog messages from this loop while `healthy()`, at twice the required rate, until cancelled."""
        if self.watchdog_seconds is None or self._socket is None:
            return
        while True:
            if healthy():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def _send(self, message: str) -> None:
        if self._socket is not None:
            # The daemon must neither block nor end if the manager does not listen.
            with suppress(OSError):
                self._socket.sendto(message.encode(), self._address)
