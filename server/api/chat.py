"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.generate import Generation, Prompt, constrain, output_limit
from weft.server.api.protocol import ChatBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.errors import bad_request
from weft.server.text.logprobs import chat_logprobs, prompt_logprobs
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.tool_format import Call, ToolFormat, ToolParser
from weft.server.tools.tool_parsers import UNKNOWN, tool_format
from weft.server.tools.tools import NamedToolChoice, names_of, required_call

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAMED)
async def chat_completions(body: ChatBody, request: Request, service: ServiceOf) -> Response:
    loaded = service.loaded
    model = service.model_name(body.model)
    body.check()
    service.check_ids(body.stop_token_ids, "stop_token_ids")
    service.check_ids(list(body.logit_bias), "logit_bias")
    service.check_ids(body.allowed_token_ids or [], "allowed_token_ids")
    tools = [] if body.tool_choice == "none" else body.tools
    form, writer = None, body.grammar()
    if tools:
        form = _tool_format(service, body)
        call = required_call(tools, body.tool_choice, form, loaded.tokenizer, parallel=body.parallel_tool_calls)
        writer = call or writer
    grammar = await constrain(writer, request, service)
    ids = await service.encode_chat(
        body.messages,
        body.template_arguments(tools),
        add_special_tokens=bool(body.add_special_tokens),
        truncation=body.truncation(loaded.ready.max_model_len, body.output_limit),
    )
    if not ids:
        raise bad_request("messages: nothing is left of them.", "truncate_prompt_tokens")
    params = body.sampling(
        max_tokens=output_limit(service, body.output_limit, None, len(ids), "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    show = _marker_ids(form, loaded.tokenizer)
    generation = Generation(service, body, [Prompt(ids)], [params], request.scope, show=show, grammar=grammar)
    return Answer(generation, ChatShape(loaded.tokenizer, body, form), model, int(time.time()))


def _tool_format(service: Service, body: ChatBody) -> ToolFormat:
    form = tool_format(service.config.tool_call_parser, service.loaded.tokenizer)
    if form is None and body.tool_choice == "auto":
        raise bad_request(
            "This model's chat template knows no tools, so it cannot choose to call one; "
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

    def __init__(self, tokenizer: Tokenizer, body: ChatBody, form: ToolFormat | None = None) -> None:
        """form: how calls are told from text, for an answer that may have some."""
        self._tokenizer = tokenizer
        self._name = body.namer(tokenizer)
        self._body = body
        last = body.messages[-1]
        self._echo = (last.content or "") if body.echo and last.role == "assistant" else ""
        self._form = form
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
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        if not delta and piece.finish_reason is None and not self._body.logprobs and not self._body.return_token_ids:
            return None  # held back: it may become a call
        return self._choice(choice, piece, "delta", delta)

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + piece.text, "refusal": None}
        if self._form is not None:
            text, calls = self._split(self._form, choice, piece)
            message["content"] = self._echo + text if text or not calls else None
            if calls:
                message["tool_calls"] = [
                    {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                    for call in calls
                ]
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
        return "".join(part for part in parts if isinstance(part, str)), list(calls.values())

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


def _call_delta(call: Call) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
