"""Listening sockets: one for each API process, all on one port, taken before anything is loaded."""

from __future__ import annotations

import errno
import socket

from weft.engine.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Sockets between which the kernel shares out connections (SO_REUSEPORT). Raises `ConfigError`.

    The daemon keeps them all open: what has connected to a process that died waits for its successor.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Two daemons could share a port by accident: without SO_REUSEPORT the kernel tells whether it is taken.
        probe = socket.socket(family, kind, proto)
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            if count == 1:
                probe.listen(BACKLOG)
                return [probe.dup()]
            address = probe.getsockname()
        listeners = []
        for _ in range(count):
            listener = socket.socket(family, kind, proto)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listeners.append(listener)
        return listeners
    except OSError as error:
        hint = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None
