"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.server.answer import Answer
from weft.server.choice import Choice, Piece
from weft.server.generate import Generation, Prompt, output_limit
from weft.server.logprobs import chat_logprobs, prompt_logprobs
from weft.server.protocol import ChatBody
from weft.server.routing import JsonRoute, ServiceOf
from weft.server.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Answer a conversation")
async def chat_completions(body: ChatBody, request: Request, service: ServiceOf) -> Response:
    engine = service.engine
    model = service.model_name(body.model)
    body.check()
    service.check_ids(body.stop_token_ids, "stop_token_ids")
    service.check_ids(list(body.logit_bias), "logit_bias")
    ids = await service.encode_chat(body.messages)
    params = body.sampling(
        max_tokens=output_limit(service, body.output_limit, None, len(ids), "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    scope = request.scope
    generation = Generation(
        service, body, [Prompt(ids)], [params], id=scope["weft.request_id"], arrival=scope["weft.arrival"]
    )
    return Answer(generation, ChatShape(engine.tokenizer, body), model, int(time.time()))


class ChatShape:
    """Choices of the chat endpoint."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, body: ChatBody) -> None:
        self._tokenizer = tokenizer
        self._body = body

    def first_chunks(self, choice: Choice) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return self._choice(choice, piece, "delta", {"content": piece.text})

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(choice, piece, "message", message)

    def extras(self, generation: Generation) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self._body.return_token_ids:
            out["prompt_token_ids"] = generation.prompts[0].ids
        if (top := self._body.prompt_logprobs) is not None:
            out["prompt_logprobs"] = prompt_logprobs(self._tokenizer, generation.choices[0].prompt_logprobs, top)
        return out

    def _choice(self, choice: Choice, piece: Piece, name: str, content: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {
            "index": choice.index,
            name: content,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs:
            out["logprobs"] = chat_logprobs(self._tokenizer, piece.logprobs, self._body.top_logprobs or 0)
        if self._body.return_token_ids:
            out["token_ids"] = piece.token_ids
        return out
