"""Keys of KV pages: a chained hash over model, tenant salt and tokens. The prefix index finds pages by them, and who
routes requests finds engines that keep pages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

BRIEF = 8
"""bytes of a key that are enough where a mistake costs time alone"""


def root(model_id: str, salt: str) -> bytes:
    """The key before a first page: tenants with different salts share nothing (docs/pitfalls.md 30)."""
    return xxhash.xxh3_128_digest(model_id.encode() + b"\0" + salt.encode("utf-8", "surrogatepass"))


def chain(parent: bytes, tokens: bytes) -> bytes:
    """The key of a page of `tokens` (int32) behind the one with the key `parent`."""
    return xxhash.xxh3_128_digest(parent + tokens)


def page_keys(
    key: bytes, tokens: npt.NDArray[np.int32], page_size: int, chain: Callable[[bytes, bytes], bytes] = chain
) -> list[bytes]:
    """Keys of the full pages of `tokens`, first page first. `key`: the one before them, of the root or a page."""
    raw, width, keys = tokens.tobytes(), page_size * 4, []
    for start in range(0, len(raw) - width + 1, width):
        key = chain(key, raw[start : start + width])
        keys.append(key)
    return keys
