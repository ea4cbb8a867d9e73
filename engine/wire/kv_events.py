"""`KvPublisher`: publishes KV-cache events over ZeroMQ, in vLLM's format, which routers read.

A message has three frames: topic, sequence number (8 bytes, big-endian), and a msgpack array
`[time, [event, …], rank]`. An event is an array that starts with its name. A second socket replays messages: it answers
a sequence number with all kept messages from there on, then with the number -1.
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

KEPT_MESSAGES = 10_000  # messages kept for replay
KEPT_BYTES = 64 * 2**20
HIGH_WATER = 100_000  # messages queued for a slow subscriber before it loses some
WAITING = 10_000  # messages queued for the thread before all subscribers lose some
POLL_SECONDS = 0.05
SNAPSHOT_SECONDS = 10.0  # minimum seconds between two snapshots of the index
END = (-1).to_bytes(8, "big", signed=True)
_OWN = re.compile(r"tcp://(\*|0\.0\.0\.0|127\.[\d.]+|localhost|\[?::1?\]?):|ipc://|inproc://")
"""Addresses to listen on. Others are connected to."""


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored", omit_defaults=True):
    """A medium now holds these blocks of a chain, each the child of the one before."""

    block_hashes: list[int]
    """64-bit names of blocks. Subscribers cannot compute them."""
    parent_block_hash: int | None
    """Hash of the block before the first one."""
    token_ids: list[int]
    """Token ids of all blocks; a multiple of `block_size`."""
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """Further parts of a block's key: the salt, for a first block that has one; for each image that the block overlaps
    its key and the offset of its beginning from the block's."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """All media were cleared."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int = 0


class KvPublisher:
    """A thread with the sockets. It listens from the start, so that subscribers get the first event."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, rank: int = 0) -> None:
        """`rank` is this engine's number in the daemon; it is added to the ports. Raises `ConfigError`."""
        self.wanted = True
        """A subscriber misses events that are not kept, so a snapshot of the index is due."""
        self._topic, self._rank = topic.encode(), rank
        self._queue: queue.SimpleQueue[Callable[[], Sequence[Event]] | None] = queue.SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._dropped = False
        # A later engine starts below all numbers of an earlier one, so that subscribers notice every restart and never
        # confuse the messages of the two.
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
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_address(self) -> str:
        assert self._replay is not None
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def put(self, make: Callable[[], Sequence[Event]]) -> None:
        """Publish the events that `make` returns on the thread. If the queue is full they are lost, and a snapshot is
        due."""
        if self._queue.qsize() >= WAITING:
            self.wanted = True
        else:
            self._queue.put(make)

    def close(self) -> None:
        """Close the sockets. Queued events are still sent if subscribers take them soon."""
        self._queue.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            self._replay_messages()
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

    def _replay_messages(self) -> None:
        """Answer replay requests. A ROUTER drops messages that a peer does not take."""
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
    """Create the configured publisher; None if events are off. Raises `ConfigError`."""
    if config.kv_events_endpoint is None:
        return None
    topic = config.kv_topic(config.model_name)
    return KvPublisher(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic, rank)


def of_rank(endpoint: str, rank: int) -> str:
    """Return the endpoint of engine number `rank` of the daemon."""
    if not rank or endpoint.endswith("*"):
        return endpoint
    base, colon, port = endpoint.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if endpoint.startswith("tcp://") else f"{endpoint}.{rank}"
