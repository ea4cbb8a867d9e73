"""`Turn`: a conversation on its way to an engine, and its answer as text and calls: what all dialects of chat share."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request

from weft.engine.wire.messages import Promise
from weft.engine.wire.thinking import Thinking, ThoughtCount
from weft.server.api.cache_marks import marks_of, promises_of
from weft.server.api.chat_message import ChatMessage
from weft.server.api.choice import Choice, Piece
from weft.server.api.conversation_names import is_later_turn, names_of
from weft.server.api.generate import Generation, Prompt, constrain, output_limit
from weft.server.api.model_text import EncodedChat
from weft.server.api.protocol import ChatBody
from weft.server.api.service import Service
from weft.server.errors import ApiError, bad_request
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.lasting import lasting
from weft.server.tools.reasoning import ReasoningFormat
from weft.server.tools.stream import Call, StreamParser, Thought
from weft.server.tools.structured import Grammar, Writer, either
from weft.server.tools.template import TemplateBody
from weft.server.tools.tool_format import ToolFormat
from weft.server.tools.tool_parsers import UNKNOWN, answer_parser, reasoning_format, tool_format
from weft.server.tools.tool_prompt import knows_tools, write_out
from weft.server.tools.tools import NamedToolChoice, Tool, call_of, marker_of, required_call


class Parts(NamedTuple):
    """What a piece brings, in this order."""

    reasoning: str
    text: str
    calls: list[Call]
    """one entry a call; its first one has the id and the name. That of a custom tool comes once, whole: its arguments
    are the text that the tool takes."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How the thinking of answers to one prompt is told apart."""

    form: ReasoningFormat
    inside: bool
    """an answer begins in the middle of it"""
    closed: bool
    """the prompt says that nothing is to be thought"""
    begin: tuple[int, ...]
    end: tuple[int, ...]
    """the marks as tokens"""

    def bound(self, budget: int, tokenizer: Tokenizer, *, tools: bool) -> Thinking | None:
        """What ends the thinking after so many tokens."""
        if self.closed:
            return None
        force = tuple(tokenizer.encode(self.form.ending(tools=tools), add_special_tokens=False))
        return Thinking(budget, () if self.inside else self.begin, self.end, force)


def thoughts_of(service: Service, prompt: Sequence[int]) -> Thoughts | None:
    """None where the model is not known to think, or is to be shown as it writes."""
    tokenizer = service.loaded.tokenizer
    form = reasoning_format(service.config.reasoning_parser, tokenizer)
    if form is None:
        return None
    tail = tokenizer.tail(prompt)
    begin, end = (tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in (form.begin, form.end))
    return Thoughts(form, form.inside(tail), form.closed(tail), begin, end)


