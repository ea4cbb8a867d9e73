"""`POST /v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.generate import Generation, Prompt, constrain, output_limit
from weft.server.api.protocol import ChatBody, ChatMessage
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.errors import bad_request
from weft.server.text.logprobs import chat_logprobs, prompt_logprobs
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.structured import Writer, either
from weft.server.tools.template import TemplateBody
from weft.server.tools.tool_format import Call, ToolFormat, ToolParser
from weft.server.tools.tool_parsers import UNKNOWN, tool_format
from weft.server.tools.tool_prompt import knows_tools, write_out
from weft.server.tools.tools import NamedToolChoice, Tool, call_of, names_of, required_call

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAMED)
async def chat_completions(body: ChatBody, request: Request, service: ServiceOf) -> Response:
    loaded = service.loaded
    model = service.model_name(body.model)
    body.check()
    service.check_ids(body.stop_token_ids, "stop_token_ids")
    service.check_ids(list(body.logit_bias), "logit_bias")
    service.check_ids(body.allowed_token_ids or [], "allowed_token_ids", at_most=loaded.ready.vocab_size)
    tools = [] if body.tool_choice == "none" else body.tools
    form = _tool_format(service, body) if tools else None
    forced = form is not None and body.tool_choice != "auto"
    grammar = await constrain(_constraint(body, tools, form, loaded.tokenizer), request, service)
    ids = await prompt_ids(body, tools, service)
    params = body.sampling(
        max_tokens=output_limit(service, body.output_limit, None, len(ids), "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    show = _marker_ids(form, loaded.tokenizer)
    # Every character of a forced call is markup: there is no text for stop strings to end.
    stops = () if forced else body.stop
    generation = Generation(
        service,
        body,
        [Prompt(ids)],
        [params],
        request.scope,
        show=show,
        grammar=grammar,
        stops=stops,
        markup=form.markup if form is not None else None,
    )
    return Answer(generation, ChatShape(loaded.tokenizer, body, form, forced=forced), model, int(time.time()))


async def prompt_ids(body: ChatBody, tools: list[Tool], service: Service) -> list[int]:
    """Token ids of the conversation, with these tools. Raises `ApiError`."""
    ids = await service.encode_chat(
        *conversation(body, body.messages, tools, service),
        add_special_tokens=bool(body.add_special_tokens),
        truncation=body.truncation(service.loaded.ready.max_model_len, body.output_limit),
    )
    if not ids:
        raise bad_request("messages: nothing is left of them.", "truncate_prompt_tokens")
    return ids


def _constraint(body: ChatBody, tools: Sequence[Tool], form: ToolFormat | None, tokenizer: Tokenizer) -> Writer | None:
    """What the answer must be: a call where one is required; else what was asked for, or a call."""
    asked = body.constraint()
    if form is None:
        return asked
    if (call := required_call(tools, body.tool_choice, form, tokenizer, parallel=body.parallel_tool_calls)) is not None:
        return call
    if asked is None:
        return None
    return either([asked, call_of(tools, form, tokenizer, parallel=body.parallel_tool_calls)])


def conversation(
    body: TemplateBody, messages: Sequence[ChatMessage], tools: list[Tool], service: Service
) -> tuple[Sequence[ChatMessage], dict[str, Any]]:
    """The messages, and the arguments of the template, with these tools: given to the template where it knows tools,
    written out where it does not."""
    tokenizer = service.loaded.tokenizer
    if knows_tools(tokenizer):
        return messages, body.template_arguments(tools)
    form = tool_format(service.config.tool_call_parser, tokenizer) or UNKNOWN
    as_text = (lambda text: text) if service.config.allow_special_tokens else tokenizer.as_text
    return write_out(messages, tools, form, as_text), body.template_arguments([])


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


def _marker_ids(form: ToolFormat | None, tokenizer: Tokenizer) -> frozenset[int]:
    ids = (tokenizer.token_id(marker) for marker in form.markers) if form is not None else ()
    return frozenset(token_id for token_id in ids if token_id is not None)


class ChatShape:
    """Choices of the chat endpoint."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self, tokenizer: Tokenizer, body: ChatBody, form: ToolFormat | None = None, *, forced: bool = False
    ) -> None:
        """form: how calls are told from text, for an answer that may have some. forced: it is nothing but calls."""
        self._tokenizer = tokenizer
        self._name = body.namer(tokenizer)
        self._body = body
        last = body.messages[-1]
        self._echo = (last.content or "") if body.echo and last.role == "assistant" else ""
        self._form = form
        self._forced = forced
        self._custom = frozenset(tool.function.name for tool in body.tools if tool.custom)
        self._inputs: dict[tuple[int, int], Call] = {}
        """calls of custom tools that are not whole yet, by choice and number"""
        self._parsers: dict[int, ToolParser] = {}
        self._called: set[int] = set()
        """choices with a call"""

    @property
    def plain(self) -> bool:
        return self._form is None and not self._body.logprobs and not self._body.return_token_ids

    def first_chunks(self, choice: Choice) -> list[dict[str, Any]]:
        deltas = [{"role": "assistant", "content": ""}, *([{"content": self._echo}] if self._echo else [])]
        return [{"index": choice.index, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas]

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        if self._form is None:
            return self._choice(choice, piece, "delta", {"content": piece.text})
        text, calls = self._split(self._form, choice, piece)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": call.index, **self._call(call)} for call in calls]
        if not delta and piece.finish_reason is None and not self._body.logprobs and not self._body.return_token_ids:
            return None  # held back: it may become a call
        return self._choice(choice, piece, "delta", delta)

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + piece.text, "refusal": None}
        if self._form is not None:
            text, calls = self._split(self._form, choice, piece)
            message["content"] = self._echo + text if text or not calls else None
            if calls:
                message["tool_calls"] = [self._call(call) for call in calls]
        return self._choice(choice, piece, "message", message)

    def _split(self, form: ToolFormat, choice: Choice, piece: Piece) -> tuple[str, list[Call]]:
        """What a piece brings of text and of calls, one entry a call."""
        parser = self._parsers.get(choice.index)
        if parser is None:
            parser = self._parsers[choice.index] = form.parser(names_of(self._body.tools))
        parts = parser.feed(piece.text)
        if piece.finish_reason is not None:
            parts += parser.flush()
        calls: dict[int, Call] = {}
        for part in parts:
            if isinstance(part, Call) and (self._body.parallel_tool_calls or part.index == 0):
                before = calls.get(part.index)
                calls[part.index] = replace(before, arguments=before.arguments + part.arguments) if before else part
        if calls:
            self._called.add(choice.index)
        text = "" if self._forced else "".join(part for part in parts if isinstance(part, str))
        return text, self._whole_inputs(choice, calls, ended=piece.finish_reason is not None)

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

    def _call(self, call: Call) -> dict[str, Any]:
        """A call, or what is new of one, in OpenAI's form."""
        if call.id is None:
            return {"function": {"arguments": call.arguments}}
        if call.name in self._custom:
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def extras(self, generation: Generation) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self._body.return_token_ids:
            out["prompt_token_ids"] = generation.prompts[0].token_ids
        if (top := self._body.prompt_logprobs) is not None:
            out["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer.token_text, generation.choices[0].prompt_logprobs, top
            )
        return out

    def _choice(self, choice: Choice, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice.index,
            name: content,
            "logprobs": None,
            "finish_reason": self._finish_reason(choice, piece),
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs:
            data, top = self._tokenizer.token_bytes, self._body.top_logprobs or 0
            out["logprobs"] = chat_logprobs(self._name, data, piece.logprobs, top)
        if self._body.return_token_ids:
            out["token_ids"] = piece.token_ids
        return out

    def _finish_reason(self, choice: Choice, piece: Piece) -> str | None:
        called = choice.index in self._called and not isinstance(self._body.tool_choice, NamedToolChoice)
        return "tool_calls" if called and piece.finish_reason == "stop" else piece.finish_reason


def _input(arguments: str) -> str | None:
    """The text that a custom tool is called with, once the arguments are whole."""
    try:
        return str(json.loads(arguments, strict=False)["input"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
