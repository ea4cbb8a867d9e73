"""`ApiProcess`: the daemon's handle of an API process."""

from __future__ import annotations

import asyncio
import os
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple

from weft.engine.wire.child import command, stacks_signal_blocked
from weft.engine.wire.exiting import how_ended
from weft.engine.wire.heartbeat import Heartbeats
from weft.engine.wire.memory_kills import MemoryKills
from weft.engine.wire.stacks import Stacks
from weft.server.config import HOST, ServeConfig
from weft.server.daemon.certificate import Certificate
from weft.server.daemon.control import Channel, FromWorker, Start, Stop, ToWorker
from weft.server.observe.shared_state import SharedState

START_SECONDS = 120.0  # Seconds from the start of an API process to its first heartbeat.


class Place(NamedTuple):
    """Shared memory and file descriptors passed to an API process."""

    row: int  # Its row of the shared state.
    shared_state: SharedState
    heartbeats: Heartbeats
    heartbeat_row: int  # Its row of the heartbeats.
    engine_fds: Sequence[int]  # File descriptors that the engines' addresses refer to.


class ApiProcess:
    """A running API process. Create it with `await ApiProcess.start(...)`."""

    def __init__(self, process: Process, channel: Channel[FromWorker], stacks: Stacks, place: Place) -> None:
        self.stacks = stacks
        self._place = place
        self._process = process
        self._channel = channel
        self._why = ""
        self._memory_kills = MemoryKills()

    @classmethod
    async def start(
        cls, config: ServeConfig, keys: list[bytes], best_priorities: list[int], place: Place,
        listeners: Sequence[socket.socket], *, certificate: Certificate | None = None, taking_over: bool = False,
        hold: Sequence[int] = (),
    ) -> ApiProcess:  # fmt: skip
        """`keys`: digests. `best_priorities`: of each key. `taking_over`, `hold`: see `Start`."""
        row, shared_state, heartbeats, heartbeat_row, engine_fds = place
        fds = [listener.fileno() for listener in listeners]
        tls_fds = [] if certificate is None else [certificate.fd]
        # Keys stay in the daemon; only their digests are sent.
        own: dict[str, Any] = {"api_key": [], "api_key_file": None}
        if certificate is not None:
            own |= {"tls_cert": certificate.path, "tls_key": None}
        stacks = Stacks()
        heartbeats.of(heartbeat_row).begin("starting", START_SECONDS)
        ours, theirs = socket.socketpair()
        with theirs, stacks_signal_blocked():
            process = await asyncio.create_subprocess_exec(
                *command(os.getpid(), "weft.server.daemon.worker", stacks.fd),
                stdin=theirs.fileno(),
                pass_fds=(shared_state.fd, heartbeats.fd, stacks.fd, *engine_fds, *fds, *tls_fds),
                start_new_session=True,  # Ctrl-C must reach only the daemon, which then drains
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        heartbeats.of(heartbeat_row).begin("starting", START_SECONDS, process.pid)
        channel = await Channel.of_daemon(ours)
        channel.send(
            Start(
                config=config.model_copy(update=own).model_dump_json(),
                keys=[key.hex() for key in keys],
                best_priorities=best_priorities,
                row=row,
                rows=shared_state.rows,
                heartbeat_row=heartbeat_row,
                heartbeat_rows=heartbeats.rows,
                shared_state_fd=shared_state.fd,
                heartbeats_fd=heartbeats.fd,
                listener_fds=fds,
                local_hosts=_local_hosts(config, keys, listeners),
                admin_fd=None if config.admin_port is None else fds[-1],
                taking_over=taking_over,
                hold=list(hold),
            )
        )
        return cls(process, channel, stacks, place)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def takes_messages(self) -> bool:
        """Whether it has finished its imports and may have accepted connections."""
        return not self._place.heartbeats.of(self._place.heartbeat_row).allowed

    def send(self, message: ToWorker) -> None:
        self._channel.send(message)

    def messages(self) -> AsyncIterator[FromWorker]:
        """Yield messages until the process ends."""
        return self._channel.messages()

    async def wait(self) -> str:
        """Wait for the process to end, and return how it ended."""
        code = await self._process.wait()
        self._channel.close()
        if self._why:
            return self._why
        return self._memory_kills.explain(how_ended(code))

    def kill(self, why: str = "") -> None:
        """`why`: returned by `wait` instead of the signal."""
        if self._process.returncode is None:
            self._why = self._why or why
            self._process.kill()

    async def stop(self, timeout: float) -> None:
        """Ask the process to end, and kill it after `timeout` seconds."""
        self.send(Stop())
        if not self.takes_messages:
            self.kill()  # it may not read the message for seconds, and has no open requests
        try:
            await asyncio.wait_for(self.wait(), timeout)
        except TimeoutError:
            self.kill()
            await self.wait()


def _local_hosts(config: ServeConfig, keys: Sequence[bytes], listeners: Sequence[socket.socket]) -> list[str]:
    """See `Start.local_hosts`: a web page must not become a program of this machine by DNS rebinding."""
    names = [listener.getsockname() for listener in listeners if listener.family != socket.AF_UNIX]
    if config.allowed_host or keys or not names or not all(map(_is_loopback, names)):
        return []
    return ["localhost", *filter(HOST.fullmatch, [config.host.lower().removesuffix(".")])]


def _is_loopback(name: tuple[Any, ...]) -> bool:
    address = ip_address(name[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
