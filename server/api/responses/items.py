"""Items of the Responses API: what a client sends as input, checked; and as the messages of a conversation."""

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
from weft.server.errors import ApiError, bad_request, clip
from weft.server.tools.cache_control import CacheControl, longest_mark

Item = dict[str, Any]
"""as JSON; checked by `read_input`"""

MAX_ITEMS = MAX_MESSAGES
"""of one conversation"""
MAX_NAME = 256
_SEALED = "weft1:"
"""begins the encrypted content of our reasoning items"""

_ROLES = ("user", "assistant", "system", "developer")
_TEXT = {"input_text", "output_text", "text"}
_UNSEEN = {"web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"}
"""what other servers' own tools did: nothing of it is text that a model here could be shown"""
_ACTIONS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
"""calls of tools that the client carries out, and the field with the arguments"""
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = {f"{kind}_output" for kind in (*_CALLS, *_ACTIONS)}


# -- checking


def read_input(value: str | list[Any]) -> list[Item]:
    """The items of an `input`. Raises `ApiError` with the path of what is wrong."""
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if len(value) > MAX_ITEMS:
        raise bad_request(f"input: must have at most {MAX_ITEMS} items.", "input")
    return [read_item(item, f"input[{i}]") for i, item in enumerate(value)]


def read_item(value: Any, path: str) -> Item:
    """An item in its full form. Raises `ApiError`."""
    if isinstance(value, str):
        return _message("user", [{"type": "input_text", "text": value}])
    if not isinstance(value, dict):
        raise _wrong(path, "must be an object")
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
        case str() if kind in _UNSEEN:
            item = {"type": kind}
        case _:
            raise _wrong(path, f"an item of type {clip(kind)!r} is not supported")
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
        raise _wrong(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    content = given.get("content", [] if role == "assistant" else None)
    if isinstance(content, str):
        return _message(role, [{"type": kind, "text": content}])
    return _message(role, _read_parts(content, kind, f"{path}.content"))


def _read_parts(content: Any, kind: str, path: str) -> list[dict[str, Any]]:
    """Parts of text, as `kind` where they do not say which."""
    if not isinstance(content, list):
        raise _wrong(path, "must be a string or a list of parts")
    if len(content) > MAX_PARTS:
        raise _wrong(path, f"must have at most {MAX_PARTS} parts")
    parts = []
    for i, part in enumerate(content):
        here = f"{path}[{i}]"
        if isinstance(part, str):
            part = {"type": kind, "text": part}
        if not isinstance(part, dict):
            raise _wrong(here, "must be an object")
        found = part.get("type", "text")
        if found == "refusal":
            parts.append({"type": found, found: _string(part, found, here)})
        elif isinstance(found, str) and found in _TEXT:
            extra: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
            parts.append({"type": kind, "text": _string(part, "text", here), **extra})
        else:
            raise _wrong(here, f"a part of type {clip(found)!r} is not supported: this server takes text")
    return parts


def _read_output(given: dict[str, Any], path: str) -> str | list[dict[str, Any]]:
    output = given.get("output")
    if isinstance(output, str):
        return output
    if isinstance(output, dict) and isinstance(output.get("content"), str):
        text: str = output["content"]
        return text
    if isinstance(output, list) and all(isinstance(part, dict) and "stdout" in part for part in output):
        return json.dumps(output)  # of a shell, a command each
    return _read_parts(output, "input_text", f"{path}.output")


def _read_reasoning(given: dict[str, Any], path: str) -> Item:
    item: Item = {"type": "reasoning"}
    for field in ("summary", "content"):
        parts = given.get(field, [])
        if not isinstance(parts, list) or len(parts) > MAX_PARTS:
            raise _wrong(f"{path}.{field}", f"must be a list of at most {MAX_PARTS} parts")
        kind = "summary_text" if field == "summary" else "reasoning_text"
        texts = [_string(part, "text", f"{path}.{field}[{i}]") for i, part in enumerate(parts)]
        item[field] = [{"type": kind, "text": text} for text in texts]
    if "encrypted_content" in given:
        item["encrypted_content"] = _string(given, "encrypted_content", path)
    return item


def _string(given: Any, name: str, path: str) -> str:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, str):
        raise _wrong(f"{path}.{name}", "must be a string")
    if name in ("name", "call_id", "id", "namespace") and not 0 < len(value) <= MAX_NAME:
        raise _wrong(f"{path}.{name}", f"must have 1 to {MAX_NAME} characters")
    return value


def _wrong(path: str, what: str) -> ApiError:
    return bad_request(f"{clip(path)}: {what}.", clip(path))


# -- reasoning that travels with the client


def seal(reasoning: str) -> str:
    """Reasoning as the `encrypted_content` of an item. It is no secret; the form only keeps it in one piece."""
    return _SEALED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(text: str) -> str:
    """What was sealed; nothing for what another server has encrypted."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.urlsafe_b64decode(text[len(_SEALED) :].encode()).decode()
    except (Base64Error, ValueError):
        return ""


# -- as messages


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
    """The conversation. Instructions stand first, with the system messages that it begins with; later ones stay where
    they are. What the assistant thought, said and called, one after the other, is one message."""
    out: list[ChatMessage] = [] if instructions is None else [_said("system", instructions)]
    ours: ChatMessage | None = None  # the assistant's, to which more may come
    for item in items:
        kind = item["type"]
        if kind in _UNSEEN:
            continue
        if kind == "message" and item["role"] != "assistant":
            ours = None
            _add(out, item["role"], _text(item["content"]))
            _mark(out[-1], item)
            continue
        if kind in _OUTPUTS:
            ours = None
            out.append(_said("tool", _text(item["output"]), tool_call_id=item["call_id"]))
            _mark(out[-1], item)
            continue
        said = ours is not None and (ours.content is not None or bool(ours.tool_calls))
        if ours is None or (said and kind in ("message", "reasoning")):
            ours = _said("assistant", None)
            out.append(ours)
        if kind == "message":
            ours.content = _text(item["content"])
        elif kind == "reasoning":
            ours.reasoning_content = (ours.reasoning_content or "") + _thought(item)
        else:
            ours.tool_calls = [*(ours.tool_calls or ()), _call(item)]
        _mark(ours, item)
    return [message for message in out if message.role != "assistant" or _says(message)]


def _mark(message: ChatMessage, item: Item) -> None:
    """Keep the conversation up to here, if the item says so."""
    with suppress(ValidationError):  # of a form that nobody here knows: then it is kept as others are
        if "cache_control" in item:
            message.cache_control = CacheControl.model_validate(item["cache_control"])


def _add(out: list[ChatMessage], role: str, text: str) -> None:
    if role in ("system", "developer") and out and all(m.role in ("system", "developer") for m in out):
        out[-1] = _said(out[-1].role, f"{out[-1].content}\n\n{text}")
    else:
        out.append(_said(role, text))


def _said(role: str, content: str | None, **more: str) -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content, **more})


def _says(message: ChatMessage) -> bool:
    return message.content is not None or bool(message.tool_calls) or bool(message.reasoning_content)


def _text(content: str | Iterable[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _thought(item: Item) -> str:
    """The reasoning itself; where the client keeps none of it, what was said of it."""
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
    """What the model knows a tool as."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
