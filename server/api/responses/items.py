"""Items of the Responses API: checking a client's input, and translating items to chat messages."""

from __future__ import annotations

import base64
import json
from binascii import Error as Base64Error
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from weft.server.api.chat_message import MAX_MESSAGES, ChatMessage, ToolCall, ToolFunction
from weft.server.api.field_types import MAX_PARTS
from weft.server.api.media.parts import read_part
from weft.server.errors import ApiError, bad_request, clip
from weft.server.tools.cache_control import CacheControl, longest_mark

Item = dict[str, Any]  # an item as JSON, checked by `read_input`

MAX_ITEMS = MAX_MESSAGES  # items per conversation
MAX_NAME = 256
_SEALED = "weft1:"  # prefix of the encrypted content of this server's reasoning items

_ROLES = ("user", "assistant", "system", "developer")
_TEXT = {"input_text", "output_text", "text"}
_IGNORED = {"web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"}
"""Calls of other servers' built-in tools, which contain no text for the model."""
_ACTIONS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
"""Calls that the client executes, and the field with their arguments."""
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = {f"{kind}_output" for kind in (*_CALLS, *_ACTIONS)}


# -- checking


def read_input(value: str | list[Any]) -> list[Item]:
    """The items of an `input`. Raises `ApiError` with the path of the invalid value."""
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if len(value) > MAX_ITEMS:
        raise bad_request(f"input: must have at most {MAX_ITEMS} items.", "input")
    return [read_item(item, f"input[{i}]") for i, item in enumerate(value)]


def read_item(value: Any, path: str) -> Item:
    """An item in its long form. Raises `ApiError`."""
    if isinstance(value, str):
        return _message("user", [{"type": "input_text", "text": value}])
    if not isinstance(value, dict):
        raise _invalid(path, "must be an object")
    given = {key: entry for key, entry in value.items() if entry is not None}
    kind = given.get("type", "message" if "role" in given else "item_reference" if "id" in given else None)
    match kind:
        case "message":
            item = _read_message(given, path)
        case "function_call" | "custom_tool_call":
            names = ("call_id", "name", _CALLS[kind])
            item = {"type": kind, **{name: _string(given, name, path) for name in names}}
            if "namespace" in given:
                item["namespace"] = _string(given, "namespace", path)
        case "reasoning":
            item = _read_reasoning(given, path)
        case "item_reference":
            return {"type": kind, "id": _string(given, "id", path)}
        case str() if kind in _OUTPUTS:
            item = {"type": kind, "call_id": _string(given, "call_id", path), "output": _read_output(given, path)}
        case str() if kind in _ACTIONS:
            item = {"type": kind, "call_id": _string(given, "call_id", path), _ACTIONS[kind]: given.get(_ACTIONS[kind])}
        case str() if kind in _IGNORED:
            item = {"type": kind}
        case _:
            raise _invalid(path, f"an item of type {clip(kind)!r} is not supported")
    if (mark := longest_mark((given, *_parts(given)))) is not None:
        item["cache_control"] = mark
    for name in ("id", "status"):
        if isinstance(given.get(name), str):
            item[name] = given[name]
    return item


def _parts(given: dict[str, Any]) -> Iterable[Any]:
    parts = given.get("content", given.get("output"))
    return parts if isinstance(parts, list) else ()


def _message(role: str, content: list[dict[str, Any]]) -> Item:
    return {"type": "message", "role": role, "content": content}


def _read_message(given: dict[str, Any], path: str) -> Item:
    role = given.get("role")
    if role not in _ROLES:
        raise _invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    content = given.get("content", [] if role == "assistant" else None)
    if isinstance(content, str):
        return _message(role, [{"type": kind, "text": content}])
    return _message(role, _read_parts(content, kind, f"{path}.content", images=role == "user"))


def _read_image(part: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        read_part(part, 0)
    except ValueError as error:
        raise _invalid(path, str(error)) from None
    return {name: part[name] for name in ("type", "image_url", "file_id", "detail") if part.get(name) is not None}


def _read_parts(content: Any, kind: str, path: str, *, images: bool = False) -> list[dict[str, Any]]:
    """Text parts, converted to type `kind`, and images if they are allowed."""
    if not isinstance(content, list):
        raise _invalid(path, "must be a string or a list of parts")
    if len(content) > MAX_PARTS:
        raise _invalid(path, f"must have at most {MAX_PARTS} parts")
    parts = []
    for i, part in enumerate(content):
        here = f"{path}[{i}]"
        if isinstance(part, str):
            part = {"type": kind, "text": part}
        if not isinstance(part, dict):
            raise _invalid(here, "must be an object")
        found = part.get("type", "text")
        if found == "refusal":
            parts.append({"type": found, found: _string(part, found, here)})
        elif isinstance(found, str) and found in _TEXT:
            extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
            parts.append({"type": kind, "text": _string(part, "text", here), **extra})
        elif found == "input_image" and images:
            parts.append(_read_image(part, here))
        else:
            raise _invalid(
                here, f"a part of type {clip(found)!r} is not supported here: use text, and images of users and tools"
            )
    return parts


def _read_output(given: dict[str, Any], path: str) -> str | list[dict[str, Any]]:
    output = given.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, dict) and isinstance(output.get("content"), str):
        return output["content"]
    if isinstance(output, list) and all(isinstance(part, dict) and "stdout" in part for part in output):
        return json.dumps(output)  # a shell's output, one entry per command
    return _read_parts(output, "input_text", f"{path}.output", images=True)


