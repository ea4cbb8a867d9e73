"""The format of the SSD store's file: a superblock, a table of headers, the extents (a page of KV in each), rests.

An extent exists when its header says so and every check holds; the header is written after the payload is complete.
The headers lie together so that a start reads them in one sweep. Rests are the ends of pages that an extent of packed
pages is too short for (see `rests.py`); there are none where pages are not packed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.rests import SHARE, rests_for
from weft.engine.memory.transfer import aligned

MAGIC = b"weft-kv\0"
VERSION = 2
"""also of the layout that kernels give a page: raise it when either changes"""
SUPERBLOCK_BYTES = 4096
SALT_BYTES = 512
"""longest salt that a header takes; pages of longer ones stay off the SSD"""

_SUPERBLOCK = struct.Struct("<8sIIQQQ16sQQ")
_HEADER = struct.Struct("<8sI16sQQ16s16s16sIIi")
_CHECKSUM_BYTES = 16


def checksum(*parts: bytes | memoryview) -> bytes:
    """Of all the parts together."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that a file is made with, and whose pages it may hold."""

    page_tokens: int
    payload_bytes: int
    """of one page, unpadded"""
    num_extents: int
    owner: bytes
    """16-byte digest of the model's content, the page's layout and how it is stored"""
    rest_bytes: int = 0
    """of one rest, unpadded"""
    num_rests: int = 0

    @property
    def header_bytes(self) -> int:
        return aligned(_CHECKSUM_BYTES + _HEADER.size + 4 * self.page_tokens + SALT_BYTES)

    @property
    def extent_bytes(self) -> int:
        return aligned(self.payload_bytes)

    @property
    def first_extent(self) -> int:
        return SUPERBLOCK_BYTES + self.num_extents * self.header_bytes

    @property
    def first_rest(self) -> int:
        return self.first_extent + self.num_extents * self.extent_bytes

    @property
    def file_bytes(self) -> int:
        return self.first_rest + self.num_rests * aligned(self.rest_bytes)

    def header_at(self, extent: int) -> int:
        return SUPERBLOCK_BYTES + extent * self.header_bytes

    def extent_at(self, extent: int) -> int:
        return self.first_extent + extent * self.extent_bytes

    def rest_at(self, rest: int) -> int:
        return self.first_rest + rest * aligned(self.rest_bytes)

    @classmethod
    def fitting(
        cls, page_tokens: int, payload_bytes: int, owner: bytes, file_bytes: int, rest_bytes: int = 0
    ) -> Geometry:
        """As many extents, and rests for them, as `file_bytes` have room for."""
        one = cls(page_tokens, payload_bytes, 1, owner)
        room, each, rest = (
            max(0, file_bytes - SUPERBLOCK_BYTES),
            one.header_bytes + one.extent_bytes,
            aligned(rest_bytes),
        )
        count = (SHARE * (room - rest)) // (SHARE * each + rest) if rest else room // each
        return cls(page_tokens, payload_bytes, max(0, count), owner, rest_bytes, rests_for(count) if rest else 0)


def pack_superblock(geometry: Geometry, epoch: int) -> bytes:
    """`epoch`: headers of an older one were forgotten by a reset."""
    g = geometry
    body = _SUPERBLOCK.pack(
        MAGIC, VERSION, g.page_tokens, g.payload_bytes, g.num_extents, epoch, g.owner, g.rest_bytes, g.num_rests
    )
    return (body + checksum(body)).ljust(SUPERBLOCK_BYTES, b"\0")


def unpack_superblock(data: bytes) -> tuple[Geometry, int] | None:
    """(geometry, epoch), or None when this is no superblock of this version."""
    size = _SUPERBLOCK.size
    if len(data) < SUPERBLOCK_BYTES or checksum(data[:size]) != data[size : size + _CHECKSUM_BYTES]:
        return None
    magic, version, page_tokens, payload_bytes, count, epoch, owner, rest, rests = _SUPERBLOCK.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    return Geometry(page_tokens, payload_bytes, count, owner, rest, rests), epoch


@dataclass(frozen=True, slots=True)
class Record:
    """What a header says of its extent: the full key of the page, and the payload's checksum."""

    key: bytes
    parent_key: bytes
    tokens: bytes
    """int32 ids"""
    salt: str
    payload: bytes = b""
    """checksum; known once written"""
    serial: int = 0
    """grows with every write: a larger one is younger"""
    rest: int = -1
    """where the page's end is; -1: the extent has all of it"""

    @property
    def storable(self) -> bool:
        return len(self.salt.encode("utf-8", "surrogatepass")) <= SALT_BYTES


def pack_header(geometry: Geometry, epoch: int, record: Record) -> bytes:
    salt = record.salt.encode("utf-8", "surrogatepass")
    body = _HEADER.pack(
        MAGIC, VERSION, geometry.owner, epoch, record.serial, record.key, record.parent_key, record.payload,
        len(record.tokens), len(salt), record.rest,
    )  # fmt: skip
    body += record.tokens + salt
    return (checksum(body) + body).ljust(geometry.header_bytes, b"\0")


def unpack_header(geometry: Geometry, epoch: int, data: bytes) -> Record | None:
    """The record of a header block, or None when it is empty, torn, corrupted or foreign."""
    if data[_CHECKSUM_BYTES : _CHECKSUM_BYTES + len(MAGIC)] != MAGIC:
        return None
    at = _CHECKSUM_BYTES
    _, version, owner, written, serial, key, parent_key, payload, num_bytes, salt_bytes, rest = _HEADER.unpack_from(
        data, at
    )
    body_end = at + _HEADER.size + num_bytes + salt_bytes
    if version != VERSION or owner != geometry.owner or written != epoch:
        return None
    if num_bytes != 4 * geometry.page_tokens or salt_bytes > SALT_BYTES:
        return None
    if checksum(data[at:body_end]) != data[:_CHECKSUM_BYTES]:
        return None
    tokens = data[at + _HEADER.size : body_end - salt_bytes]
    salt = data[body_end - salt_bytes : body_end].decode("utf-8", "surrogatepass")
    if PrefixIndex.chain(parent_key, tokens) != key:
        return None
    return Record(key, parent_key, tokens, salt, payload, serial, rest)
