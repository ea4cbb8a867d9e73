"""`TurnParser`: splits the text of a chat answer into thinking, text and tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.thinking import Thinking, ThoughtCount
from weft.server.api.choice import Choice, Piece
from weft.server.api.service import Service
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.reasoning import ReasoningFormat
from weft.server.tools.stream import Call, StreamParser, Thought
from weft.server.tools.tool_format import ToolFormat
from weft.server.tools.tool_parsers import answer_parser, reasoning_format
from weft.server.tools.tools import Tool


class Parts(NamedTuple):
    """The parts of a piece, in the order in which clients get them."""

    reasoning: str
    text: str
    calls: list[Call]
    """Deltas of calls; a call's first delta carries its id and name. A custom tool's call comes once, when complete,
    with the tool's input text as its arguments."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The marks that delimit thinking in answers to one prompt."""

    format: ReasoningFormat
    inside: bool  # the prompt ends inside the thinking, so the answer starts there
    closed: bool  # the prompt switches thinking off
    begin: tuple[int, ...]  # the opening mark as token ids
    end: tuple[int, ...]  # the closing mark as token ids

    def limit(self, budget: int, tokenizer: Tokenizer, *, tools: bool) -> Thinking | None:
        """A rule that ends the thinking after `budget` tokens."""
        if self.closed:
            return None
        force = tuple(tokenizer.encode(self.format.ending(tools=tools), add_special_tokens=False))
        return Thinking(budget, () if self.inside else self.begin, self.end, force)


def thinking_marks(service: Service, prompt: Sequence[int]) -> ThinkingMarks | None:
    """The marks for answers to `prompt`; None if the model is not known to think or parsing is off."""
    tokenizer = service.loaded.tokenizer
    format = reasoning_format(service.config.reasoning_parser, tokenizer)
    if format is None:
        return None
    tail = tokenizer.tail(prompt)
    begin, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (format.begin, format.end))
    return ThinkingMarks(format, format.inside(tail), format.closed(tail), begin, end)


def bounded_thinking(
    params: SamplingParams, thinking: ThinkingMarks | None, budget: int | None, tokenizer: Tokenizer, *, tools: bool
) -> SamplingParams:
    """Sampling parameters that end the thinking, if any, after `budget` tokens; None for no limit."""
    if thinking is None or budget is None:
        return params
    return msgspec.structs.replace(params, thinking=thinking.limit(budget, tokenizer, tools=tools))


