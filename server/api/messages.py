"""`POST /v1/messages`, `/v1/messages/count_tokens`: Anthropic's dialect of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from pydantic_core import from_json

from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.events import MARK, event
from weft.server.api.messages_protocol import CountTokensBody, MessagesBody, MessagesErrorBody
from weft.server.api.protocol import ChatBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.turn import Parts, Turn, begin_turn, offered, prompt_ids
from weft.server.errors import ApiError, anthropic_error, translate
from weft.server.tools.stream import Call

SIGNATURE = "d2VmdA=="
"""of thinking: clients give it back, nobody here needs it"""

_ERRORS: dict[int | str, dict[str, Any]] = {kind: {"model": MessagesErrorBody} for kind in ("4XX", "5XX")}

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages", summary="Answer a conversation, in Anthropic's form", responses=STREAMED | _ERRORS)
async def messages(body: MessagesBody, request: Request, service: ServiceOf) -> Response:
    chat = _chat(body)
    chat.stop = body.stop_sequences
    # What the context does not leave is not an error here: clients ask for as much as their models can.
    turn = await begin_turn(chat, request, service, at_most=max(1, body.max_tokens), keeps_by_key=False)
    return Answer(turn.generation, MessagesDialect(turn, body.max_tokens))


@router.post("/v1/messages/count_tokens", summary="Tokens that the prompt of such a request has", responses=_ERRORS)
async def count_tokens(body: CountTokensBody, request: Request, service: ServiceOf) -> dict[str, int]:
    chat = _chat(body)
    service = service.of(chat.model)
    chat.check()
    await service.enter(chat.model, request.scope)
    return {"input_tokens": len(await prompt_ids(chat, offered(chat), service))}


def _chat(body: CountTokensBody) -> ChatBody:
    """The same request as one of chat. Raises `ApiError`."""
    try:
        return ChatBody.model_validate(body.as_chat())
    except ValidationError as error:
        raise translate(error) from None


class MessagesDialect:
    """An answer as a message of content blocks: thinking, text, calls."""

    silence = event(b'{"type":"ping"}', b"ping")

    def __init__(self, turn: Turn, max_tokens: int) -> None:
        """`max_tokens`: asked for."""
        self._turn = turn
        self._parser = turn.parser
        self._generation = turn.generation
        self._max_tokens = max_tokens
        self._begun = False
        self._blocks = 0
        """begun so far"""
        self._open = ""
        """the type of the block that is open"""
        self._call = -1
        """the number of the call that is open"""
        self._held = ""
        """white space before anything else: none of it is shown where a call follows"""
        self._last = Piece()
        self._template: tuple[bytes, bytes] | None = None
        """what stands around the text of an event of the open block"""

    # -- whole

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        piece = wholes[0]
        content: list[dict[str, Any]] = []

        def more(kind: str, field: str, text: str, **fields: Any) -> None:
            if self._open != kind:
                content.append({"type": kind, field: "", **fields})
            self._open = kind
            content[-1][field] += text

        for parts in self._parser.runs(self._generation.choices[0], piece) if self._max_tokens else ():
            if parts.reasoning:
                more("thinking", "thinking", parts.reasoning, signature=SIGNATURE)
            if text := self._shown(parts.text):
                more("text", "text", text)
            for call in parts.calls:
                content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)})
                self._call, self._open, self._held = call.index, "tool_use", ""
        if self._held and self._call < 0:
            more("text", "text", self._held)
        return orjson.dumps({**self._message(content), **self._stop(piece), "usage": self._usage()})

    # -- streamed

    @property
    def plain(self) -> bool:
        return self._parser.plain and self._open == "text"

    def of(self, choice: Choice, piece: Piece) -> bytes:
        out = b"" if self._begun else self._begin()
        if piece.finish_reason is not None:
            self._last = piece
        if not self._max_tokens:
            return out
        return out + b"".join(self._events(parts) for parts in self._parser.runs(choice, piece))

    def _events(self, parts: Parts) -> bytes:
        out, calls = b"", parts.calls
        if calls and calls[0].id is None:  # what is new of the open call, before what came behind it
            out += self._call_events(calls[0])
            calls = calls[1:]
        if parts.reasoning:
            out += self._opened("thinking", {"thinking": "", "signature": ""})
            out += self._delta("thinking_delta", "thinking", parts.reasoning)
        if text := self._shown(parts.text):
            out += self._opened("text", {"text": ""}) + self._delta("text_delta", "text", text)
        for call in calls:
            out += self._call_events(call)
        return out

    def quick(self, choice: Choice, token_id: int, text: str) -> bytes | None:
        if self._open != "text" or not self._parser.passes(choice, token_id, text):
            return None
        if not text:
            return b""
        if self._template is None:
            before, _, after = self._delta("text_delta", "text", MARK).partition(orjson.dumps(MARK))
            self._template = before, after
        return self._template[0] + orjson.dumps(text) + self._template[1]

    async def end(self) -> bytes:
        held = b""
        if self._held and self._call < 0:
            held = self._opened("text", {"text": ""}) + self._delta("text_delta", "text", self._held)
        delta = {"type": "message_delta", "delta": self._stop(self._last), "usage": self._usage()}
        return held + self._closed() + _event(delta) + _event({"type": "message_stop"})

    async def failed(self, error: ApiError) -> bytes:
        return event(anthropic_error(error, self._generation.id), b"error")

    def _begin(self) -> bytes:
        self._begun = True
        stop = {"stop_reason": None, "stop_sequence": None}
        return _event({"type": "message_start", "message": {**self._message([]), **stop, "usage": self._usage()}})

    def _shown(self, text: str) -> str:
        """The text, and what was held back before it. White space that nothing else has gone before is held back, where
        calls may follow: clients take no blocks of it alone."""
        if self._parser.plain or self._open == "text":
            return text
        self._held += text
        if not self._held.strip():
            return ""
        text, self._held = self._held, ""
        return text

    def _call_events(self, call: Call) -> bytes:
        out = b""
        if call.id is not None:
            out = self._opened("tool_use", {"id": call.id, "name": call.name, "input": {}}, again=True)
            self._call, self._held = call.index, ""
        if call.arguments:
            out += self._delta("input_json_delta", "partial_json", call.arguments)
        return out

    def _opened(self, kind: str, fields: dict[str, Any], *, again: bool = False) -> bytes:
        """The events after which a block of this type is open. `again`: a new one in any case."""
        if self._open == kind and not again:
            return b""
        out = self._closed()
        self._open, self._template = kind, None
        self._blocks += 1
        block = {"type": kind, **fields}
        return out + _event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _closed(self) -> bytes:
        if not self._open:
            return b""
        out = self._delta("signature_delta", "signature", SIGNATURE) if self._open == "thinking" else b""
        self._open = ""
        return out + _event({"type": "content_block_stop", "index": self._blocks - 1})

    def _delta(self, kind: str, field: str, text: str) -> bytes:
        delta = {"type": kind, field: text}
        return _event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    # -- both

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
            "content": content,
        }

    def _stop(self, piece: Piece) -> dict[str, Any]:
        """Why the answer ended, in Anthropic's words."""
        reason, sequence = "end_turn", None
        if piece.finish_reason == "length":
            reason = "max_tokens" if self._output_tokens >= self._max_tokens else "model_context_window_exceeded"
        elif isinstance(piece.stop_reason, str):
            reason, sequence = "stop_sequence", piece.stop_reason
        elif self._call >= 0:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    @property
    def _output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._generation.choices)

    def _usage(self) -> dict[str, Any]:
        """What was found in the cache is told apart, and what was put there because the client asked for that."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        minutes, hour = self._generation.created()
        return {
            "input_tokens": usage["prompt_tokens"] - cached - minutes - hour,
            "cache_creation_input_tokens": minutes + hour,
            "cache_read_input_tokens": cached,
            "cache_creation": {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour},
            "output_tokens": usage["completion_tokens"] if self._max_tokens else 0,
        }


def _event(fields: dict[str, Any]) -> bytes:
    return event(orjson.dumps(fields), fields["type"].encode())


def _input(arguments: str) -> dict[str, Any]:
    """Of a call, as far as it goes: the answer may have ended within."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
