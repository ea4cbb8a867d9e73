"""Keys of KV pages: a chained hash over model, tenant salt and tokens.

The prefix index finds pages by key, and the router finds engines that hold pages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

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


def page_keys(
    key: bytes, tokens: npt.NDArray[np.int32], page_size: int, chain: Callable[[bytes, bytes], bytes] = chain
) -> list[bytes]:
    """Return keys of the full pages of `tokens`, first page first. `key` is the parent key of the first one."""
    raw, width, keys = tokens.tobytes(), page_size * 4, []
    for start in range(0, len(raw) - width + 1, width):
        key = chain(key, raw[start : start + width])
        keys.append(key)
    return keys
