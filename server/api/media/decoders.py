"""`Decoders`: decodes images in processes that may die, a few at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from weft.engine.images.plan import ImagePlan
from weft.server.api.media.decode_messages import HEADER, Cut, Open, Size, Tiles

CPU_SECONDS = 10.0  # limit of one image
WALL_SECONDS = 30.0
BYTES_PER_PIXEL = 16  # decoded, converted, resized
SPARE_BYTES = 128 * 2**20
START_SECONDS = 60.0

T = TypeVar("T", Size, Tiles)


class DecodeFailed(Exception):
    """The image cannot be decoded. The message is one clause for the client."""


class DecodersBusy(Exception):
    """No decoder finished, and the image is not the cause: the machine is short of time, memory or descriptors, or the
    decoders were killed."""


class _Lost(Exception):
    """A decoder ended without an answer."""


class OpenImage:
    """An image in its decoder, which waits for `tiles`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: Size) -> None:
        self._reader, self._writer = reader, writer
        self.width, self.height, self.format = size.width, size.height, size.format

    async def tiles(self, plan: ImagePlan, resample: int) -> bytes:
        """The pixels of all tiles, in order. Raises `DecodeFailed`."""
        await _send(self._writer, Cut(list(plan.canvas), list(plan.tiles), resample, plan.background))
        answer = await _receive(self._reader, Tiles)
        if answer.error:
            raise DecodeFailed(answer.error)
        if len(answer.pixels) != 3 * plan.num_pixels:
            raise DecodeFailed("it could not be decoded")
        return answer.pixels


class Decoders:
    """Runs on the event loop. Its process starts with the first image and again if it has ended."""

    def __init__(self, max_pixels: int, slots: int | None = None) -> None:
        """`slots`: images decoded at once; by default half of the CPUs, 1 to 4."""
        self._memory_bytes = SPARE_BYTES + BYTES_PER_PIXEL * max_pixels
        self._slots = asyncio.Semaphore(slots or max(1, min(4, (os.cpu_count() or 1) // 2)))
        self._process: Process | None = None
        self._requests: socket.socket | None = None
        self._starting = asyncio.Lock()
        self.cpu_seconds = CPU_SECONDS
        self.wall_seconds = WALL_SECONDS

    @asynccontextmanager
    async def open(self, data: bytes, waited: Callable[[float], None] = lambda _: None) -> AsyncIterator[OpenImage]:
        """Open a file in a process of its own, which ends with the context. Raises `DecodeFailed` or `DecodersBusy`."""
        begin = time.perf_counter()
        async with self._slots:
            waited(time.perf_counter() - begin)
            try:
                reader, writer, parent = await self._child()
            except OSError:
                raise DecodersBusy from None
            begin = time.perf_counter()
            try:
                async with asyncio.timeout(self.wall_seconds):
                    job = Open(data, self._memory_bytes, self.cpu_seconds, self.wall_seconds)
                    await _send(writer, job)
                    size = await _receive(reader, Size)
                    if size.error:
                        raise DecodeFailed(size.error)
                    yield OpenImage(reader, writer, size)
            except TimeoutError:
                raise DecodersBusy from None
            except _Lost:
                if _has_ended(parent) or time.perf_counter() - begin >= self.wall_seconds:
                    raise DecodersBusy from None
                raise DecodeFailed("it could not be decoded within the limits of time and memory") from None
            finally:
                writer.close()

    async def _child(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
        """Return the streams of a new decoder and the socket of its parent. Raises `OSError`."""
        for attempt in (0, 1):
            async with self._starting:
                if self._requests is None:
                    await self._start()
            parent = self._requests
            ours, theirs = socket.socketpair()
            try:
                assert parent is not None
                socket.send_fds(parent, [b"x"], [theirs.fileno()])
            except OSError:
                ours.close()
                self._stop()
                if attempt:
                    raise
            else:
                return *await asyncio.open_connection(sock=ours, limit=2**20), parent
            finally:
                theirs.close()
        raise AssertionError

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = (sys.executable, "-P", "-m", "weft.server.api.media.decode_child")
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=theirs.fileno(), start_new_session=True
            )
        self._requests = ours

    def _stop(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process = None

    def close(self) -> None:
        """Idempotent."""
        self._stop()


async def _send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    try:
        writer.write(HEADER.pack(len(data)))
        writer.write(data)
        await writer.drain()
    except ConnectionError:
        raise _Lost from None


async def _receive(reader: asyncio.StreamReader, kind: type[T]) -> T:
    try:
        (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
        raise _Lost from None


def _has_ended(parent: socket.socket) -> bool:
    """Return whether the process at the other end of this socket has ended. It ends before its children do."""
    try:
        return parent.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
