"""`Server`: uvicorn's server with `Acceptor`s and without signal handling, which the daemon does.

The event loop's own server neither reports refused connections nor leaves queued ones to another process.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn

from weft.server.api.app import create_app
from weft.server.api.connection import Connection
from weft.server.api.service import Service
from weft.server.errors import ApiError, unavailable

NOT_HERE = ApiError(404, "This is the --admin-port: it serves only health, metrics and administration.")
NO_DESCRIPTOR = unavailable("The server has no free file descriptor for another connection.", "no_descriptor", 1)

logger = logging.getLogger("weft")


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._acceptors: list[Acceptor] = []
        self.tls: ssl.SSLContext | None = None  # the context for new connections
        self.admin_sockets: list[socket.socket] = []  # the listeners of --admin-port

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`sockets`: listeners, which other processes may accept from as well."""
        await super().startup(sockets=None if sockets is None else [])
        self.tls = self.config.ssl
        refused, config = self._service.metrics.accepts_refused.inc, self.config
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        protocol: Callable[[], asyncio.Protocol] = partial(config.http_protocol_class, config=config, **state)  # type: ignore[call-arg]
        self._acceptors = [
            Acceptor(s, protocol, lambda: self.tls, refused, self._close_idle, vital=s in self.admin_sockets)
            for s in sockets or ()
        ]
        for acceptor in self._acceptors:
            acceptor.start()

    def stop_accepting(self) -> None:
        """Leave queued connections to other processes. Idempotent."""
        for acceptor in self._acceptors:
            acceptor.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_accepting()
        await super().shutdown(sockets)

    def reread_certificate(self) -> None:
        """Use the certificate files for new connections."""
        config = self.config
        if config.ssl is not None and config.ssl_certfile is not None:
            context = ssl.SSLContext(config.ssl_version)  # as uvicorn does
            if config.ssl_ciphers:
                context.set_ciphers(config.ssl_ciphers)
            try:
                context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
            except (OSError, ssl.SSLError) as error:  # the daemon checked it, but it has changed since
                logger.error("keeping the old certificate: %s", error)
            else:
                self.tls = context

    def _close_idle(self) -> bool:
        """Close the connection that has been idle for longest. Returns False if none is."""
        idle = [c for c in self.server_state.connections if isinstance(c, Connection) and c.idle_since is not None]
        if idle:
            min(idle, key=lambda c: c.idle_since or 0.0).transport.abort()
        return bool(idle)

    def close_after_answers(self) -> None:
        """Close each connection after its current or next answer."""
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.close_after_answer()

    @property
    def num_connections(self) -> int:
        return len(self.server_state.connections)


def make_server(service: Service) -> Server:
    config = service.config
    logging.getLogger("uvicorn.access").propagate = False  # uvicorn checks whether the logger has handlers
    app = create_app(service)
    shortcuts = {b"/metrics": service.metrics.scrape}
    protocol = partial(Connection, service=service, shortcuts=shortcuts, browsers=app.state.browsers)
    return Server(
        uvicorn.Config(
            app,
            http=protocol,  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
        ),
        service,
    )


SPARE = 32  # file descriptors kept free of ordinary connections
RESERVE = 16  # of these, descriptors for connections that ask only for health, metrics and administration
LAST = 4  # of these, descriptors that not even --admin-port uses
MOST_SPARE = 1 / 8  # of all file descriptors, if there are few
BATCH = 64  # connections accepted per turn of the event loop
AT_LIMIT = 4  # connections accepted per SETTLE_SECONDS when descriptors are short
SETTLE_SECONDS = 0.01  # seconds in which a connection that was aborted is closed
PAUSE = 0.1  # seconds to wait after accepting fails
LOG_SECONDS = 60.0  # seconds between log lines about refused connections


class Acceptor:
    """Accepts from `start` to `stop`; later connections stay in the listener's queue."""

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None], on_refused: Callable[[], None],
        close_idle: Callable[[], bool] = lambda: False, *, vital: bool = False,
    ) -> None:  # fmt: skip
        """`tls`: called for each connection. `on_refused`: called for each connection closed unread. `close_idle`:
        closes a connection that waits for a request, if there is one. `vital`: the listener is of `--admin-port`."""
        self._listener, self._make_protocol, self._tls, self._on_refused = listener, make_protocol, tls, on_refused
        self._loop = asyncio.get_running_loop()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = limit
        spare = min(SPARE, int(limit * MOST_SPARE))
        self._highest = limit - spare if limit != resource.RLIM_INFINITY else 2**31
        self._very_highest = self._highest + (spare - LAST if vital else min(RESERVE, spare // 2))
        self._close_idle, self._vital = close_idle, vital
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._refused = 0  # refused connections since the last log line
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
        taken_at_limit = 0
        for _ in range(BATCH):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client has already disconnected
            except OSError:  # no descriptor or no memory, here or in the whole system
                self._close_idle()
                self._refuse()
                self._wait(PAUSE)
                return
            full = sock.fileno() >= self._highest
            if full:
                closes = self._close_idle()
                if closes or sock.fileno() >= self._very_highest:
                    self._refuse()
                if not closes and sock.fileno() >= self._very_highest:
                    sock.close()
                    continue
            task = self._loop.create_task(self._begin(sock, full=full))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
            taken_at_limit += full
            if taken_at_limit == AT_LIMIT:  # more would fill the reserve before these are answered
                self._wait(SETTLE_SECONDS)
                return

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._pause = self._loop.call_later(seconds, self.start)

    async def _begin(self, sock: socket.socket, *, full: bool) -> None:
        try:
            if full:
                await asyncio.sleep(SETTLE_SECONDS)
                high, sock = sock, sock.dup()  # to the descriptor that was freed, if one was
                high.close()
            protocol = self._make_protocol()
            if self._vital:
                protocol.vital_only = NOT_HERE  # type: ignore[attr-defined]
            elif sock.fileno() >= self._highest:
                protocol.vital_only = NO_DESCRIPTOR  # type: ignore[attr-defined]
            await self._loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls())
        except (OSError, ssl.SSLError, asyncio.CancelledError):  # a handshake that failed
            with suppress(OSError):
                sock.close()

    def _refuse(self) -> None:
        self._on_refused()
        self._refused += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_SECONDS:
            what = "closed %d connections for lack of file descriptors: the process limit is %d (ulimit -n)"
            logger.warning(what, self._refused, self._limit)
            self._refused, self._logged_at = 0, now
