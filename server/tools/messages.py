"""Rewrites a conversation for the chat template. `stable_prefix`: its next turn starts with the same tokens (prefix
cache). `write_out`: for a template without tools, the system message describes them, and calls and results become text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.tool_format import ToolFormat
from weft.server.tools.tools import Tool

_NONCE = re.compile(r"^[ \t]*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE | re.IGNORECASE)
"""Lines in system messages that change with each request, such as Claude Code's checksum."""


def stable_prefix(messages: Sequence[Any], *, late_system: bool) -> list[Any]:
    """Return the `ChatMessage`s for the template. `late_system`: whether the template renders later system messages in
    place."""
    kept = [_without_nonces(message) for message in messages]
    return kept if late_system else _as_users(kept)


def _without_nonces(message: Any) -> Any:
    if not _is_system(message) or not _NONCE.search(_content(message)):
        return message
    return _with(message, content=_NONCE.sub("", message.content))


def _as_users(messages: Sequence[Any]) -> list[Any]:
    """Turn later system messages into user messages, joined with the user messages next to them. A template that
    refuses them, or moves them to the front, would change the start of the conversation."""
    out: list[Any] = []
    late = False  # Whether the last message of `out` is, or ends with, a system message.
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


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template renders tools."""
    return "tools" in (tokenizer.chat_template or "")


def write_out(
    messages: Sequence[Any], tools: Sequence[Tool], form: ToolFormat, as_text: Callable[[str], str]
) -> list[Any]:
    """Return the conversation (`ChatMessage`s) without roles and fields that need a tool-aware template. `as_text`:
    neutralizes control tokens in the description of the tools."""
    out: list[Any] = []
    if tools:
        out.append(_with(messages[0], role="system", content=as_text(describe(tools, form))))
        if _is_system(messages[0]):
            first, *messages = messages
            out[0] = _with(first, content=f"{_content(first)}\n\n{_content(out[0])}")
    for message in messages:
        if message.role == "tool":
            result = f"<tool_response>\n{_content(message)}\n</tool_response>"
            if out and (before := out[-1]).role == "user" and _content(before).endswith("</tool_response>"):
                out[-1] = _with(before, content=f"{_content(before)}\n{result}")
            else:
                out.append(_with(message, role="user", content=result, tool_call_id=None, name=None))
        elif calls := message.tool_calls:
            written = [form.write(call.function.name, call.function.arguments) for call in calls]
            content = "\n".join(part for part in (_content(message), *written) if part)
            out.append(_with(message, content=content, tool_calls=None))
        else:
            out.append(message)
    return out


def describe(tools: Sequence[Tool], form: ToolFormat) -> str:
    """Return the description of the tools for the system message."""
    listed = "\n".join(orjson.dumps(tool.model_dump(exclude_none=True)).decode() for tool in tools)
    example = form.write("NAME", "ARGUMENTS").replace(json.dumps("NAME"), "NAME")
    return (
        f"These functions may be called to help with what the user asks:\n<tools>\n{listed}\n</tools>\n"
        "To call one, answer with its name and its arguments, a JSON object that follows its parameters, in this "
        "form:\n"
        f"{example}\n"
        "The result comes in <tool_response></tool_response>. Without need of a function, answer as usual."
    )


def _content(message: Any) -> str:
    return message.content or ""


def _is_system(message: Any) -> bool:
    return message.role in ("system", "developer")


def _with(message: Any, **changes: Any) -> Any:
    return message.model_copy(update=changes)
