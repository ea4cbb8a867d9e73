"""Messages between the daemon and its API processes: one line of JSON each, over a socket pair.

The first message is `Start`. A closed socket means that the other process has ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from weft.engine.wire.messages import EngineStats

LINE_LIMIT = 16 * 2**20  # Maximum bytes of a message, such as a configuration with very many keys.


class Start(msgspec.Struct, tag="start", frozen=True, kw_only=True):
    """Configuration of an API process."""

    config: str  # A `ServeConfig` as JSON.
    keys: list[str]
    """Hexadecimal digests of the API keys by number, the row of `SharedState.buckets`; empty for a gap."""
    best_priorities: list[int]
    """The best priority of each key."""
    row: int
    rows: int
    heartbeat_row: int
    heartbeat_rows: int
    shared_state_fd: int
    heartbeats_fd: int
    listener_fds: list[int]
    local_hosts: list[str]
    """Hosts allowed at TCP ports that only programs of this machine reach, if there are no keys and no --allowed-host.
    Else it is empty."""
    admin_fd: int | None
    """The one of `listener_fds` that is of --admin-port."""
    taking_over: bool
    """Another daemon serves on the same listeners: accept connections only once all awake models serve here."""
    hold: list[int]
    """Models that other processes already serve: accept connections only once this process serves them, too."""


class Failure(msgspec.Struct, frozen=True):
    """An engine process that ended unexpectedly or did not become ready."""

    why: str
    at: int  # Unix time in seconds.


class EngineUp(msgspec.Struct, tag="engine_up", frozen=True):
    """An engine process has started: connect, and serve once it is ready."""

    address: str
    client: int
    before: EngineStats = msgspec.field(default_factory=EngineStats)  # Totals of its predecessors.
    engine: int = 0  # Number of the engine.
    failure: Failure | None = None  # Failure of the last predecessor that failed.


class EngineDown(msgspec.Struct, tag="engine_down", frozen=True):
    """An engine process and its requests have ended. With `restarting`, another `EngineUp` follows."""

    why: str
    restarting: bool
    engine: int = 0
    failure: Failure | None = None  # Failure of this process, or of the last predecessor that failed.


class Together(msgspec.Struct, tag="together", frozen=True):
    """All API processes now serve with this engine."""

    engine: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Refuse new requests; send `Idle` once none is open."""


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Another daemon has the port: accept no connections, serve the open ones, and send `Idle` once there are none."""


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Replace the keys (see `Start`) and reload the certificate."""

    keys: list[str]
    best_priorities: list[int]


class Interrupt(msgspec.Struct, tag="interrupt", frozen=True):
    """End all open responses with an error event; with `model`, only those of a model that goes to sleep."""

    model: int | None = None


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """Answer to `RestartEngines`, `WakeModel` or `SleepModel`."""

    ask: int
    refusal: str = ""  # Why the request is refused; empty on success.


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the process."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The process serves with this engine. `chat`: the model has a chat template."""

    chat: bool
    engine: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The process cannot serve. `message` is one line for the operator."""

    message: str


class Idle(msgspec.Struct, tag="idle", frozen=True):
    """The process drains and has no open requests."""


class RestartEngines(msgspec.Struct, tag="restart_engines", frozen=True):
    """Restart these engines in sequence; all if empty. Gets an `Answer`."""

    ask: int
    engines: list[int]


class WakeModel(msgspec.Struct, tag="wake", frozen=True):
    """Wake a model. The `Answer` follows once it is awake, or cannot be woken."""

    ask: int
    model: int
    operator: bool = False  # Also resume a paused model.


class SleepModel(msgspec.Struct, tag="sleep", frozen=True):
    """Put a model to sleep, or pause it (level 0). The `Answer` follows once it sleeps or has failed. `seconds`: time
    for open requests to finish; None for --drain-timeout."""

    ask: int
    model: int
    level: int
    seconds: float | None = None


ToWorker = Start | EngineUp | EngineDown | Together | Drain | HandOver | Reload | Interrupt | Answer | Stop
Question = RestartEngines | WakeModel | SleepModel
FromWorker = Ready | Failed | Idle | Question
Incoming = TypeVar("Incoming")

_encode = msgspec.json.Encoder().encode


class Channel(Generic[Incoming]):
    """One end of the socket pair, on an asyncio loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.json.Decoder[Incoming]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def of_daemon(cls, sock: socket.socket) -> Channel[FromWorker]:
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LINE_LIMIT)
        return Channel(reader, writer, msgspec.json.Decoder(FromWorker))

    @classmethod
    async def of_worker(cls, sock: socket.socket) -> Channel[ToWorker]:
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LINE_LIMIT)
        return Channel(reader, writer, msgspec.json.Decoder(ToWorker))

    def send(self, message: ToWorker | FromWorker) -> None:
        """Send without waiting: messages are few and small. A message to an ended process is dropped."""
        if not self._writer.is_closing():
            self._writer.write(_encode(message) + b"\n")

    async def messages(self) -> AsyncIterator[Incoming]:
        """Yield messages until the other process closes its end, or ends with unread messages."""
        with suppress(ConnectionError):
            while (line := await self._reader.readline()).endswith(b"\n"):  # a killed process may leave half a line
                yield self._decoder.decode(line)

    async def first(self) -> Incoming:
        return self._decoder.decode(await self._reader.readline())

    def close(self) -> None:
        self._writer.close()
