"""KV-cache events: a subscriber written to the published schema has the same state as the page index at all times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import Harness
from hypothesis import settings
from hypothesis.stateful import invariant
from kv_subscriber import Known, Subscriber
from test_scheduler_machine import PAGE_SIZE
from test_tier_machine import MACHINE_SETTINGS, TierMachine

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.memory.index_events import MEDIA, IndexEvents, block_hash, events
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixEntry, PrefixIndex
from weft.engine.scheduling.features import KvEvents
from weft.engine.wire import kv_events
from weft.engine.wire.kv_events import EventBatch, KvPublisher, make_publisher, of_rank


def truth(index: PrefixIndex) -> dict[str, dict[Any, tuple[Any, tuple[int, ...], Any]]]:
    """The state that a subscriber should have."""

    def about(entry: PrefixEntry) -> tuple[Any, tuple[int, ...], Any]:
        parent = None if entry.parent is None else block_hash(entry.parent)
        salt = (entry.salt,) if entry.salt and parent is None else None
        return parent, tuple(np.frombuffer(entry.tokens, np.int32).tolist()), salt

    media = {
        medium: {block_hash(e): about(e) for e in index.entries() if getattr(e, tier) >= 0}
        for tier, medium in MEDIA.items()
    }
    return {medium: blocks for medium, blocks in media.items() if blocks}


class EventMachine(TierMachine):
    """Hits, loads, evictions, preemptions, failures, resets in random order, over three tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.known = Known()

    def make_index(self) -> PrefixIndex:
        index = super().make_index()
        index.changes = []
        return index

    @invariant()
    def the_subscriber_equals_the_index(self) -> None:
        index = self.scheduler.pool.index
        assert index.changes is not None
        if index.changes:
            made = events(index.changes, PAGE_SIZE)
            index.changes = []
            self.known.apply(msgspec.msgpack.encode(EventBatch(0.0, made)))
        assert self.known.there() == truth(index)


TestEventMachine = EventMachine.TestCase
TestEventMachine.settings = settings(MACHINE_SETTINGS, max_examples=20)


