"""`Server`: uvicorn's server with `Acceptor`s and without signal handling, which the daemon does."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

import uvicorn

from weft.server.api.accept import Acceptor
from weft.server.api.app import create_app
from weft.server.api.connection import Connection
from weft.server.api.service import Service
from weft.server.observe.scrape import scrape

logger = logging.getLogger("weft")


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._acceptors: list[Acceptor] = []
        self.tls: ssl.SSLContext | None = None
        """The context for new connections."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`sockets`: listeners, which other processes may accept from as well."""
        await super().startup(sockets=None if sockets is None else [])
        self.tls = self.config.ssl
        refused = self._service.metrics.accepts_refused.inc
        self._acceptors = [Acceptor(s, self._protocol, lambda: self.tls, refused) for s in sockets or ()]
        for acceptor in self._acceptors:
            acceptor.start()

    def _protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]

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
    protocol = partial(Connection, service=service, shortcuts={b"/metrics": partial(scrape, service.metrics)})
    return Server(
        uvicorn.Config(
            create_app(service),
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
