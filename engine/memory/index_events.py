"""`IndexEvents`: publishes pages that a tier gains or loses; `PageLedger`: pages that entered or left the index."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from weft.engine.memory.prefix_index import Change, PrefixEntry, PrefixIndex
from weft.engine.wire.kv_events import SNAPSHOT_SECONDS, AllBlocksCleared, BlockRemoved, BlockStored, Event, KvPublisher
from weft.engine.wire.messages import PageChanges
from weft.engine.wire.page_keys import BRIEF, IMAGE_BYTES, split_salt

MEDIA = {"page": "GPU", "host": "CPU", "extent": "DISK"}
"""The attribute of each tier's copy, and the medium that routers know. On a CPU device, pages are in "GPU" too."""
AT_ONCE = 1000  # changes per message of a snapshot


class IndexEvents:
    """Runs on the scheduler's thread, which only hands changes over: the publisher's thread builds the events."""

    def __init__(
        self, index: PrefixIndex, publisher: KvPublisher, page_size: int, adapter_name: Callable[[str], str] = str
    ) -> None:
        """`adapter_name` returns the name of a LoRA adapter by its digest."""
        self._index, self._publisher = index, publisher
        self._events = partial(events, page_size=page_size, adapter_name=adapter_name)
        self._next_snapshot = 0.0  # `time.monotonic()` before which no snapshot is published
        index.changes = []

    def flush(self) -> None:
        """Publish the changes since the last call, or a snapshot if one is due. Called once per step."""
        publisher, changes = self._publisher, self._index.changes
        if publisher.wanted and (now := time.monotonic()) > self._next_snapshot:
            self._next_snapshot = now + SNAPSHOT_SECONDS
            publisher.wanted = False
            self._index.changes = []
            self._snapshot()
        elif changes:
            self._index.changes = []
            publisher.put(partial(self._events, changes))

    def _snapshot(self) -> None:
        """Publish the full index after a reset. Entries are in creation order, parents first."""
        changes: list[Change | None] = [None]
        for entry in self._index.entries():
            if entry.of_state:
                continue
            changes += [Change(entry, tier, True) for tier in MEDIA if getattr(entry, tier) >= 0]
        for i in range(0, len(changes), AT_ONCE):
            self._publisher.put(partial(self._events, changes[i : i + AT_ONCE]))

    def close(self) -> None:
        self.flush()
        self._publisher.close()


def block_hash(entry: PrefixEntry) -> int:
    """Return an entry's public name: the first half of its key."""
    return int.from_bytes(entry.key[:8], "big")


def events(changes: Sequence[Change | None], page_size: int, adapter_name: Callable[[str], str] = str) -> list[Event]:
    """Convert changes into events, in order. Neighbors in a chain share an event; None means that all was cleared."""
    out: list[Event] = []
    run: list[PrefixEntry] = []
    at: tuple[str, bool] | None = None

    def end() -> None:
        if at is not None and run:
            out.append(
                _stored(run, at[0], page_size, adapter_name) if at[1] else BlockRemoved([*map(block_hash, run)], at[0])
            )

    for change in changes:
        if change is None:
            end()
            run, at = [], None
            out.append(AllBlocksCleared())
            continue
        here = MEDIA[change.tier], change.there
        if at != here or (change.there and change.entry.parent is not run[-1]):
            end()
            run, at = [], here
        run.append(change.entry)
    end()
    return out


def _stored(run: Sequence[PrefixEntry], medium: str, page_size: int, adapter_name: Callable[[str], str]) -> BlockStored:
    first = run[0]
    digest, salt = split_salt(first.salt)
    extras = [_images(entry.tokens[4 * page_size :]) for entry in run]
    if first.parent is None and salt:
        extras[0] = (salt, *(extras[0] or ()))
    return BlockStored(
        block_hashes=[block_hash(entry) for entry in run],
        parent_block_hash=block_hash(first.parent) if first.parent is not None else None,
        token_ids=np.frombuffer(b"".join(entry.tokens[: 4 * page_size] for entry in run), np.int32).tolist(),
        block_size=page_size,
        lora_id=None,
        medium=medium,
        lora_name=adapter_name(digest) if digest else None,
        extra_keys=extras if any(extras) else None,
    )


def _images(parts: bytes) -> tuple[str, ...] | None:
    """Return the keys of a page's images and where each begins, relative to the page, as text."""
    found: list[str] = []
    for at in range(0, len(parts), IMAGE_BYTES):
        key, (offset,) = parts[at : at + IMAGE_BYTES - 4], struct.unpack_from("<i", parts, at + IMAGE_BYTES - 4)
        found += [key.hex(), str(offset)]
    return tuple(found) or None


class PageLedger:
    """Records the changes of an index. Only the last change of a page counts, so that a report can also be applied by
    a client that has part of it already."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._moves: dict[bytes, bool] = {}
        index.on_key = self._note

    def _note(self, key: bytes, entered: bool) -> None:
        self._moves[key] = entered

    def all(self) -> bytes:
        return b"".join([entry.key[:BRIEF] for entry in self._index.entries()])

    def take(self) -> PageChanges:
        moves, self._moves = self._moves, {}
        return PageChanges(
            b"".join([key[:BRIEF] for key, entered in moves.items() if entered]),
            b"".join([key[:BRIEF] for key, entered in moves.items() if not entered]),
        )
