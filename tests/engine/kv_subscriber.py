"""A subscriber to KV-cache events, written to the schema that vLLM published. It uses nothing of weft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import zmq


class BlockStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Known:
    """A router's state of one engine: block -> (parent, tokens, extra keys), by medium."""

    def __init__(self) -> None:
        self.media: dict[str, dict[int | bytes, tuple[Any, tuple[int, ...], Any]]] = {}

    def apply(self, payload: bytes) -> None:
        for event in decode(payload).events:
            match event:
                case BlockStored():
                    assert event.token_ids
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    parent = event.parent_block_hash
                    keys = event.extra_keys or [None] * len(event.block_hashes)
                    blocks = self.media.setdefault(str(event.medium), {})
                    for i, name in enumerate(event.block_hashes):
                        tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                        assert name not in blocks, "a block was stored twice"
                        blocks[name] = (parent, tuple(tokens), keys[i])
                        parent = name
                case BlockRemoved():
                    for name in event.block_hashes:
                        del self.media[str(event.medium)][name]
                case AllBlocksCleared():
                    self.media.clear()

    def there(self) -> dict[str, dict[int | bytes, tuple[Any, tuple[int, ...], Any]]]:
        return {medium: blocks for medium, blocks in self.media.items() if blocks}


class Subscriber:
    """Follows an engine over its sockets and requests missed messages again."""

    def __init__(self, address: str, replay_address: str, *, loses: Callable[[], bool] = lambda: False) -> None:
        """loses: decides for each message whether it is lost."""
        self.known = Known()
        self.topics: set[str] = set()
        self.restarts = self.replays = self.messages = 0
        self._loses = loses
        self.whole = False
        """whether `known` equals the engine's state"""
        self._expected = self._first = 0
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RECONNECT_IVL, 10)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
        self._sub.connect(address)
        self._replay_address = replay_address

    def pump(self, seconds: float = 0.0) -> bool:
        """Read a message, if one arrives in time."""
        if not self._sub.poll(int(1000 * seconds)):
            return False
        topic, number_bytes, payload = self._sub.recv_multipart()
        self.topics.add(topic.decode())
        number = int.from_bytes(number_bytes, "big")
        if self._loses():
            return True
        if number < self._first:
            # Not a message that was resent: another engine.
            self.restarts += 1
            self.whole, self._expected = False, 0
        if number > self._expected:
            self.request_missed()
        if number >= self._expected:
            self._take(number, payload)
        return True

    def _take(self, number: int, payload: bytes) -> None:
        if number != self._expected:
            self.whole = False  # missing entries are dropped: a full snapshot will follow
        self.messages += 1
        if not self._expected:
            self._first = number
        self._expected = number + 1
        if type(decode(payload).events[0]) is AllBlocksCleared:
            self.known, self.whole = Known(), True
        if self.whole:
            self.known.apply(payload)

    def request_missed(self) -> None:
        """Request the missed messages."""
        self.replays += 1
        with self._context.socket(zmq.DEALER) as replay:
            replay.setsockopt(zmq.LINGER, 0)
            replay.connect(self._replay_address)
            replay.send_multipart([b"", self._expected.to_bytes(8, "big")])
            while True:
                assert replay.poll(240_000), "nothing is sent again"
                _, number_bytes, payload = replay.recv_multipart()
                number = int.from_bytes(number_bytes, "big", signed=True)
                if number < 0:
                    return
                if number >= self._expected:
                    self._take(number, payload)

    def close(self) -> None:
        self._context.destroy(0)
