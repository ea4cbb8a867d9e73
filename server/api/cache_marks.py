"""`Mark`: how much of its prompt a request retains in the cache, and for how long, as tokens of the rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.wire.messages import Retention
from weft.server.api.protocol import ChatBody
from weft.server.text.tokenizer import Tokenizer

WHOLE = -1
"""A `Mark.message` that stands for the whole prompt."""
HEAD = -2
"""A `Mark.message` that stands for everything before the first non-system message: tools and instructions."""


class Mark(NamedTuple):
    message: int
    """Retain the prompt through this message, or `WHOLE`, or `HEAD`."""
    seconds: float


def marks_of(body: ChatBody, *, by_key: bool = True) -> list[Mark]:
    """All marks of a request. `by_key`: a `prompt_cache_key` counts as one."""
    marks = [Mark(WHOLE, body.kept_seconds)] if by_key and body.kept_seconds else []
    if body.cache_control is not None:
        marks.append(Mark(WHOLE, body.cache_control.seconds))
    marks += [Mark(HEAD, tool.cache_control.seconds) for tool in body.tools if tool.cache_control is not None]
    last = len(body.messages) - 1
    for i, message in enumerate(body.messages):
        if message.cache_control is not None:
            head = message.role in ("system", "developer") and not any(_is_conversation(m) for m in body.messages[:i])
            where = WHOLE if i == last else HEAD if head else i
            marks.append(Mark(where, message.cache_control.seconds))
    return marks


def _is_conversation(message: object) -> bool:
    return getattr(message, "role", "") not in ("system", "developer")


def retention_of(
    marks: Sequence[Mark], body: ChatBody, text: str, ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[Retention, ...]:
    """The marks as tokens of the prompt. Call it in a worker thread: marks inside the prompt take milliseconds.

    The end of a message is found by searching for its content, so any template works. If the template changes or drops
    the content, the message ends where the previous one does, and less is retained than possible. `text`: the rendered
    prompt with `Tokenizer.as_text`'s seams.
    """
    if not marks:
        return ()
    if all(mark.message == WHOLE for mark in marks):
        return (Retention(len(ids), max(mark.seconds for mark in marks)),)
    ends = _ends(body, tokenizer.without_seams(text))
    sizes = tokenizer.byte_sizes(ids)
    seconds: dict[int, float] = {}
    for mark in marks:
        tokens = len(ids) if mark.message == WHOLE else int((sizes.cumsum() <= ends[mark.message]).sum())
        seconds[tokens] = max(mark.seconds, seconds.get(tokens, 0.0))
    return tuple(Retention(tokens, seconds[tokens]) for tokens in sorted(seconds) if tokens)


def _ends(body: ChatBody, text: str) -> dict[int, int]:
    """Bytes of the prompt up to the end of each message, and up to the first non-system message (`HEAD`)."""
    data = text.encode()
    ends: dict[int, int] = {}
    at = 0
    for i, message in enumerate(body.messages):
        content = (message.content or "").strip().encode()
        found = data.find(content, at) if content else -1
        if _is_conversation(message) and HEAD not in ends:
            ends[HEAD] = max(found, at)
        if found >= 0:
            at = found + len(content)
        ends[i] = at
    return {HEAD: at, **ends}
