"""`ApiProcess`: an API process from the side of the daemon."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence

from weft.server.config import ServeConfig
from weft.server.daemon.certificate import Certificate
from weft.server.daemon.control import Channel, FromWorker, Start, ToWorker
from weft.server.observe.board import Board


class ApiProcess:
    """A running API process. Create with `await ApiProcess.start(...)`."""

    def __init__(self, process: Process, channel: Channel[FromWorker]) -> None:
        self._process = process
        self._channel = channel

    @classmethod
    async def start(
        cls,
        config: ServeConfig,
        keys: list[bytes],
        row: int,
        board: Board,
        listeners: Sequence[socket.socket],
        *,
        certificate: Certificate | None = None,
        taking_over: bool = False,
    ) -> ApiProcess:
        """`keys`: digests. `row`: the process's own on the board. `taking_over`: as in `Start`."""
        fds = [listener.fileno() for listener in listeners]
        tls_fds = [] if certificate is None else [certificate.fd]
        tls = {} if certificate is None else {"tls_cert": certificate.path, "tls_key": None}
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "weft.server.daemon.worker",
                stdin=theirs.fileno(),
                pass_fds=(board.fd, *fds, *tls_fds),
                start_new_session=True,  # Ctrl-C reaches the daemon alone, which then drains
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        channel = await Channel.of_daemon(ours)
        channel.send(
            Start(
                # The keys themselves stay here.
                config=config.model_copy(update={"api_key": [], "api_key_file": None, **tls}).model_dump_json(),
                keys=[key.hex() for key in keys],
                row=row,
                rows=board.rows,
                board_fd=board.fd,
                listener_fds=fds,
                taking_over=taking_over,
            )
        )
        return cls(process, channel)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        self._channel.send(message)

    def messages(self) -> AsyncIterator[FromWorker]:
        """Until the process ends."""
        return self._channel.messages()

    async def wait(self) -> str:
        """Wait for its end, and tell how it ended."""
        code = await self._process.wait()
        self._channel.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