class Traffic:
    """An index and a pool whose pages are published and evicted at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.index = PrefixIndex("m")
        self.pool = PagePool(200, 4, self.index)
        self.chain: list[PrefixEntry] = []

    def step(self) -> None:
        if self.random.random() < 0.02:
            self.index.clear()
            self.pool.forget()
            self.chain = []
        if self.random.random() < 0.3 or (self.chain and not self.index.contains(self.chain[-1])):
            self.chain = []
        for _ in range(self.random.randint(1, 5)):
            tokens = np.array([self.random.randint(0, 1) for _ in range(4)], np.int32).tobytes()
            parent = self.chain[-1] if self.chain else None
            root = parent.key if parent else self.index.root("s")
            entry = self.index.publish(parent, self.index.chain(root, tokens), tokens, "s")
            assert entry is not None
            if entry.page < 0:
                page = self.pool.allocate(1)
                if not self.index.contains(entry) or (parent and not self.index.contains(parent)):
                    self.pool.release(page)
                    self.chain = []
                    return
                self.pool.adopt(entry, int(page[0]))
                self.pool.release(page)
            self.chain.append(entry)


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    made = KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@model")
    yield made
    made.close()


def follow(subscriber: Subscriber, index: PrefixIndex, sources: IndexEvents) -> None:
    """Read until the subscriber equals the index."""
    end = time.monotonic() + 240
    while not subscriber.whole or subscriber.known.there() != truth(index):
        assert time.monotonic() < end
        sources.flush()
        if not subscriber.pump(0.1):
            subscriber.request_missed()


def test_lost_messages_are_resent(publisher: KvPublisher) -> None:
    traffic = Traffic(1)
    source = IndexEvents(traffic.index, publisher, 4)
    luck = random.Random(2)
    subscriber = Subscriber(publisher.address, publisher.replay_address, loses=lambda: luck.random() < 0.2)
    traffic.step()
    follow(subscriber, traffic.index, source)  # it receives messages from now on
    for _ in range(200):
        traffic.step()
        source.flush()
        subscriber.pump(0.01)
    follow(subscriber, traffic.index, source)
    assert subscriber.replays > 5
    assert subscriber.topics == {"kv@pod@model"}
    subscriber.close()


def test_a_late_subscriber_that_missed_more_than_is_kept_gets_a_snapshot(
    publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "KEPT_MESSAGES", 5)
    monkeypatch.setattr("weft.engine.memory.index_events.SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr("weft.engine.memory.index_events.AT_ONCE", 20)
    traffic = Traffic(3)
    source = IndexEvents(traffic.index, publisher, 4)
    for _ in range(100):
        traffic.step()
        source.flush()
    subscriber = Subscriber(publisher.address, publisher.replay_address)
    follow(subscriber, traffic.index, source)
    subscriber.close()


def test_messages_lost_inside_are_compensated(publisher: KvPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.memory.index_events.SNAPSHOT_SECONDS", 0.0)
    traffic = Traffic(4)
    source = IndexEvents(traffic.index, publisher, 4)
    subscriber = Subscriber(publisher.address, publisher.replay_address)
    source.flush()
    monkeypatch.setattr(kv_events, "WAITING", 0)
    for _ in range(50):
        traffic.step()
        source.flush()
    assert publisher.wanted
    monkeypatch.setattr(kv_events, "WAITING", 1000)
    follow(subscriber, traffic.index, source)
    subscriber.close()


def test_another_engine_at_the_same_address_is_noticed() -> None:
    first = KvPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@model")
    address, replay_address = first.address, first.replay_address
    subscriber = Subscriber(address, replay_address)
    traffic = Traffic(5)
    source = IndexEvents(traffic.index, first, 4)
    for _ in range(50):
        traffic.step()
        source.flush()
    follow(subscriber, traffic.index, source)
    first.close()
    second = KvPublisher(address, replay_address, "kv@pod@model")
    traffic = Traffic(6)
    source = IndexEvents(traffic.index, second, 4)
    # More messages than the first one sent, and none of them was received.
    for _ in range(60):
        traffic.step()
        source.flush()
    end = time.monotonic() + 240
    while not subscriber.restarts:
        assert time.monotonic() < end
        traffic.step()
        source.flush()
        subscriber.pump(0.05)
    follow(subscriber, traffic.index, source)
    assert subscriber.restarts == 1
    second.close()
    subscriber.close()


def test_a_real_engine_under_pressure_and_its_successor(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "page_size": 8, "num_pages": 40, "max_num_seqs": 8, "host_kv_gib": 0.001, "ssd_kv_path": str(tmp_path),
        "ssd_kv_gib": 0.001, "kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_replay_endpoint": "tcp://127.0.0.1:*",
    }  # fmt: skip
    luck = random.Random(1)

    def serve(prompts: list[list[int]]) -> tuple[set[str], int]:
        harness = Harness(tiny_model("qwen3"), **options)
        harness.expect_short_outputs()
        published = harness.engine.listeners.find(KvEvents)
        assert published is not None
        source = published._events
        subscriber = Subscriber(
            source._publisher.address, source._publisher.replay_address, loses=lambda: luck.random() < 0.1
        )
        index = harness.engine.scheduler.pool.index
        seen: set[str] = set()

        def look(step: int) -> None:
            if step == 60:
                harness.engine.reset_prefix_cache()
            while subscriber.pump():
                pass
            if step % 20 == 0:
                follow(subscriber, index, source)
                seen.update(subscriber.known.there())

        for prompt in prompts:
            harness.add(prompt, salt=luck.choice(["", "t"]), priority=luck.randint(0, 1), max_tokens=24)
        harness.run(look)
        follow(subscriber, index, source)
        preemptions = harness.engine.scheduler.stats().preemptions
        harness.engine.close()
        subscriber.close()
        return seen | set(subscriber.known.there()), preemptions

    shared = [luck.randint(3, 90) for _ in range(64)]
    prompts = [shared[: luck.randint(9, 64)] + [luck.randint(3, 90) for _ in range(40)] for _ in range(40)]
    seen, preemptions = serve(prompts)
    assert seen == {"GPU", "CPU", "DISK"}
    assert preemptions > 0
    # The next engine reports the pages on disk before any request.
    seen, _ = serve([[1, 2, 3]])
    assert "DISK" in seen


def test_a_chain_is_one_event_and_a_salt_is_sent_with_its_first_block() -> None:
    index = PrefixIndex("m")
    index.changes = []
    parent, key = None, index.root("secret")
    for i in range(3):
        tokens = np.array([i, i], np.int32).tobytes()
        key = index.chain(key, tokens)
        parent = index.publish(parent, key, tokens, "secret")
        assert parent is not None
        index.set_page(parent, i + 1)
    for entry in index.entries():
        index.set_host(entry, entry.page)
    stored, offloaded = msgspec.msgpack.decode(msgspec.msgpack.encode(events(index.changes, 2)))
    assert (stored[0], stored[2:]) == (
        "BlockStored", [None, [0, 0, 1, 1, 2, 2], 2, None, "GPU", None, [["secret"], None, None]]
    )  # fmt: skip
    assert offloaded[6] == "CPU"
    assert all(0 <= name < 2**64 for name in stored[1])


def test_a_disabled_publisher_records_nothing() -> None:
    traffic = Traffic(7)
    for _ in range(20):
        traffic.step()
    assert traffic.index.changes is None


def test_impossible_options_are_one_line_errors(publisher: KvPublisher) -> None:
    taken = EngineConfig(kv_events_endpoint=publisher.address)
    with pytest.raises(ConfigError, match=r"--kv-events-endpoint tcp://127.0.0.1:\d+: Address already in use"):
        make_publisher(taken)
    for options, why in [
        ({"kv_events_endpoint": "5557"}, "pattern"),
        ({"kv_events_replay_endpoint": "tcp://*:5558"}, "needs kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:5557", "prefix_caching": False}, "needs prefix_caching"),
    ]:
        with pytest.raises(ValueError, match=why):
            EngineConfig(**options)  # type: ignore[arg-type]


def test_each_engine_of_a_daemon_has_its_own_ports() -> None:
    assert of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert of_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert of_rank("ipc:///run/kv", 1) == "ipc:///run/kv.1"
