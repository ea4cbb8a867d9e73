"""URLs of running daemons. Each daemon publishes its URL in an anonymous file that other processes find in /proc.

So a health check in a container needs neither the daemon's flags nor its configuration file, and no disk.
"""

from __future__ import annotations

import http.client
import os
import socket
from contextlib import suppress
from typing import Any

NAME = "weft-url"


UNIX = "unix:"  # the scheme of a URL whose path is that of a Unix socket


def url_of(address: tuple[Any, ...] | str, *, tls: bool) -> str:
    """Return the local URL of a listening socket with this address, or with this path."""
    if isinstance(address, str):
        return f"{UNIX}{address}"
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{host}:{port}"


def publish(url: str) -> int:
    """Publish a URL while the returned file descriptor is open."""
    fd = os.memfd_create(NAME)
    os.write(fd, url.encode())
    return fd


def published() -> list[str]:
    """Return the URLs of all daemons of this user (for root, of all users) in the same network namespace."""
    found = set[str]()
    network = _network("self")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # another user's process, or one that has just ended
            if _network(pid) != network:
                continue
            for fd in os.listdir(folder := f"/proc/{pid}/fd"):
                if (url := _read_url(f"{folder}/{fd}")) is not None:
                    found.add(url)
    return sorted(found)


def _read_url(path: str) -> str | None:
    """Return the URL in a file descriptor, if it is a published one. It may have been closed meanwhile."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            return None
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


class UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _network(pid: str) -> str | None:
    """Return a process's network namespace; None without permission or namespaces."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
