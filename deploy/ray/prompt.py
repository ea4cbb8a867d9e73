"""`prompt_keys`: keys of a prompt's blocks, of its text: the ingress has no tokenizer.

The chain is that of KV pages (`engine/wire/page_keys.py`) over blocks of `BLOCK` bytes in place of pages of tokens. A
conversation's next turn begins with the bytes of the one before, as its tokens do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from weft.engine.wire.page_keys import BRIEF, page_keys, root

BLOCK = 256
"""bytes of text, some 64 tokens"""
TOKEN_BYTES = 4
"""of text that a token stands for, about"""
PARTS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""of a body, in the order in which templates write them"""


def prompt_text(body: dict[str, Any]) -> bytes:
    """Such that a longer conversation begins with a shorter one's bytes."""
    parts = []
    for name in PARTS:
        value = body.get(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                part = orjson.dumps(each)
                # A closing quote or brace would end a common beginning; numbers are token ids.
                parts.append(part[:-1] if part[-1:] in b'"}' else part + b",")
    return b"".join(parts)


def prompt_keys(model: str, body: dict[str, Any], tenant: str = "") -> tuple[tuple[bytes, ...], int]:
    """Keys of the full blocks of a request's prompt, and the prompt's bytes.

    tenant: who shares prefixes with nobody else.
    """
    text = prompt_text(body)
    salt = body.get("cache_salt")
    words = np.frombuffer(text[: len(text) // BLOCK * BLOCK], np.int32)
    keys = page_keys(root(model, f"{tenant}\0{salt if isinstance(salt, str) else ''}"), words, BLOCK // 4)
    return tuple(key[:BRIEF] for key in keys), len(text)
