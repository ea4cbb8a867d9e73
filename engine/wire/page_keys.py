"""Keys of KV pages: a chained hash over model, tenant salt, tokens and images.

The prefix index finds pages by key, and the router finds engines that hold pages.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from weft.engine.wire.messages import Image

KEY_BYTES = 16
BRIEF = 8  # bytes of a brief key, for uses in which a collision only costs time


def root(model_id: str, salt: str) -> bytes:
    """Return the parent key of first pages. Tenants with different salts share no pages (docs/pitfalls.md 30)."""
    return xxhash.xxh3_128_digest(model_id.encode() + b"\0" + salt.encode("utf-8", "surrogatepass"))


ADAPTER_SALT = "lora:"


def adapter_salt(digest: str, salt: str) -> str:
    """Return the salt of requests with a LoRA adapter; the digest is empty without one. Salts of clients have no
    control characters, so they never equal the salt of an adapter."""
    return f"{ADAPTER_SALT}{digest}\0{salt}" if digest else salt


def split_salt(salt: str) -> tuple[str, str]:
    """Return (digest, salt of the client): the inverse of `adapter_salt`."""
    adapter, separator, own = salt.partition("\0")
    return (adapter.removeprefix(ADAPTER_SALT), own) if separator else ("", salt)


def chain(parent: bytes, tokens: bytes) -> bytes:
    """Return the key of a page of `tokens` (int32) after the page with the key `parent`."""
    return xxhash.xxh3_128_digest(parent + tokens)


def state_tokens(pages: int, page_size: int) -> list[bytes]:
    """Return the tokens from which the keys of a recurrent state's pages are chained, after the key of the page that it
    stands after. No prompt contains them."""
    tokens = np.zeros((pages, page_size), np.int32)
    tokens[:, 0] = -1 - np.arange(pages)
    return [row.tobytes() for row in tokens]


def of_state(tokens: bytes) -> bool:
    """Return whether a page with these tokens holds part of a recurrent state, instead of K and V."""
    return tokens[3:4] > b"\x7f"  # the sign of the first number


IMAGE_BYTES = 36  # bytes that each image adds to the contents of a page that it overlaps
_NO_IMAGES: Mapping[int, bytes] = {}


def image_key(image: Image) -> bytes:
    """Return 32 bytes that identify an image's embeddings and their places: its digest, and what else decides them."""
    rest = struct.pack("<I", image.length) + image.mask
    shape = ";".join(map(str, (*image.grid, "", *(n for tile in image.shapes for n in tile))))
    return hashlib.sha256(image.digest + rest + shape.encode()).digest()


def image_parts(images: Iterable[Image], page_size: int) -> dict[int, bytes]:
    """Return what images add to the contents of the pages that they overlap, by page number: for each image its key
    and where it begins, relative to the page. Placeholder ids are alike for all images, so ids alone would let a prompt
    use the pages of another picture."""
    parts: dict[int, bytes] = {}
    for image in images:
        key = image_key(image)
        for page in range(image.start // page_size, (image.start + image.length - 1) // page_size + 1):
            parts[page] = parts.get(page, b"") + key + struct.pack("<i", image.start - page * page_size)
    return parts


def page_keys(
    key: bytes, tokens: npt.NDArray[np.int32], page_size: int, chain: Callable[[bytes, bytes], bytes] = chain,
    images: Mapping[int, bytes] = _NO_IMAGES,
) -> list[bytes]:  # fmt: skip
    """Return keys of the full pages of `tokens`, first page first. `key` is the parent key of the first one, `images`
    are the `image_parts`."""
    raw, width, keys = tokens.tobytes(), page_size * 4, []
    for page, start in enumerate(range(0, len(raw) - width + 1, width)):
        key = chain(key, raw[start : start + width] + images.get(page, b""))
        keys.append(key)
    return keys
