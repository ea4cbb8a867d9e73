"""Where daemons serve, for other processes of their user: each has its URL in a file of its memory, found in /proc.

A health check in a container knows neither the daemon's flags nor its configuration file. Nothing is written to a disk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

NAME = "weft-url"


def url_of(address: tuple[Any, ...], *, tls: bool) -> str:
    """The URL at which this machine reaches a listening socket. `address`: the socket's."""
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{host}:{port}"


def publish(url: str) -> int:
    """A file descriptor: others find the URL for as long as it is open."""
    fd = os.memfd_create(NAME)
    os.write(fd, url.encode())
    return fd


def published() -> list[str]:
    """The URLs of all daemons whose memory this process may see (those of its user, for root all), and that it reaches:
    the addresses of another container are not its own."""
    found = set[str]()
    network = _network("self")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # somebody else's, or it has just ended
            if _network(pid) != network:
                continue
            for fd in os.listdir(folder := f"/proc/{pid}/fd"):
                if (url := _told(f"{folder}/{fd}")) is not None:
                    found.add(url)
    return sorted(found)


def _told(path: str) -> str | None:
    """What a file descriptor of a process says, if it is one of ours. A daemon that serves opens and closes some all
    the time: one that is gone by now says nothing of the others."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            return None
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def _network(pid: str) -> str | None:
    """The network of a process; None of one that may not be looked at, and where the kernel has but one."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None
