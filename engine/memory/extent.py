"""The format of the SSD store's file: a superblock, a table of headers, extents (one page of KV each), remainders.

An extent is valid if its header describes it and every check passes. The header is written after the payload is
complete. Headers are contiguous, so that a start reads them in one sweep. Remainders are the ends of pages that could
not be packed (see `transfer.Remainders`); there are none if pages are not packed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.transfer import SHARE, aligned, remainders_for
from weft.engine.wire.page_keys import IMAGE_BYTES

MAGIC = b"weft-kv\0"
VERSION = 2  # version of the format and of the layout that kernels give a page: raise it when either changes
SUPERBLOCK_BYTES = 4096
SALT_BYTES = 512  # Maximum length of a salt. Pages with longer salts are not stored.

_SUPERBLOCK = struct.Struct("<8sIIQQQ16sQQ")
_HEADER = struct.Struct("<8sI16sQQ16s16s16sIIi")
_CHECKSUM_BYTES = 16


def checksum(*parts: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def header_bytes(page_tokens: int) -> int:
    return aligned(_CHECKSUM_BYTES + _HEADER.size + 4 * page_tokens + SALT_BYTES)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a file, and the owner of its pages."""

    page_tokens: int
    payload_bytes: int  # bytes of one page, unpadded
    num_extents: int
    owner: bytes  # 16-byte digest of the model's content, the page layout and the storage form
    remainder_bytes: int = 0  # bytes of one remainder, unpadded
    num_remainders: int = 0

    @property
    def header_bytes(self) -> int:
        return header_bytes(self.page_tokens)

    @property
    def extent_bytes(self) -> int:
        return aligned(self.payload_bytes)

    @property
    def first_extent(self) -> int:
        return SUPERBLOCK_BYTES + self.num_extents * self.header_bytes

    @property
    def first_remainder(self) -> int:
        return self.first_extent + self.num_extents * self.extent_bytes

    @property
    def file_bytes(self) -> int:
        return self.first_remainder + self.num_remainders * aligned(self.remainder_bytes)

    def header_at(self, extent: int) -> int:
        return SUPERBLOCK_BYTES + extent * self.header_bytes

    def extent_at(self, extent: int) -> int:
        return self.first_extent + extent * self.extent_bytes

    def remainder_at(self, remainder: int) -> int:
        return self.first_remainder + remainder * aligned(self.remainder_bytes)

    @classmethod
    def fitting(
        cls, page_tokens: int, payload_bytes: int, owner: bytes, file_bytes: int, remainder_bytes: int = 0
    ) -> Geometry:
        """Return the geometry with as many extents, and remainders for them, as fit in `file_bytes`."""
        one = cls(page_tokens, payload_bytes, 1, owner)
        space, each = max(0, file_bytes - SUPERBLOCK_BYTES), one.header_bytes + one.extent_bytes
        extra = aligned(remainder_bytes)
        count = (SHARE * (space - extra)) // (SHARE * each + extra) if extra else space // each
        remainders = remainders_for(count) if extra else 0
        return cls(page_tokens, payload_bytes, max(0, count), owner, remainder_bytes, remainders)


def pack_superblock(geometry: Geometry, epoch: int) -> bytes:
    """Headers of an older `epoch` are invalid: a reset has dropped them."""
    g = geometry
    sizes = g.page_tokens, g.payload_bytes, g.num_extents
    body = _SUPERBLOCK.pack(MAGIC, VERSION, *sizes, epoch, g.owner, g.remainder_bytes, g.num_remainders)
    return (body + checksum(body)).ljust(SUPERBLOCK_BYTES, b"\0")


def unpack_superblock(data: bytes) -> tuple[Geometry, int] | None:
    """Return (geometry, epoch), or None if `data` is not a superblock of this version."""
    size = _SUPERBLOCK.size
    if len(data) < SUPERBLOCK_BYTES or checksum(data[:size]) != data[size : size + _CHECKSUM_BYTES]:
        return None
    magic, version, page_tokens, payload_bytes, count, epoch, owner, extra, remainders = _SUPERBLOCK.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        return None
    return Geometry(page_tokens, payload_bytes, count, owner, extra, remainders), epoch


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of a header: the page's full key, and the payload's checksum."""

    key: bytes
    parent_key: bytes
    tokens: bytes  # int32 ids, then the parts of images (`PrefixEntry.tokens`)
    salt: str
    payload: bytes = b""  # checksum of the payload, set when written
    serial: int = 0  # write number: a larger one is newer
    remainder: int = -1  # the remainder that holds the page's end; -1 if the extent holds all of it

    def fits(self, page_tokens: int) -> bool:
        """Return whether a header can hold the record: not if the salt is too long, or the page has too many images."""
        salt = len(self.salt.encode("utf-8", "surrogatepass"))
        size = _CHECKSUM_BYTES + _HEADER.size + len(self.tokens) + salt
        return salt <= SALT_BYTES and size <= header_bytes(page_tokens)


def pack_header(geometry: Geometry, epoch: int, record: Record) -> bytes:
    salt = record.salt.encode("utf-8", "surrogatepass")
    body = _HEADER.pack(
        MAGIC, VERSION, geometry.owner, epoch, record.serial, record.key, record.parent_key, record.payload,
        len(record.tokens), len(salt), record.remainder,
    )  # fmt: skip
    body += record.tokens + salt
    return (checksum(body) + body).ljust(geometry.header_bytes, b"\0")


def unpack_header(geometry: Geometry, epoch: int, data: bytes) -> Record | None:
    """Return the record of a header block, or None if it is empty, torn, corrupted or foreign."""
    if data[_CHECKSUM_BYTES : _CHECKSUM_BYTES + len(MAGIC)] != MAGIC:
        return None
    at = _CHECKSUM_BYTES
    _, version, owner, written, serial, key, parent_key, payload, num_bytes, salt_bytes, remainder = (
        _HEADER.unpack_from(data, at)
    )
    body_end = at + _HEADER.size + num_bytes + salt_bytes
    if version != VERSION or owner != geometry.owner or written != epoch:
        return None
    images, cut = divmod(num_bytes - 4 * geometry.page_tokens, IMAGE_BYTES)
    if images < 0 or cut or salt_bytes > SALT_BYTES or body_end > len(data):
        return None
    if checksum(data[at:body_end]) != data[:_CHECKSUM_BYTES]:
        return None
    tokens = data[at + _HEADER.size : body_end - salt_bytes]
    salt = data[body_end - salt_bytes : body_end].decode("utf-8", "surrogatepass")
    if PrefixIndex.chain(parent_key, tokens) != key:
        return None
    return Record(key, parent_key, tokens, salt, payload, serial, remainder)
