"""`Notifier`: tells a service manager how the daemon fares, by sd_notify's protocol: a datagram of NAME=value lines.

Does nothing where `NOTIFY_SOCKET` is not set. See sd_notify(3) and systemd.service(5), `WatchdogSec=`.
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
    """Made once a process; takes its variables away, for they are not meant for children."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        self.watchdog_seconds: float | None = None
        """within which the manager wants to hear of us, if it does"""
        if microseconds.isdigit() and int(microseconds) and pid in ("", str(os.getpid())):
            self.watchdog_seconds = int(microseconds) / 1e6
        self._socket: socket.socket | None = None
        if address[:1] in ("/", "@"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
            # @ stands for the zero byte of an abstract address.
            self._address = "\0" + address[1:] if address[0] == "@" else address

    def ready(self, status: str) -> None:
        self._tell(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._tell(f"STATUS={status}")

    def reloading(self) -> None:
        """`ready` follows."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._tell(f"STOPPING=1\nSTATUS={status}")

    async def watch(self, healthy: Callable[[], bool] = lambda: True) -> None:
        """Show life for ever, twice within the manager's time, from the loop that this runs on, while `healthy()`."""
        if self.watchdog_seconds is None or self._socket is None:
            return
        while True:
            if healthy():
                self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / 2)

    def _tell(self, message: str) -> None:
        if self._socket is not None:
            # A manager that does not listen is no reason to stand still, or to end.
            with suppress(OSError):
                self._socket.sendto(message.encode(), self._address)