class TurnParser:
    """Tells the parts of an answer apart, each of its choices for itself."""

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[Tool] = (),
        *,
        forced: bool,
        parallel: bool,
        named: bool,
        thoughts: Thoughts | None = None,
        show_thoughts: bool = True,
    ) -> None:
        """`form`: how calls are told from text, in an answer that may have some. `tools`: those it may call.

        `forced`: the answer is nothing but calls. `parallel`: it may have several. `named`: the client named the tool.
        `thoughts`: how thinking is told from the answer. `show_thoughts`: the client wants to see it.
        """
        self._form = form
        self._thoughts = thoughts
        self._show_thoughts = show_thoughts
        self._counts: dict[int, ThoughtCount] = {}
        self._tools = {tool.function.name: tool.function.schema_ for tool in tools}
        self._custom = frozenset(tool.function.name for tool in tools if tool.custom)
        self._forced = forced
        self._parallel = parallel
        self._named = named
        self._inputs: dict[tuple[int, int], Call] = {}
        """calls of custom tools that are not whole yet, by choice and number"""
        self._parsers: dict[int, StreamParser] = {}
        self._called: set[int] = set()
        """choices with a call"""

    @property
    def plain(self) -> bool:
        """There is nothing but text."""
        return self._form is None and self._thoughts is None

    def is_custom(self, call: Call) -> bool:
        return call.name in self._custom

    def feed(self, choice: Choice, piece: Piece) -> Parts:
        """The parts of a choice's next piece. All are empty while it may yet become a call."""
        if self.plain:
            return Parts("", piece.text, [])
        return self._joined(choice, self._read(choice, piece), ended=piece.finish_reason is not None)

    def runs(self, choice: Choice, piece: Piece) -> list[Parts]:
        """As `feed`, in the order in which they were written, however large the piece: text behind a call comes behind
        it."""
        if self.plain:
            return [Parts("", piece.text, [])]
        found: list[list[str | Thought | Call]] = [[]]
        for part in self._read(choice, piece):
            if found[-1] and _rank(part) < _rank(found[-1][-1]):
                found.append([])
            found[-1].append(part)
        ended = piece.finish_reason is not None
        return [
            *(self._joined(choice, parts, ended=False) for parts in found[:-1]),
            self._joined(choice, found[-1], ended=ended),
        ]

    def _read(self, choice: Choice, piece: Piece) -> list[str | Thought | Call]:
        thoughts, parser = self._thoughts, self._parsers.get(choice.index)
        if parser is None:
            form = thoughts.form if thoughts is not None else None
            inside = thoughts is not None and thoughts.inside
            parser = self._parsers[choice.index] = answer_parser(self._form, form, self._tools, inside=inside)
        if thoughts is not None:
            self._count(choice, piece, thoughts)
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.flush()
        return parts

    def _joined(self, choice: Choice, parts: Sequence[str | Thought | Call], *, ended: bool) -> Parts:
        calls: dict[int, Call] = {}
        for part in parts:
            if isinstance(part, Call) and (self._parallel or part.index == 0):
                before = calls.get(part.index)
                calls[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
        if calls:
            self._called.add(choice.index)
        text = "" if self._forced else "".join(part for part in parts if isinstance(part, str))
        reasoning = "".join(part.text for part in parts if isinstance(part, Thought)) if self._show_thoughts else ""
        return Parts(reasoning, text, self._whole_inputs(choice, calls, ended=ended))

    def passes(self, choice: Choice, token_id: int, text: str) -> bool:
        """Whether this token is nothing but text to be shown. If so it has been taken in: it is not to be fed."""
        if self.plain:
            return True
        parser = self._parsers.get(choice.index)
        if parser is None or self._forced or not parser.passes(text):
            return False
        if self._thoughts is not None:
            self._count(choice, Piece("", [token_id]), self._thoughts)
        return True

    def _count(self, choice: Choice, piece: Piece, thoughts: Thoughts) -> None:
        count = self._counts.get(choice.index)
        if count is None:
            begin = () if thoughts.inside else thoughts.begin
            count = self._counts[choice.index] = ThoughtCount(begin, thoughts.end, again=thoughts.form.channels)
        for token_id in piece.token_ids:
            count.see(token_id)
        choice.reasoning_tokens = count.tokens

    def finish_reason(self, choice: Choice, piece: Piece) -> str | None:
        """In OpenAI's words. A call of a tool that the client named is a `stop`."""
        called = choice.index in self._called and not self._named
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason

    def _whole_inputs(self, choice: Choice, calls: dict[int, Call], *, ended: bool) -> list[Call]:
        """The calls, those of custom tools once their input is whole: it is text, they are written as JSON."""
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
    """Its place in `Parts`."""
    return 0 if isinstance(part, Thought) else 1 if isinstance(part, str) else 2


def _input(arguments: str) -> str | None:
    """The text that a custom tool is called with, once the arguments are whole."""
    try:
        return str(json.loads(arguments, strict=False)["input"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Turn:
    """A checked request, ready for the engine, and what it takes to write its answer."""

    body: ChatBody
    generation: Generation
    """not submitted yet"""
    parser: TurnParser
    model: str
    """the name that the answer carries"""
    created: int
    """Unix time"""
    tokenizer: Tokenizer


async def begin_turn(
    body: ChatBody, request: Request, service: Service, *, at_most: int | None = None, keeps_by_key: bool = True
) -> Turn:
    """Check a request, make its prompt and its constraint. Raises `ApiError`.

    `at_most`: tokens of output where the body sets no limit and the context leaves more. `keeps_by_key`: who gives a
    `prompt_cache_key` wants the prompt kept.
    """
    service = service.of(body.model)
    body.check()
    await service.enter(body.model, request.scope)
    loaded, model = service.loaded, service.name(body.model)
    loaded.text.check_sampled_ids(body)
    salt = request.scope["weft.salt"] + body.cache_salt
    names = names_of(body, salt)
    if is_later_turn(body):
        loaded.replicas.prefetch(names)  # while the prompt is written
    tools = offered(body)
    form = _tool_format(service, body) if tools else None
    forced = form is not None and body.tool_choice != "auto"
    prompt = await _prompt(body, tools, service, salt)
    thoughts = thoughts_of(service, prompt.ids)
    writer = _constraint(body, tools, form, thoughts, loaded.tokenizer)
    grammar = await _grammar(writer, request, service, needed=forced or form is None or body.asks_for_structure)
    params = body.sampling(
        max_tokens=output_limit(service, body.output_limit, at_most, len(prompt.ids), "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    if thoughts is not None and (budget := body.max_thinking_tokens) is not None:
        bound = thoughts.bound(budget, loaded.tokenizer, tools=form is not None)
        params = msgspec.structs.replace(params, thinking=bound)
    markers = (*(form.markers if form is not None else ()), *(thoughts.form.markers if thoughts is not None else ()))
    promises: tuple[Promise, ...] = ()
    if marks := marks_of(body, by_key=keeps_by_key):
        promises = await service.offload(lambda: promises_of(marks, body, prompt.text, prompt.ids, loaded.tokenizer))
    generation = Generation(
        service,
        body,
        [Prompt(prompt.ids, promises=promises)],
        [params],
        request.scope,
        show=_marker_ids(markers, loaded.tokenizer),
        grammar=grammar,
        # Every character of a forced call is markup: there is no text for stop strings to end.
        stops=() if forced else body.stop,
        markup=form.markup if form is not None else None,
        names=names,
    )
    parser = TurnParser(
        form,
        body.tools,
        forced=forced,
        parallel=body.parallel_tool_calls,
        named=isinstance(body.tool_choice, NamedToolChoice),
        thoughts=thoughts,
        show_thoughts=body.include_reasoning,
    )
    return Turn(body, generation, parser, model, int(time.time()), loaded.tokenizer)


def offered(body: ChatBody) -> list[Tool]:
    """The tools that the model is told of."""
    return [] if body.tool_choice == "none" else body.tools


async def prompt_ids(body: ChatBody, tools: list[Tool], service: Service) -> list[int]:
    """Token ids of the conversation, with these tools. Raises `ApiError`."""
    return (await _prompt(body, tools, service)).ids


async def _prompt(body: ChatBody, tools: list[Tool], service: Service, salt: str | None = None) -> EncodedChat:
    prompt = await service.loaded.text.encode_chat(
        *conversation(body, body.messages, tools, service),
        add_special_tokens=bool(body.add_special_tokens),
        truncation=body.truncation(service.loaded.ready.max_model_len, body.output_limit),
        salt=salt,
    )
    if not prompt.ids:
        raise bad_request("messages: nothing is left of them.", "truncate_prompt_tokens")
    return prompt


async def _grammar(writer: Writer | None, request: Request, service: Service, *, needed: bool) -> Grammar | None:
    """As `constrain`; None too where there can be none and the answer is not worthless without one (not `needed`):
    clients call tools strict by themselves, and many tools are more than a grammar can be."""
    try:
        return await constrain(writer, request, service)
    except ApiError as error:
        if needed or error.code != "invalid_grammar":
            raise
        return None


def _constraint(
    body: ChatBody, tools: Sequence[Tool], form: ToolFormat | None, thoughts: Thoughts | None, tokenizer: Tokenizer
) -> Writer | None:
    """What the answer must be, behind the thinking: a call where one is required; else what was asked for, or a call;
    else text and calls, where a tool is strict."""
    parallel, marker = body.parallel_tool_calls, marker_of(tokenizer)
    asked = body.constraint(marker)
    if asked is not None and thoughts is not None:
        field, write, final = *asked, thoughts.form.final
        asked = field, lambda: final(write(), marker)
    call = required_call(tools, body.tool_choice, form, tokenizer, parallel=parallel) if form is not None else None
    if call is not None or form is None:
        writer = call or asked
    elif asked is not None:
        writer = either([asked, call_of(tools, form, tokenizer, parallel=parallel)])
    elif any(tool.strict for tool in tools):
        writer = call_of(tools, form, tokenizer, parallel=parallel, free=True)
    else:
        writer = None
    if writer is None or thoughts is None or thoughts.closed:
        return writer
    name, rest, inside, before = *writer, thoughts.inside, thoughts.form.before
    return name, lambda: before(rest(), marker, inside=inside)


def conversation(
    body: TemplateBody, messages: Sequence[ChatMessage], tools: list[Tool], service: Service
) -> tuple[Sequence[ChatMessage], dict[str, Any]]:
    """The messages, and the arguments of the template, with these tools: given to the template where it knows tools,
    written out where it does not. Whatever follows later changes nothing of
    what goes before (`lasting`)."""
    tokenizer = service.loaded.tokenizer
    messages = lasting(messages, late_system=tokenizer.takes_late_system)
    if knows_tools(tokenizer):
        return messages, body.template_arguments(tools, tokenizer.chat_template or "")
    form = tool_format(service.config.tool_call_parser, tokenizer) or UNKNOWN
    as_text = (lambda text: text) if service.config.allow_special_tokens else tokenizer.as_text
    return write_out(messages, tools, form, as_text), body.template_arguments([], tokenizer.chat_template or "")


def _tool_format(service: Service, body: ChatBody) -> ToolFormat:
    form = tool_format(service.config.tool_call_parser, service.loaded.tokenizer)
    if form is None and body.tool_choice == "auto":
        raise bad_request(
            "How this model writes calls cannot be read off its chat template, so it cannot choose to make one; "
            "use tool_choice 'required' or a named tool, or tell the server its --tool-call-parser.",
            "tools",
            "tools_not_supported",
        )
    return form or UNKNOWN


def _marker_ids(markers: Sequence[str], tokenizer: Tokenizer) -> frozenset[int]:
    ids = map(tokenizer.token_id, markers)
    return frozenset(token_id for token_id in ids if token_id is not None)
