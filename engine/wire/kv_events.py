"""`KvPublisher`: KV-cache events over ZeroMQ, in the form that vLLM published and that routers read.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array
`[time, [event, …], rank]`. An event is an array that begins with its name. A second socket sends messages again: asked
with a sequence number it answers with all messages from there on that are kept, then with the number -1.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError

KEPT_MESSAGES = 10_000
"""for those who ask for them again"""
KEPT_BYTES = 64 * 2**20
HIGH_WATER = 100_000
"""messages that a slow subscriber may be behind, before it loses some"""
WAITING = 10_000
"""that may wait for the thread, before all subscribers lose some"""
POLL_SECONDS = 0.05
SNAPSHOT_SECONDS = 10.0
"""between two whole accounts of the index at least"""
END = (-1).to_bytes(8, "big", signed=True)
_OWN = re.compile(r"tcp://(\*|0\.0\.0\.0|127\.[\d.]+|localhost|\[?::1?\]?):|ipc://|inproc://")
"""addresses to listen at; others belong to somebody who listens there"""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", omit_defaults=True):
    """Blocks of a chain, each the child of the one before, are kept in a medium from now on."""

    block_hashes: list[int]
    """64-bit; they name blocks, and are not to be computed by others"""
    parent_block_hash: int | None
    """of the block before the first one"""
    token_ids: list[int]
    """of all blocks: a multiple of `block_size`"""
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """what beside tokens and parent makes the block: the salt, for a first block that has one"""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """Nothing is kept any more, in no medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


class KvPublisher:
    """A thread with the sockets. Listens from the start, so that subscribers are there for the first event."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, rank: int = 0) -> None:
        """rank: of this engine among those of one daemon; its ports are so many higher. Raises `ConfigError`."""
        self.wanted = True
        """somebody misses events that are not kept: a whole account of the index is due"""
        self._topic, self._rank = topic.encode(), rank
        self._queue: queue.SimpleQueue[Callable[[], Sequence[Event]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._dropped = False
        # A later engine begins below all numbers of one before it: a subscriber sees every restart as a number that is
        # too small, and never takes the one's messages for the other's.
        self._next = 2**62 - time.time_ns() // 1000
        self._context = zmq.Context()
        try:
            self._pub = self._open(zmq.PUB, endpoint, "--kv-events-endpoint")
            self._replay = None
            if replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, replay_endpoint, "--kv-events-replay-endpoint")
        except ConfigError:
            self._context.destroy(0)
            raise
        self._thread = threading.Thread(target=self._run, name="weft-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, option: str) -> zmq.Socket[bytes]:
        endpoint = of_rank(endpoint, self._rank)
        made = self._context.socket(kind)
        made.set_hwm(HIGH_WATER)
        made.setsockopt(zmq.LINGER, 200)
        try:
            (made.bind if _OWN.match(endpoint) else made.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{option} {endpoint}: {error.strerror}") from None
        return made

    @property
    def address(self) -> str:
        """Where events are to be had."""
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_address(self) -> str:
        assert self._replay is not None
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def put(self, make: Callable[[], Sequence[Event]]) -> None:
        """Publish what this makes, in the thread. When too much waits it is lost, and a whole account is due."""
        if self._queue.qsize() >= WAITING:
            self.wanted = True
        else:
            self._queue.put(make)

    def close(self) -> None:
        """What waits still leaves, if somebody takes it soon."""
        self._queue.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            self._send_again()
            try:
                make = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            if make is None:
                break
            payload = encode(EventBatch(time.time(), list(make()), self._rank))
            number = self._next.to_bytes(8, "big")
            self._next += 1
            self._pub.send_multipart((self._topic, number, payload))
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > KEPT_MESSAGES or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
                self._dropped = True
        self._context.destroy()

    def _send_again(self) -> None:
        """Answer those who miss messages. What a peer does not take is dropped, as a router's socket does."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            peer, first = frames[0], int.from_bytes(frames[2], "big")
            oldest = int.from_bytes(self._kept[0][0], "big") if self._kept else self._next
            if first < oldest and self._dropped:
                self.wanted = True
            for number, payload in self._kept:
                if int.from_bytes(number, "big") >= first:
                    self._replay.send_multipart((peer, b"", number, payload))
            self._replay.send_multipart((peer, b"", END, b""))


def make_publisher(config: EngineConfig, rank: int = 0) -> KvPublisher | None:
    """The one that the configuration asks for, if any. Raises `ConfigError`."""
    if config.kv_events_endpoint is None:
        return None
    topic = config.kv_topic(config.model_name)
    return KvPublisher(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic, rank)


def of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of another engine of the same daemon."""
    if not rank or endpoint.endswith("*"):
        return endpoint
    base, colon, port = endpoint.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if endpoint.startswith("tcp://") else f"{endpoint}.{rank}"
