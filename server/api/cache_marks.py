"""`Mark`: up to where a request wants its prompt kept, and for how long; as tokens of the rendered prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.wire.messages import Promise
from weft.server.api.protocol import ChatBody
from weft.server.text.tokenizer import Tokenizer

WHOLE = -1
"""in place of a message's number: the whole prompt"""
HEAD = -2
"""what goes before the first message that is no system message: tools and instructions"""


class Mark(NamedTuple):
    message: int
    """keep the prompt up to the end of this message, or `WHOLE`, or `HEAD`"""
    seconds: float


def marks_of(body: ChatBody, *, by_key: bool = True) -> list[Mark]:
    """All marks of a request. `by_key`: `prompt_cache_key` is one, too."""
    marks = [Mark(WHOLE, body.kept_seconds)] if by_key and body.kept_seconds else []
    if body.cache_control is not None:
        marks.append(Mark(WHOLE, body.cache_control.seconds))
    marks += [Mark(HEAD, tool.cache_control.seconds) for tool in body.tools if tool.cache_control is not None]
    last = len(body.messages) - 1
    for i, message in enumerate(body.messages):
        if message.cache_control is not None:
            head = message.role in ("system", "developer") and not any(_says(m) for m in body.messages[:i])
            where = WHOLE if i == last else HEAD if head else i
            marks.append(Mark(where, message.cache_control.seconds))
    return marks


def _says(message: object) -> bool:
    return getattr(message, "role", "") not in ("system", "developer")


def promises_of(
    marks: Sequence[Mark], body: ChatBody, text: str, ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[Promise, ...]:
    """The marks as tokens of the prompt. Takes milliseconds where a mark is in the middle: for a worker thread.

    Where a message ends is found by looking for what it says, so a template may write around it what it likes. One
    whose text the template changes, or leaves out, ends where the one before it does: less is kept than could be.
    `text`: rendered, with `Tokenizer.as_text`'s seams.
    """
    if not marks:
        return ()
    if all(mark.message == WHOLE for mark in marks):
        return (Promise(len(ids), max(mark.seconds for mark in marks)),)
    ends = _ends(body, tokenizer.without_seams(text))
    sizes = tokenizer.byte_sizes(ids)
    seconds: dict[int, float] = {}
    for mark in marks:
        tokens = len(ids) if mark.message == WHOLE else int((sizes.cumsum() <= ends[mark.message]).sum())
        seconds[tokens] = max(mark.seconds, seconds.get(tokens, 0.0))
    return tuple(Promise(tokens, seconds[tokens]) for tokens in sorted(seconds) if tokens)


def _ends(body: ChatBody, text: str) -> dict[int, int]:
    """Bytes of the prompt before the end of each message; and before the first that is no system message (`HEAD`)."""
    data = text.encode()
    ends: dict[int, int] = {}
    at = 0
    for i, message in enumerate(body.messages):
        says = (message.content or "").strip().encode()
        found = data.find(says, at) if says else -1
        if _says(message) and HEAD not in ends:
            ends[HEAD] = max(found, at)
        if found >= 0:
            at = found + len(says)
        ends[i] = at
    return {HEAD: at, **ends}