def _read_reasoning(given: dict[str, Any], path: str) -> Item:
    item: Item = {"type": "reasoning"}
    for field in ("summary", "content"):
        parts = given.get(field, [])
        if not isinstance(parts, list) or len(parts) > MAX_PARTS:
            raise _invalid(f"{path}.{field}", f"must be a list of at most {MAX_PARTS} parts")
        kind = "summary_text" if field == "summary" else "reasoning_text"
        texts = [_string(part, "text", f"{path}.{field}[{i}]") for i, part in enumerate(parts)]
        item[field] = [{"type": kind, "text": text} for text in texts]
    if "encrypted_content" in given:
        item["encrypted_content"] = _string(given, "encrypted_content", path)
    return item


def _string(given: Any, name: str, path: str) -> str:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, str):
        raise _invalid(f"{path}.{name}", "must be a string")
    if name in ("name", "call_id", "id", "namespace") and not 0 < len(value) <= MAX_NAME:
        raise _invalid(f"{path}.{name}", f"must have 1 to {MAX_NAME} characters")
    return value


def _invalid(path: str, what: str) -> ApiError:
    return bad_request(f"{clip(path)}: {what}.", clip(path))


# -- reasoning that the client stores


def seal(reasoning: str) -> str:
    """Encode reasoning as the `encrypted_content` of an item. It is not secret; the encoding only keeps it intact."""
    return _SEALED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(text: str) -> str:
    """Decode sealed reasoning; empty if another server encrypted it."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.urlsafe_b64decode(text[len(_SEALED) :].encode()).decode()
    except (Base64Error, ValueError):
        return ""


# -- as messages


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
    """Translate items to chat messages. Instructions come first, joined with leading system messages; later system
    messages keep their position. Consecutive reasoning, text and calls of the assistant become one message."""
    out: list[ChatMessage] = [] if instructions is None else [_chat_message("system", instructions)]
    ours: ChatMessage | None = None  # the assistant message that later items may extend
    for item in items:
        kind = item["type"]
        if kind in _IGNORED:
            continue
        if kind == "message" and item["role"] != "assistant":
            ours = None
            _add(out, item["role"], _content(item["content"]))
            _mark(out[-1], item)
            continue
        if kind in _OUTPUTS:
            ours = None
            out.append(_chat_message("tool", _content(item["output"]), tool_call_id=item["call_id"]))
            _mark(out[-1], item)
            continue
        has_content = ours is not None and (ours.content is not None or bool(ours.tool_calls))
        if ours is None or (has_content and kind in ("message", "reasoning")):
            ours = _chat_message("assistant", None)
            out.append(ours)
        if kind == "message":
            ours.content = _text(item["content"])
        elif kind == "reasoning":
            ours.reasoning_content = (ours.reasoning_content or "") + _reasoning(item)
        else:
            ours.tool_calls = [*(ours.tool_calls or ()), _call(item)]
        _mark(ours, item)
    return [m for m in out if m.role != "assistant" or m.content is not None or m.tool_calls or m.reasoning_content]


def _mark(message: ChatMessage, item: Item) -> None:
    """Copy an item's cache mark to its message."""
    with suppress(ValidationError):  # an unknown form is ignored
        if "cache_control" in item:
            message.cache_control = CacheControl.model_validate(item["cache_control"])


def _add(out: list[ChatMessage], role: str, text: str | list[dict[str, Any]]) -> None:
    if role in ("system", "developer") and out and all(m.role in ("system", "developer") for m in out):
        out[-1] = _chat_message(out[-1].role, f"{out[-1].content}\n\n{text}")
    else:
        out.append(_chat_message(role, text))


def _chat_message(role: str, content: str | list[dict[str, Any]] | None, **more: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content, **more})


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content of a chat message: a text, or the parts if there are images."""
    if isinstance(content, str) or all(part["type"] != "input_image" for part in content):
        return _text(content)
    return content


def _text(content: str | Iterable[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _reasoning(item: Item) -> str:
    """An item's reasoning, or its summary if the client does not keep the reasoning."""
    for parts in (item["content"], unseal(item.get("encrypted_content", "")), item["summary"]):
        if parts:
            return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
    return ""


def _call(item: Item) -> ToolCall:
    kind = item["type"]
    if kind in _ACTIONS:
        name, arguments = kind.removesuffix("_call"), json.dumps(item[_ACTIONS[kind]])
    else:
        name = full_name(item.get("namespace"), item["name"])
        custom = kind == "custom_tool_call"
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False) if custom else item["arguments"]
    return ToolCall(id=item["call_id"], function=ToolFunction(name=name, arguments=arguments))


def full_name(namespace: str | None, name: str) -> str:
    """The tool name that the model sees."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
