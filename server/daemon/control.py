"""What the daemon and its API processes tell each other: a line of JSON a message, over a socket pair.

The first line is a `Start`. A closed socket means that the other process has ended.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from weft.engine.wire.messages import EngineStats

LINE_LIMIT = 16 * 2**20
"""bytes of a message at most: a configuration with very many keys"""


class Start(msgspec.Struct, tag="start", frozen=True, kw_only=True):
    """What an API process is to be."""

    config: str
    """a `ServeConfig` as JSON"""
    keys: list[str]
    """digests of the API keys, hexadecimal, by number, which is that of the shared state's bucket; empty for none"""
    row: int
    rows: int
    heartbeat_row: int
    heartbeat_rows: int
    shared_state_fd: int
    heartbeats_fd: int
    listener_fds: list[int]
    taking_over: bool
    """Another daemon has these listeners too and serves: take connections once this process does, with all models that
    are to be awake."""
    hold: list[int]
    """Models whose engines are ready, and so are others: leave connections in the listener's queue until this one is
    too."""


class Failure(msgspec.Struct, frozen=True):
    """An engine process ended that was not told to, or did not become ready."""

    why: str
    at: int
    """seconds since 1970"""


class EngineUp(msgspec.Struct, tag="engine_up", frozen=True):
    """There is an engine process: connect, and serve once it is ready."""

    address: str
    client: int
    before: EngineStats = msgspec.field(default_factory=EngineStats)
    """totals of the engines before it"""
    engine: int = 0
    """which of the daemon's it is"""
    failure: Failure | None = None
    """of the last one before it that failed"""


class EngineDown(msgspec.Struct, tag="engine_down", frozen=True):
    """The engine process has ended: so have all requests. With `restarting` another `EngineUp` follows."""

    why: str
    restarting: bool
    engine: int = 0
    failure: Failure | None = None
    """this, or the last one before it"""


class Together(msgspec.Struct, tag="together", frozen=True):
    """Each of the API processes serves with this engine by now."""

    engine: int


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Take no new work; say `Idle` once nothing is open."""


class HandOver(msgspec.Struct, tag="hand_over", frozen=True):
    """Another daemon has the port: take no more connections, answer on those there are, and say `Idle` once there are
    none."""


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """`keys` as in `Start`. The certificate is to be read again."""

    keys: list[str]


class Interrupt(msgspec.Struct, tag="interrupt", frozen=True):
    """End all open answers with an error event; of this model alone, if one is named, for it goes to sleep."""

    model: int | None = None


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """To a `RestartEngines`, a `WakeModel` or a `SleepModel`."""

    ask: int
    refusal: str = ""
    """why it is not done"""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the process."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Serving with this engine; `chat`: the model has a chat template."""

    chat: bool
    engine: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """Cannot serve; `message` is one line for the operator."""

    message: str


class Idle(msgspec.Struct, tag="idle", frozen=True):
    """Draining, and nothing is open any more."""


class RestartEngines(msgspec.Struct, tag="restart_engines", frozen=True):
    """An operator asks for another process for these engines, all for none, one after the other. Gets an `Answer`."""

    ask: int
    engines: list[int]


class WakeModel(msgspec.Struct, tag="wake", frozen=True):
    """WakeModel this model. The `Answer` comes once it is awake, or will not be."""

    ask: int
    model: int


class SleepModel(msgspec.Struct, tag="sleep", frozen=True):
    """An operator puts this model to sleep; its open requests get so many seconds (None: --drain-timeout) to end. The
    `Answer` comes once it sleeps, or will not."""

    ask: int
    model: int
    level: int
    seconds: float | None = None


ToWorker = Start | EngineUp | EngineDown | Together | Drain | HandOver | Reload | Interrupt | Answer | Stop
FromWorker = Ready | Failed | Idle | RestartEngines | WakeModel | SleepModel
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
        """Messages are few and small: nothing waits for them to be taken. Dropped when the other end has gone."""
        if not self._writer.is_closing():
            self._writer.write(_encode(message) + b"\n")

    async def messages(self) -> AsyncIterator[Incoming]:
        """Until the other process closes its end, or ends with messages unread."""
        with suppress(ConnectionError):
            while (line := await self._reader.readline()).endswith(b"\n"):  # a killed one may leave half a line
                yield self._decoder.decode(line)

    async def first(self) -> Incoming:
        return self._decoder.decode(await self._reader.readline())

    def close(self) -> None:
        self._writer.close()
