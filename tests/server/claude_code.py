"""Requests in the shape of Claude Code's, written from the public description of the API: many tools, a long system
prompt in blocks with a billing header, reminders inside user messages, moving cache marks, thinking, results."""

from __future__ import annotations

from typing import Any

CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.37 (external, cli)",
    "x-stainless-lang": "js",
}
QUERY = {"beta": "true"}


def _tool(name: str, description: str, required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": description,
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        },
    }


TEXT = {"type": "string"}
TOOLS = [
    _tool("Bash", "Runs a command in a shell.", ("command",), command=TEXT, timeout={"type": "number"}),
    _tool("Read", "Reads a file.", ("file_path",), file_path=TEXT, offset={"type": "number"}),
    _tool(
        "Edit",
        "Replaces text in a file.",
        ("file_path", "old_string", "new_string"),
        file_path=TEXT,
        old_string=TEXT,
        new_string=TEXT,
        replace_all={"type": "boolean", "default": False},
    ),
    _tool(
        "TodoWrite",
        "Keeps a list of what is to be done.",
        ("todos",),
        todos={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        },
    ),
]


def system(nonce: str) -> list[dict[str, Any]]:
    """The blocks of a system prompt. Each request has another nonce."""
    return [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={nonce};"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Work in small steps. Read before you write.\nPlatform: linux", **CACHED},
    ]


def request(messages: list[dict[str, Any]], nonce: str, *, model: str = "demo", **fields: Any) -> dict[str, Any]:
    """A turn's request. The last message carries the cache mark."""
    *before, last = messages
    content = last["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    marked = {**last, "content": [*blocks[:-1], {**blocks[-1], **CACHED}]}
    return {
        "model": model,
        "messages": [*before, marked],
        "system": system(nonce),
        "tools": TOOLS,
        "metadata": {"user_id": "user_0_account__session_0b0c6a4e-0000-4000-8000-000000000000"},
        "max_tokens": 32000,
        "temperature": 1,
        "stream": True,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        **fields,
    }


def first_message(text: str) -> dict[str, Any]:
    reminder = "<system-reminder>\nThe list of what is to be done is empty.\n</system-reminder>"
    return {"role": "user", "content": [{"type": "text", "text": reminder}, {"type": "text", "text": text}]}


TRANSCRIPT: list[dict[str, Any]] = [
    first_message("Make the tests pass."),
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I look at the tests first.", "signature": "EqQBCgIYAhIM"},
            {"type": "text", "text": "I run the tests."},
            {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "pytest -q"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_01",
                "content": "<error>Exit code 1</error>\nE assert 1 == 2",
                "is_error": True,
            }
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/a.py"}},
            {"type": "tool_use", "id": "toolu_03", "name": "Read", "input": {"file_path": "/b.py", "offset": 3}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_02", "content": [{"type": "text", "text": "1\tx = 1"}]},
            {"type": "tool_result", "tool_use_id": "toolu_03", "content": []},
            {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"},
        ],
    },
]
"""a conversation up to the assistant's next turn"""
