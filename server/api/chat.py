"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.choices import Choices
from weft.server.api.protocol import ChatBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.turn import Turn, begin_turn
from weft.server.text.logprobs import chat_logprobs, prompt_logprobs
from weft.server.tools.stream import Call

REASONING = ("reasoning_content", "reasoning")
"""The fields that carry thinking: DeepSeek's name and that of newer vLLM versions."""

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAMED)
async def chat_completions(body: ChatBody, request: Request, service: ServiceOf) -> Response:
    turn = await begin_turn(body, request, service)
    return Answer(turn.generation, ChatChoices(turn))


class ChatChoices(Choices):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn.generation, turn.model, turn.created)
        self._tokenizer = turn.tokenizer
        self._token_name = turn.body.namer(turn.tokenizer)
        self._body = body = turn.body
        self._parser = turn.parser
        last = body.messages[-1]
        self._echo = (last.content or "") if body.echo and last.role == "assistant" else ""
        self._bare = not body.logprobs and not body.return_token_ids

    @property
    def _uniform(self) -> bool:
        return self._parser.plain and self._bare

    def _passes(self, choice: Choice, token_id: int, text: str) -> bool:
        return self._bare and self._parser.passes(choice, token_id, text)

    def _first_chunks(self, choice: Choice) -> list[dict[str, Any]]:
        deltas = [{"role": "assistant", "content": ""}, *([{"content": self._echo}] if self._echo else [])]
        return [{"index": choice.index, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas]

    def _chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        if self._parser.plain:
            return self._choice(choice, piece, "delta", {"content": piece.text})
        parts = self._parser.feed(choice, piece)
        delta: dict[str, Any] = {"content": parts.text} if parts.text else {}
        if parts.reasoning:
            delta |= dict.fromkeys(REASONING, parts.reasoning)
        if parts.calls:
            delta["tool_calls"] = [{"index": call.index, **self._call(call)} for call in parts.calls]
        if not delta and piece.finish_reason is None and self._bare:
            return None  # held back: the text could become a call
        return self._choice(choice, piece, "delta", delta)

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        parts = self._parser.feed(choice, piece)
        content = self._echo + parts.text if parts.text or not parts.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parts.reasoning:
            message |= dict.fromkeys(REASONING, parts.reasoning)
        if parts.calls:
            message["tool_calls"] = [self._call(call) for call in parts.calls]
        return {"token_ids": None, **self._choice(choice, piece, "message", message)}

    def _call(self, call: Call) -> dict[str, Any]:
        """A call, or a delta of one, in OpenAI's form."""
        if call.id is None:
            return {"function": {"arguments": call.arguments}}
        if self._parser.is_custom(call):
            return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _extras(self) -> dict[str, Any]:
        out: dict[str, Any] = {} if self._body.stream else {"prompt_token_ids": None}
        if self._body.return_token_ids:
            out["prompt_token_ids"] = self._generation.prompts[0].token_ids
        if not self._body.stream:
            entries = self._generation.choices[0].prompt_logprobs
            out["prompt_logprobs"] = prompt_logprobs(self._tokenizer.token_text, entries, self._body.prompt_logprobs)
        return out

    def _choice(self, choice: Choice, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice.index,
            name: content,
            "logprobs": None,
            "finish_reason": self._parser.finish_reason(choice, piece),
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs:
            out["logprobs"] = chat_logprobs(
                self._token_name,
                self._tokenizer.token_bytes,
                piece.logprobs,
                self._body.shown_logprobs(self._body.top_logprobs),
                own=bool(self._body.logprob_token_ids),
            )
        if self._body.return_token_ids:
            out["token_ids"] = piece.token_ids
        return out
