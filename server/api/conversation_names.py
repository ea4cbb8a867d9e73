"""Names of a conversation, by which engines prefetch its pages before the prompt is rendered."""

from __future__ import annotations

import orjson
import xxhash

from weft.server.api.protocol import ChatBody
from weft.server.tools.stable_prefix import stable_prefix

_BEGINNING, _KEY = b"beginning", b"key"


def names_of(body: ChatBody, salt: str) -> tuple[bytes, ...]:
    """16-byte names, the most specific first: a hash of the conversation through its first user message, and a hash of
    the client's `prompt_cache_key`, if any. Both depend on the salt."""
    first = next((i for i, message in enumerate(body.messages) if message.role == "user"), len(body.messages) - 1)
    messages = stable_prefix(body.messages[: first + 1], late_system=True)
    beginning = [[message.role, message.content] for message in messages]
    names = [_name(salt, _BEGINNING, orjson.dumps(beginning))]
    if body.prompt_cache_key is not None:
        names.append(_name(salt, _KEY, body.prompt_cache_key.encode("utf-8", "surrogatepass")))
    return tuple(names)


def is_later_turn(body: ChatBody) -> bool:
    """The conversation has an earlier answer, so its pages may exist."""
    return any(message.role == "assistant" for message in body.messages)


def _name(salt: str, kind: bytes, value: bytes) -> bytes:
    return xxhash.xxh3_128_digest(b"\0".join((salt.encode("utf-8", "surrogatepass"), kind, value)))