class TurnParser:
    """Splits each choice of an answer into its parts."""

    def __init__(
        self, tool_format: ToolFormat | None, tools: Sequence[Tool] = (), *, forced: bool, parallel: bool, named: bool,
        thinking: ThinkingMarks | None = None, show_thinking: bool = True,
    ) -> None:  # fmt: skip
        """`tool_format`: the syntax of calls, None if the answer may contain none. `tools`: the callable tools.

        `forced`: the answer consists of calls only. `parallel`: it may contain several. `named`: the client named the
        tool. `thinking`: the marks of thinking, if any. `show_thinking`: include thinking in the parts."""
        self._tool_format, self._thinking, self._show_thinking = tool_format, thinking, show_thinking
        self._counts: dict[int, ThoughtCount] = {}
        self._tools = {tool.function.name: tool.function.schema_ for tool in tools}
        self._custom = frozenset(tool.function.name for tool in tools if tool.custom)
        self._forced, self._parallel, self._named = forced, parallel, named
        self._inputs: dict[tuple[int, int], Call] = {}
        """Incomplete calls of custom tools, by choice and call number."""
        self._parsers: dict[int, StreamParser] = {}
        self._called: set[int] = set()  # choices that contain a call

    @property
    def plain(self) -> bool:
        """The answer is text only."""
        return self._tool_format is None and self._thinking is None

    def is_custom(self, call: Call) -> bool:
        return call.name in self._custom

    def feed(self, choice: Choice, piece: Piece) -> Parts:
        """The parts of a choice's next piece. All are empty while the text could still become a call."""
        if self.plain:
            return Parts("", piece.text, [])
        return self._join(choice, self._read(choice, piece), ended=piece.finish_reason is not None)

    def runs(self, choice: Choice, piece: Piece) -> list[Parts]:
        """Like `feed`, but in the order the model wrote them: text after a call comes after it."""
        if self.plain:
            return [Parts("", piece.text, [])]
        found: list[list[str | Thought | Call]] = [[]]
        for part in self._read(choice, piece):
            if found[-1] and _rank(part) < _rank(found[-1][-1]):
                found.append([])
            found[-1].append(part)
        ended = piece.finish_reason is not None
        return [
            *(self._join(choice, parts, ended=False) for parts in found[:-1]),
            self._join(choice, found[-1], ended=ended),
        ]

    def _read(self, choice: Choice, piece: Piece) -> list[str | Thought | Call]:
        thinking, parser = self._thinking, self._parsers.get(choice.index)
        if parser is None:
            format = thinking.format if thinking is not None else None
            inside = thinking is not None and thinking.inside
            parser = self._parsers[choice.index] = answer_parser(self._tool_format, format, self._tools, inside=inside)
        if thinking is not None:
            self._count(choice, piece, thinking)
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.flush(cut=piece.finish_reason != "stop" or isinstance(piece.stop_reason, str))
        return parts

    def _join(self, choice: Choice, parts: Sequence[str | Thought | Call], *, ended: bool) -> Parts:
        calls: dict[int, Call] = {}
        for part in parts:
            if isinstance(part, Call) and (self._parallel or part.index == 0):
                before = calls.get(part.index)
                calls[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
        if calls:
            self._called.add(choice.index)
        text = "" if self._forced else "".join(part for part in parts if isinstance(part, str))
        reasoning = "".join(part.text for part in parts if isinstance(part, Thought)) if self._show_thinking else ""
        return Parts(reasoning, text, self._complete_inputs(choice, calls, ended=ended))

    def passes(self, choice: Choice, token_id: int, text: str) -> bool:
        """Whether this token is plain visible text. If so, it is consumed and must not be passed to `feed`."""
        if self.plain:
            return True
        parser = self._parsers.get(choice.index)
        if parser is None or self._forced or not parser.passes(text):
            return False
        if self._thinking is not None:
            self._count(choice, Piece("", [token_id]), self._thinking)
        return True

    def _count(self, choice: Choice, piece: Piece, thinking: ThinkingMarks) -> None:
        count = self._counts.get(choice.index)
        if count is None:
            begin = () if thinking.inside else thinking.begin
            count = self._counts[choice.index] = ThoughtCount(begin, thinking.end, again=thinking.format.channels)
        for token_id in piece.token_ids:
            count.see(token_id)
        choice.reasoning_tokens = count.tokens

    def finish_reason(self, choice: Choice, piece: Piece) -> str | None:
        """The finish reason in OpenAI's terms. It stays `stop` if the client named the tool that is called."""
        called = choice.index in self._called and not self._named
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _complete_inputs(self, choice: Choice, calls: dict[int, Call], *, ended: bool) -> list[Call]:
        """The calls, with calls of custom tools held until their input, which the model writes as JSON, is complete."""
        if not self._custom:
            return list(calls.values())
        out: list[Call] = []
        for call in calls.values():
            key = choice.index, call.index
            if (before := self._inputs.get(key)) is not None:
                self._inputs[key] = replace(before, arguments=before.arguments + call.arguments)
            elif call.name in self._custom:
                self._inputs[key] = call
            else:
                out.append(call)
        for key, call in list(self._inputs.items()):
            text = _input(call.arguments)
            if key[0] == choice.index and (text is not None or ended):
                out.append(replace(call, arguments=text or ""))
                del self._inputs[key]
        return out


def _rank(part: str | Thought | Call) -> int:
    """The position of a part in `Parts`."""
    return 0 if isinstance(part, Thought) else 1 if isinstance(part, str) else 2


def _input(arguments: str) -> str | None:
    """The input text of a custom tool's call; None until the arguments are complete."""
    try:
        return str(json.loads(arguments, strict=False)["input"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
