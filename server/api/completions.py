"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.engine.wire.messages import Retention
from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.choices import Choices
from weft.server.api.constraint import compile_grammar
from weft.server.api.generate import Generation, Prompt, output_limit
from weft.server.api.protocol import CompletionBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.errors import bad_request
from weft.server.text.logprobs import CompletionLogprobs, prompt_logprobs
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.tools import marker_of

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", summary="Continue a prompt", responses=STREAMED)
async def completions(body: CompletionBody, request: Request, service: ServiceOf) -> Response:
    service = service.for_model(body.model)
    body.check()
    await service.enter(body.model, request.scope)
    loaded, model = service.loaded, service.name(body.model)
    loaded.text.check_sampled_ids(body)
    prompts = await prompts_of(service, body)
    scored = body.logprobs if body.echo else None
    asked = [k for k in (scored, body.prompt_logprobs, 0 if body.max_tokens == 0 else None) if k is not None]
    grammar = await compile_grammar(body.constraint(marker_of(loaded.tokenizer)), request, service)
    params = [
        body.sampling(
            max_tokens=output_limit(service, body.max_tokens, DEFAULT_MAX_TOKENS, len(prompt.token_ids), "prompt"),
            logprobs=body.logprobs,
            prompt_logprobs=max(asked, default=None),
            grammar=grammar,
        )
        for prompt in prompts
    ]
    generation = Generation(service, body, prompts, params, request.scope, grammar=grammar)
    shape = CompletionShape(loaded.tokenizer, body, prompts)
    return Answer(generation, Choices(generation, shape, model, int(time.time())))


async def prompts_of(service: Service, body: CompletionBody) -> list[Prompt]:
    """The prompts, tokenized. Raises `ApiError`."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    truncation = body.truncation(service.loaded.ready.max_model_len, body.max_tokens)
    if texts:
        special = body.add_special_tokens is not False
        ids = await service.loaded.text.encode(texts, add_special_tokens=special, param="prompt", truncation=truncation)
        prompts = [Prompt(i, text if truncation is None else None) for i, text in zip(ids, texts, strict=True)]
    else:
        id_lists = [prompt for prompt in body.prompt if isinstance(prompt, list)]
        prompts = [Prompt(ids if truncation is None else truncation.ids(ids)) for ids in id_lists]
        for prompt in prompts:
            service.loaded.text.check_ids(prompt.token_ids, "prompt")
    if not all(prompt.token_ids for prompt in prompts):
        raise bad_request("prompt: must have at least one token.", "prompt")
    if seconds := body.kept_seconds:
        prompts = [replace(prompt, retention=(Retention(len(prompt.token_ids), seconds),)) for prompt in prompts]
    return prompts


class CompletionShape:
    """The shape of the completions endpoint's choices."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer, body: CompletionBody, prompts: Sequence[Prompt]) -> None:
        self._tokenizer = tokenizer
        self._name = body.namer(tokenizer)
        self._body = body
        self._prompts = prompts
        self._echo_length: dict[int, int] = {}
        """Characters of echoed prompt before each choice's text, for choices that have started."""

    @property
    def plain(self) -> bool:
        return self._body.logprobs is None and not self._body.return_token_ids

    def first_chunks(self, _: Choice) -> list[dict[str, Any]]:
        return []

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        prompt = self._prompts[choice.prompt]
        first = choice.index not in self._echo_length
        echo = self._echo(prompt) if first and self._body.echo else ""
        if first:
            self._echo_length[choice.index] = len(echo)
        out: dict[str, Any] = {
            "index": choice.index,
            "text": echo + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs is not None:
            out["logprobs"] = self._logprobs(choice, piece, first).as_dict()
        if self._body.return_token_ids:
            out["token_ids"] = piece.token_ids
            if first:
                out["prompt_token_ids"] = prompt.token_ids
        return out

    def passes(self, _choice: Choice, _token_id: int, _text: str) -> bool:
        return False

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        out = self.chunk(choice, piece)
        if (top := self._body.prompt_logprobs) is not None:
            out["prompt_logprobs"] = prompt_logprobs(self._tokenizer.token_text, choice.prompt_logprobs, top)
        return out

    def extras(self, _: Generation) -> dict[str, Any]:
        return {}

    def _echo(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)

    def _logprobs(self, choice: Choice, piece: Piece, first: bool) -> CompletionLogprobs:
        """Arrays for the piece's tokens. With `echo`, the first piece starts with the prompt's tokens."""
        out = CompletionLogprobs(self._name, self._body.logprobs or 0)
        if first and self._body.echo:
            detokenizer, offset = self._tokenizer.detokenizer(), 0
            entries = [None, *choice.prompt_logprobs]
            for token_id, entry in zip(self._prompts[choice.prompt].token_ids, entries, strict=True):
                out.add(token_id, entry, offset)
                offset += len(detokenizer.feed(token_id))
        base = self._echo_length[choice.index]
        for token_id, entry, at in zip(piece.token_ids, piece.logprobs, piece.offsets, strict=True):
            out.add(token_id, entry, base + at)
        return out
