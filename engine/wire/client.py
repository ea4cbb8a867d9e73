"""`EngineClient`: a connection to the engine process, one per client process. It does not import torch."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio

from weft.engine.errors import WeftError
from weft.engine.wire import messages
from weft.engine.wire.engine_socket import identity
from weft.engine.wire.streams import Streams

QUIET_SECONDS = 0.1  # seconds without a message after which a process that has ended is assumed to have sent no more
DRAIN_SECONDS = 2.0


class EngineClient(Streams):
    """Connects at once, even before the engine listens. The engine's watcher reports its end with `mark_dead`."""

    def __init__(self, address: str, number: int, *, pages: bool = False) -> None:
        """`number` is unique among all clients that the engine ever has. `pages` is as in `Hello`."""
        super().__init__(number)
        self.ready: messages.EngineReady | None = None
        self._received = 0  # number of messages received
        self._settled = asyncio.Event()
        self._sleep_reply: asyncio.Future[messages.SleepReply] | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, identity(number))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.connect(address)
        self._send(messages.Hello(pages))
        self.reader = asyncio.create_task(self._read_loop())
        """Ends only with an error, after which no request is answered."""

    async def wait_ready(self) -> messages.EngineReady:
        """Wait for the model to be loaded. Raises `WeftError` if the engine could not start."""
        await self._settled.wait()
        if self.ready is None:
            raise WeftError(self.dead or "the engine did not start")
        return self.ready

    def client_gone(self, number: int) -> None:
        """Have the engine drop all requests of another client, whose process has ended."""
        self._send(messages.ClientGone(number))

    async def sleep(self) -> messages.SleepReply:
        """Have the engine free its memory. No request may be open."""
        return await self._request_sleep(messages.Sleep())

    async def wake(self) -> messages.SleepReply:
        return await self._request_sleep(messages.Wake())

    async def _request_sleep(self, message: messages.Sleep | messages.Wake) -> messages.SleepReply:
        if self.dead is not None:
            return messages.SleepReply(why_not=self.dead)
        self._sleep_reply = asyncio.get_running_loop().create_future()
        self._send(message)
        return await self._sleep_reply

    def _resolve_sleep(self, answer: messages.SleepReply) -> None:
        if self._sleep_reply is not None and not self._sleep_reply.done():
            self._sleep_reply.set_result(answer)

    def mark_dead(self, why: str) -> None:
        self._resolve_sleep(messages.SleepReply(why_not=why))
        super().mark_dead(why)
        self._settled.set()

    def _send(self, message: messages.ToEngine) -> None:
        if self.dead is None and not self._socket.closed:
            # Without a high-water mark zmq accepts the message at once, so the future is already done.
            self._socket.send(messages.encoder.encode(message))

    async def _read_loop(self) -> None:
        while True:
            message = messages.from_engine_decoder.decode(await self._socket.recv())
            self._received += 1
            match message:
                case messages.Outputs():
                    for _ in self._delivering(message):
                        await asyncio.sleep(0)
                case messages.EngineReady():
                    self.ready = message
                    self._settled.set()
                case messages.SleepReply():
                    self._resolve_sleep(message)
                case messages.AdapterNews():
                    self.adapters[message.name] = message
                    if self.on_adapter is not None:
                        self.on_adapter(message)

    async def drain(self) -> None:
        """Read the remaining messages of a process that has ended. Its end can be detected before they are read."""
        received = -1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while received != self._received and not self.reader.done():
                    received = self._received
                    await asyncio.sleep(QUIET_SECONDS)

    def close(self) -> None:
        self.reader.cancel()
        self._socket.close(0)
        self._context.term()
