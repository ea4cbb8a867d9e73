"""Port handover: a daemon passes its listeners to its successor over a Unix socket.

Both accept from the same queues until the successor serves; then the old daemon stops accepting and finishes its open
requests. No listener is closed before the successor has it, so no connection is lost. A second set of listeners on the
port (SO_REUSEPORT) would lose some: the kernel resets connections that wait in a closed queue.

    successor                         daemon at PATH
    connect            ->
                       <-             a line of JSON (`Offer`), with the listeners
    "serving"          ->             hands over: stops accepting, ends after the last answer
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.engine.errors import ConfigError

PATIENCE = 5.0  # Seconds to wait for the daemon at the path.
MAX_LISTENERS = 250  # Listeners per message; the kernel passes at most 253 file descriptors.
_SERVING = b"serving\n"

logger = logging.getLogger("weft")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the daemon at the path."""

    pid: int
    refusal: str = ""  # Why it does not hand over; empty if it does.
    admin: bool = False  # The last listener is of --admin-port.


class Predecessor:
    """The daemon that currently owns the port."""

    def __init__(self, sock: socket.socket, offer: Offer, listeners: list[socket.socket]) -> None:
        self.pid = offer.pid
        self.admin = listeners.pop() if offer.admin else None  # the listener of --admin-port
        self.listeners = listeners
        self._socket = sock

    def replace(self) -> None:
        """Tell the predecessor to stop, because this daemon serves."""
        with suppress(OSError):  # it has already ended
            self._socket.sendall(_SERVING)
        self._socket.close()


def find(path: str) -> Predecessor | None:
    """Request the listeners of the daemon at `path`. Returns None if there is none. Raises `ConfigError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE)
    try:
        sock.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise ConfigError(f"--handover {path}: {error.strerror or error}") from None
    try:
        if _uid_of(sock) != os.geteuid():
            raise ConfigError(f"--handover {path}: the daemon there belongs to another user")
        data, fds, _, _ = socket.recv_fds(sock, 65536, MAX_LISTENERS)
        listeners = [socket.socket(fileno=fd) for fd in fds]
        if not data:
            raise ConfigError(f"--handover {path}: the daemon there is ending; try again")
        offer = msgspec.json.decode(data, type=Offer)
    except TimeoutError:
        raise ConfigError(f"--handover {path}: the daemon there does not answer") from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--handover {path}: no weft daemon answers there: {error}") from None
    if offer.refusal or not listeners:
        raise ConfigError(f"--handover {path}: {offer.refusal or 'the daemon there has no listeners'}")
    sock.settimeout(None)
    return Predecessor(sock, offer, listeners)


class Handover:
    """Waits for a successor at a path."""

    def __init__(
        self, path: str, listeners: Sequence[socket.socket], on_successor: Callable[[], None],
        admin: socket.socket | None = None,
    ) -> None:  # fmt: skip
        """`on_successor`: called once when the successor serves. `admin`: the listener of --admin-port."""
        self._path = Path(path)
        self._listeners = [*listeners] if admin is None else [*listeners, admin]
        self._offers_admin = admin is not None
        self._on_successor = on_successor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._successor: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take over the path, also from a predecessor. Raises `OSError`."""
        mine = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(FileNotFoundError):
            mine.unlink()
        self._socket.bind(str(mine))
        mine.chmod(0o600)
        self._socket.listen(4)
        self._socket.setblocking(False)
        mine.rename(self._path)
        self._waiting = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(self._socket)
            with peer:
                if _uid_of(peer) != os.geteuid():
                    continue
                if self._successor is not None and not self._successor.done():
                    _send(peer, Offer(pid=os.getpid(), refusal="another daemon is about to take the port over"), ())
                    continue
                if _send(peer, Offer(pid=os.getpid(), admin=self._offers_admin), self._listeners):
                    self._successor = asyncio.create_task(self._follow(peer.dup()))

    async def _follow(self, peer: socket.socket) -> None:
        """Wait until the successor serves or gives up."""
        with peer:
            peer.setblocking(False)
            with suppress(OSError):
                if await asyncio.get_running_loop().sock_recv(peer, 100) == _SERVING:
                    self._on_successor()

    def close(self) -> None:
        """Stop listening. The path stays: it may already belong to a successor, and a stale one does no harm."""
        for task in (self._waiting, self._successor):
            if task is not None:
                task.cancel()
        self._socket.close()


def _send(peer: socket.socket, offer: Offer, listeners: Sequence[socket.socket]) -> bool:
    try:
        peer.setblocking(False)
        socket.send_fds(peer, [msgspec.json.encode(offer)], [listener.fileno() for listener in listeners])
    except OSError as error:
        logger.warning("could not offer the port to another daemon: %s", error)
        return False
    return True


def _uid_of(peer: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)
