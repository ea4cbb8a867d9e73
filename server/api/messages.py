"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect of chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from pydantic_core import from_json

from weft.server.api.answer import Answer
from weft.server.api.chat_prompt import prompt_ids
from weft.server.api.choice import Choice, Piece
from weft.server.api.events import MARK, Dialect, event
from weft.server.api.media.prompt import without_place
from weft.server.api.messages_protocol import CountTokensBody, MessagesBody, MessagesErrorBody
from weft.server.api.protocol import ChatBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.turn import Turn, begin_turn
from weft.server.api.turn_parser import Parts
from weft.server.errors import ApiError, anthropic_error, renamed, translate
from weft.server.tools.stream import Call

SIGNATURE = "d2VmdA=="
"""The signature of every thinking block. Clients return it; this server ignores it."""

_ERRORS: dict[int | str, dict[str, Any]] = {kind: {"model": MessagesErrorBody} for kind in ("4XX", "5XX")}

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages", summary="Answer a conversation, in Anthropic's format", responses=STREAMED | _ERRORS)
async def messages(body: MessagesBody, request: Request, service: ServiceOf) -> Response:
    chat = _chat(body)
    chat.stop = body.stop_sequences
    # `max_tokens` is not checked against the context: clients request the maximum of their models.
    try:
        turn = await begin_turn(chat, request, service, default_limit=max(1, body.max_tokens), retain_by_key=False)
    except ApiError as error:
        own = "output_config.format" if body.output_format is None else "output_format"
        raise renamed(without_place(error), "response_format", own) from None
    return Answer(turn.generation, MessagesDialect(turn, body.max_tokens))


@router.post("/v1/messages/count_tokens", summary="Count the prompt tokens of a message request", responses=_ERRORS)
async def count_tokens(body: CountTokensBody, request: Request, service: ServiceOf) -> dict[str, int]:
    return {"input_tokens": len(await prompt_ids(_chat(body), request.scope, service))}


def _chat(body: CountTokensBody) -> ChatBody:
    """The equivalent chat request. Raises `ApiError`."""
    try:
        return ChatBody.model_validate(body.as_chat())
    except ValidationError as error:
        raise translate(error) from None


class MessagesDialect(Dialect):
    """Writes an answer as a message of content blocks: thinking, text, calls."""

    keepalive = event(b'{"type":"ping"}', b"ping")

    def __init__(self, turn: Turn, max_tokens: int) -> None:
        """`max_tokens`: the value in the request."""
        self._turn = turn
        self._parser = turn.parser
        self._generation = turn.generation
        self._max_tokens = max_tokens
        self._begun = False
        self._blocks = 0  # blocks started so far
        self._open = ""  # the type of the open block, or empty
        self._call = -1  # the index of the open call
        self._held = ""  # leading white space, dropped if a call follows
        self._last = Piece()
        self._template: tuple[bytes, bytes] | None = None
        """The bytes before and after the text in an event of the open block."""

    # -- plain

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        piece = wholes[0]
        content: list[dict[str, Any]] = []

        def append(kind: str, field: str, text: str, **fields: Any) -> None:
            if self._open != kind:
                content.append({"type": kind, field: "", **fields})
            self._open = kind
            content[-1][field] += text

        for parts in self._parser.runs(self._generation.choices[0], piece) if self._max_tokens else ():
            if parts.reasoning:
                append("thinking", "thinking", parts.reasoning, signature=SIGNATURE)
            if text := self._shown(parts.text):
                append("text", "text", text)
            for call in parts.calls:
                content.append(
                    {"type": "tool_use", "id": call.id, "name": call.name, "input": partial_input(call.arguments)}
                )
                self._call, self._open, self._held = call.index, "tool_use", ""
        if self._held and self._call < 0:
            append("text", "text", self._held)
        return orjson.dumps({**self._message(content), **self._stop(piece), "usage": self._usage()})

    # -- streamed

    @property
    def plain(self) -> bool:
        return self._parser.plain and self._open == "text"

    def events(self, choice: Choice, piece: Piece) -> bytes:
        out = b"" if self._begun else self._begin()
        if piece.finish_reason is not None:
            self._last = piece
        if not self._max_tokens:
            return out
        return out + b"".join(self._events(parts) for parts in self._parser.runs(choice, piece))

    def _events(self, parts: Parts) -> bytes:
        out, calls = b"", parts.calls
        if calls and calls[0].id is None:  # a delta of the open call precedes what follows the call
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

    def token_event(self, choice: Choice, token_id: int, text: str) -> bytes | None:
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
        """The text with any held white space. Leading white space is held back while a call may follow, because clients
        reject blocks of white space."""
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
        """Events that open a block of this type unless one is open. `again`: always open a new block."""
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
        """Why the answer ended, in Anthropic's terms."""
        reason, sequence = "end_turn", None
        if piece.finish_reason == "length":
            output_tokens = sum(choice.num_tokens for choice in self._generation.choices)
            reason = "max_tokens" if output_tokens >= self._max_tokens else "model_context_window_exceeded"
        elif isinstance(piece.stop_reason, str):
            reason, sequence = "stop_sequence", piece.stop_reason
        elif self._call >= 0:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Usage in Anthropic's terms, with cached tokens and newly retained tokens reported separately."""
        usage = self._generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        minutes, hour = self._generation.newly_retained()
        return {
            "input_tokens": usage["prompt_tokens"] - cached - minutes - hour,
            "cache_creation_input_tokens": minutes + hour,
            "cache_read_input_tokens": cached,
            "cache_creation": {"ephemeral_5m_input_tokens": minutes, "ephemeral_1h_input_tokens": hour},
            "output_tokens": usage["completion_tokens"] if self._max_tokens else 0,
        }


def _event(fields: dict[str, Any]) -> bytes:
    return event(orjson.dumps(fields), fields["type"].encode())


def partial_input(arguments: str) -> dict[str, Any]:
    """The input of a call, possibly incomplete because the answer ended early."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
