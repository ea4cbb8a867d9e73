"""Listening sockets on one port, at least one per API process. They are bound, inherited from a service manager, or
taken over from another daemon (`handover`), before anything is loaded."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from weft.engine.errors import ConfigError

BACKLOG = 2048
FIRST_FD = 3  # First file descriptor from a service manager; see sd_listen_fds(3).


def listen(host: str, port: int, count: int, option: str = "--port") -> list[socket.socket]:
    """Return sockets between which the kernel distributes connections (SO_REUSEPORT). Raises `ConfigError`. The daemon
    keeps them all open, so that connections to a process that died wait for its successor."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Probe without SO_REUSEPORT, so that two daemons do not share a port by accident.
        probe = socket.socket(family, kind, proto)
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            if count == 1:
                probe.listen(BACKLOG)
                probe.setblocking(False)
                return [probe.dup()]
            address = probe.getsockname()
        listeners = []
        for _ in range(count):
            listener = socket.socket(family, kind, proto)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            listeners.append(listener)
        return listeners
    except OSError as error:
        hint = f"; choose another {option}" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None


def listen_unix(path: str) -> socket.socket:
    """Return a listener on a Unix socket, which all API processes share. It replaces a socket on which nothing listens.
    The umask sets its permissions. Raises `ConfigError`."""
    file = Path(path).absolute()
    try:
        if file.is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                with suppress(ConnectionRefusedError):
                    probe.connect(str(file))
                    raise ConfigError(f"--uds {path}: another process listens there")
            file.unlink()
        elif file.exists():
            raise ConfigError(f"--uds {path}: the file exists and is not a socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(file))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def inherited(environment: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """Return the listeners from a service manager (`LISTEN_FDS`), if any, and remove its variables. The manager keeps
    the sockets open while no daemon runs, so that connections wait. Raises `ConfigError`."""
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    listeners = []
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        os.set_inheritable(fd, False)
        try:
            listener = socket.socket(fileno=fd)
            listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigError(f"LISTEN_FDS: file descriptor {fd}: {error.strerror or error}") from None
        if not listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
            raise ConfigError(
                f"LISTEN_FDS: file descriptor {fd} is not a listening TCP socket (ListenStream=, Accept=no)"
            )
        listener.setblocking(False)
        listeners.append(listener)
    return listeners


def distribute(listeners: Sequence[socket.socket], count: int) -> list[list[socket.socket]]:
    """Assign the listeners to `count` API processes. Every process gets at least one; processes may share one."""
    return [list(listeners[i::count]) or [copy_of(listeners[i % len(listeners)])] for i in range(count)]


def copy_of(listener: socket.socket) -> socket.socket:
    """A listener with the same queue."""
    # Not `dup`: it makes the copy and the original blocking in every process that accepts from it.
    return socket.socket(fileno=os.dup(listener.fileno()))
