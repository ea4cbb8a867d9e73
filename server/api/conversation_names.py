"""Names of a conversation: by which an engine knows, before the prompt is written, which pages it will need."""

from __future__ import annotations

import orjson
import xxhash

from weft.server.api.protocol import ChatBody
from weft.server.tools.lasting import lasting

_BEGINNING, _KEY = b"beginning", b"key"


def names_of(body: ChatBody, salt: str) -> tuple[bytes, ...]:
    """Of 16 bytes each, the one that says most first: how the conversation begins, up to its first question; the key
    that the client gives. Different with different salts."""
    first = next((i for i, message in enumerate(body.messages) if message.role == "user"), len(body.messages) - 1)
    messages = lasting(body.messages[: first + 1], late_system=True)
    said = [[message.role, message.content] for message in messages]
    names = [_name(salt, _BEGINNING, orjson.dumps(said))]
    if body.prompt_cache_key is not None:
        names.append(_name(salt, _KEY, body.prompt_cache_key.encode("utf-8", "surrogatepass")))
    return tuple(names)


def is_later_turn(body: ChatBody) -> bool:
    """There was an answer before: so there may be pages."""
    return any(message.role == "assistant" for message in body.messages)


def _name(salt: str, kind: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_128_digest(b"\0".join((salt.encode("utf-8", "surrogatepass"), kind, value)))
