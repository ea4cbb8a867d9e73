"""Selects a model's tool and reasoning formats: from the options, or detected from its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from weft.server.config import ReasoningParserName, ToolParserName
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.families import (
    HERMES,
    LLAMA3,
    REASONING_FORMATS,
    REASONING_MARKS,
    TOOL_FORMATS,
    TOOL_MARKS,
    UNREAD_MARKS,
)
from weft.server.tools.messages import knows_tools
from weft.server.tools.reasoning import ReasoningFormat
from weft.server.tools.stream import Reader, Steps, StreamParser, short_id
from weft.server.tools.tool_format import Schema, ToolFormat
from weft.server.tools.tool_named import ARGS, MistralFormat

UNKNOWN: ToolFormat = LLAMA3  # Format forced on models of unknown families; it needs no markers.


def detect(tokenizer: Tokenizer) -> ToolParserName:
    """Return the format detected from the chat template; `auto` if it does not support tools, or in a format that is
    not read."""
    template = tokenizer.chat_template or ""
    if not knows_tools(tokenizer) or any(mark in template for mark in UNREAD_MARKS):
        return "auto"
    return next((name for marks, name in TOOL_MARKS if all(mark in template for mark in marks)), "auto")


def tool_format(name: ToolParserName, tokenizer: Tokenizer) -> ToolFormat | None:
    """Return the tool format; None for an unknown family, in which calls look like text. If the template does not
    support tools, the server chooses the format (see `messages`)."""
    if name == "auto" and not knows_tools(tokenizer):
        return HERMES
    name = detect(tokenizer) if name == "auto" else name
    if name == "mistral":
        return MistralFormat(has_args=tokenizer.token_id(ARGS) is not None)
    return TOOL_FORMATS.get(name)


def reasoning_format(name: ReasoningParserName, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the reasoning format; None if reasoning cannot be separated from the answer."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    template = tokenizer.chat_template or ""
    found = next((name for mark, name in REASONING_MARKS if mark in template), None)
    return None if found is None else REASONING_FORMATS[found]


def answer_parser(
    form: ToolFormat | None, reasoning: ReasoningFormat | None, tools: Mapping[str, Schema], *, inside: bool = False
) -> StreamParser:
    """Return a parser for one answer. `form`: None if calls are not allowed. `inside`: the answer starts inside
    reasoning."""

    def steps(reader: Reader) -> Steps[None]:
        if reasoning is not None and reasoning.channels:
            yield from TOOL_FORMATS["openai"].steps(reader, tools if form is not None else {})
            return
        if reasoning is not None:
            yield from reasoning.steps(reader, form, tools, inside=inside)
        if form is not None:
            yield from form.steps(reader, tools)
        yield from reader.text_to_end()

    return StreamParser(steps, short_id if form is None else form.new_id)
