"""Which family's way of writing calls and thinking a model uses: told by the operator, or read off its template."""

from __future__ import annotations

from collections.abc import Mapping

from weft.server.config import ReasoningParserName, ToolParserName
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.call_ids import short_id
from weft.server.tools.families import (
    HERMES,
    LLAMA3,
    REASONING_FORMATS,
    REASONING_MARKS,
    TOOL_FORMATS,
    TOOL_MARKS,
)
from weft.server.tools.reasoning import ReasoningFormat
from weft.server.tools.stream import Reader, Steps, StreamParser
from weft.server.tools.tool_format import Schema, ToolFormat
from weft.server.tools.tool_named import ARGS, MistralFormat
from weft.server.tools.tool_prompt import knows_tools

UNKNOWN: ToolFormat = LLAMA3
"""what a model of an unknown family is made to write: it needs no markers"""


def detect(tokenizer: Tokenizer) -> ToolParserName:
    """The family that the model's chat template belongs to; `auto` when it knows no tools."""
    template = tokenizer.chat_template or ""
    if not knows_tools(tokenizer):
        return "auto"
    return next((name for marks, name in TOOL_MARKS if all(mark in template for mark in marks)), "auto")


def tool_format(name: ToolParserName, tokenizer: Tokenizer) -> ToolFormat | None:
    """None when calls cannot be told from text: an unknown family. A template that knows no tools leaves the form to
    the server (`tool_prompt`)."""
    if name == "auto" and not knows_tools(tokenizer):
        return HERMES
    name = detect(tokenizer) if name == "auto" else name
    if name == "mistral":
        return MistralFormat(has_args=tokenizer.token_id(ARGS) is not None)
    return TOOL_FORMATS.get(name)


def reasoning_format(name: ReasoningParserName, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """None when an answer has no thinking in it that can be told apart."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    template = tokenizer.chat_template or ""
    found = next((name for mark, name in REASONING_MARKS if mark in template), None)
    return None if found is None else REASONING_FORMATS[found]


def answer_parser(
    form: ToolFormat | None, reasoning: ReasoningFormat | None, tools: Mapping[str, Schema], *, inside: bool = False
) -> StreamParser:
    """What tells the parts of one answer apart. `form`: None where it may have no calls. `inside`: it begins in the
    middle of thinking."""

    def steps(reader: Reader) -> Steps[None]:
        if reasoning is not None and reasoning.channels:
            yield from TOOL_FORMATS["openai"].steps(reader, tools if form is not None else {})
            return
        if reasoning is not None:
            yield from reasoning.steps(reader, inside=inside)
        if form is not None:
            yield from form.steps(reader, tools)
        yield from reader.rest()

    return StreamParser(steps, short_id if form is None else form.new_id)
