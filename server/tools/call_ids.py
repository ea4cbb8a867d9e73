"""IDs of tool calls."""

from __future__ import annotations

import secrets

_CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def short_id(length: int = 24, prefix: str = "call_") -> str:
    return prefix + "".join(secrets.choice(_CHARS) for _ in range(length))


def mistral_id() -> str:
    """Return an ID of nine characters, which Mistral's templates require."""
    return short_id(9, "")
