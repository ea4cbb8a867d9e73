"""`lasting`: a conversation so that its next turn begins with the same tokens, or its beginning is in no cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NONCE = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE | re.IGNORECASE)
"""lines that clients write into system messages anew with each request: Claude Code's, with a checksum of it"""


def lasting(messages: Sequence[Any], *, late_system: bool) -> list[Any]:
    """The messages (of `ChatMessage`) as templates get them, of a template that writes system messages where they stand
    (`late_system`) or not."""
    kept = [_without_nonces(message) for message in messages]
    return kept if late_system else _as_users(kept)


def _without_nonces(message: Any) -> Any:
    if not _is_system(message) or not _NONCE.search(message.content or ""):
        return message
    return _with(message, content=_NONCE.sub("", message.content))


def _as_users(messages: Sequence[Any]) -> list[Any]:
    """System messages that are not the first are what a user says there, with what the user says beside it: a template
    that refuses them, or puts them before all else, would have the conversation begin anew."""
    out: list[Any] = []
    late = False
    """the last one of `out` has been a system message, or ends with one"""
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
