"""Computes keys of a prompt's text blocks, because the ingress has no tokenizer.

Keys are chained like those of KV pages (`engine/wire/page_keys.py`), over blocks of `BLOCK` bytes instead of pages of
tokens. Like its tokens, a conversation's next turn begins with the bytes of the previous one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from weft.engine.wire.page_keys import BRIEF, page_keys, root

BLOCK = 256
"""Bytes of text per block, about 64 tokens."""
TOKEN_BYTES = 4
"""Approximate bytes of text per token."""
FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""Fields of a body that make up the prompt, in the order of templates."""


def prompt_text(body: dict[str, Any]) -> bytes:
    """Serialize a prompt so that a longer conversation begins with the bytes of a shorter one."""
    parts = []
    for name in FIELDS:
        value = body.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                part = orjson.dumps(each)
                # Drop a closing quote or brace, which would end the common prefix; numbers are token ids.
                parts.append(part[:-1] if part[-1:] in b'"}' else part + b",")
    return b"".join(parts)


def prompt_keys(model: str, body: dict[str, Any], tenant: str = "") -> tuple[tuple[bytes, ...], int]:
    """Return the keys of a prompt's full blocks, and the prompt's size in bytes.

    tenant: prefixes are not shared across tenants.
    """
    text = prompt_text(body)
    salt = body.get("cache_salt")
    words = np.frombuffer(text[: len(text) // BLOCK * BLOCK], np.int32)
    keys = page_keys(root(model, f"{tenant}\0{salt if isinstance(salt, str) else ''}"), words, BLOCK // 4)
    return tuple(key[:BRIEF] for key in keys), len(text)
