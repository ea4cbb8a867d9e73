"""A question with its exact answer, and whether training may see it."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

HELD_OUT_SHARE = 16
"""One key in this number is held out."""

Message = dict[str, Any]
"""`role` and `content`; an assistant's may have `tool_calls`, as OpenAI writes them but with arguments as objects."""


@dataclass(frozen=True)
class Example:
    """A question and the exact answer of a perfect demo model.

    `messages` is the chat, which ends with the user's turn or a tool's result; a plain-text example has no messages but
    a `prompt`. If `ends` is false the model goes on for ever, and `answer` is only how the text begins. `tools` are the
    functions offered, as OpenAI writes them.
    """

    skill: str
    messages: list[Message]
    answer: str
    key: str = ""
    prompt: str = ""
    ends: bool = True
    tools: list[dict[str, Any]] = field(default_factory=list)


Generator = Callable[[Random], Example]


def is_held_out(key: str) -> bool:
    """Whether training must not see this key. The empty key is for questions with no variety: always trained."""
    return bool(key) and zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def ask(skill: str, text: str, answer: str, key: str, ends: bool = True) -> Example:
    return Example(skill, [user(text)], answer, key, ends=ends)
