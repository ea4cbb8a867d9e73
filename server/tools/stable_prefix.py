"""`stable_prefix` rewrites a conversation so that its next turn starts with the same tokens (prefix cache)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NONCE = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE | re.IGNORECASE)
"""Lines in system messages that change with each request, such as Claude Code's checksum."""


def stable_prefix(messages: Sequence[Any], *, late_system: bool) -> list[Any]:
    """Return the `ChatMessage`s for the template. `late_system`: whether the template renders later system messages in
    place."""
    kept = [_without_nonces(message) for message in messages]
    return kept if late_system else _as_users(kept)


def _without_nonces(message: Any) -> Any:
    if not _is_system(message) or not _NONCE.search(message.content or ""):
        return message
    return _with(message, content=_NONCE.sub("", message.content))


def _as_users(messages: Sequence[Any]) -> list[Any]:
    """Turn later system messages into user messages, joined with the user messages next to them. A template that
    refuses them, or moves them to the front, would change the start of the conversation."""
    out: list[Any] = []
    late = False
    """Whether the last message of `out` is, or ends with, a system message."""
    for message in messages:
        system = _is_system(message) and any(not _is_system(before) for before in out)
        if system:
            message = _with(message, role="user", content=f"<system>\n{message.content}\n</system>")
        if message.role == "user" and out and out[-1].role == "user" and (system or late):
            out[-1] = _with(out[-1], content=f"{out[-1].content}\n{message.content}")
        else:
            out.append(message)
        late = system
    return out


def _is_system(message: Any) -> bool:
    return message.role in ("system", "developer")


def _with(message: Any, **changes: Any) -> Any:
    return message.model_copy(update=changes)
