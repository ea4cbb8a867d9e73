"""`POST /v1/completions`."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.engine.wire.messages import Retention, TokenLogprobs
from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.choices import Choices
from weft.server.api.constraint import compile_grammar
from weft.server.api.generate import Generation, Prompt, output_limit
from weft.server.api.media.model_images import image_token_error
from weft.server.api.protocol import CompletionBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.api.turn_parser import bounded_thinking, thinking_marks
from weft.server.text.logprobs import completion_logprobs, prompt_logprobs
from weft.server.tools.tools import marker_of

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", summary="Continue a prompt", responses=STREAMED)
async def completions(body: CompletionBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope, body.check)
    generation = await begin_completion(body, request, service, default_limit=DEFAULT_MAX_TOKENS)
    return Answer(generation, CompletionChoices(generation, body, service.name(body.model)))


async def begin_completion(
    body: CompletionBody, request: Request, service: Service, prompts: list[Prompt] | None = None, *,
    default_limit: int | None,
) -> Generation:  # fmt: skip
    """From a checked body to a generation that is not submitted yet. Raises `ApiError`. `prompts`: replaces the body's.
    `default_limit`: output tokens if the body sets no limit; None uses the rest of the context."""
    loaded = service.loaded
    loaded.text.check_sampled_ids(body)
    prompts = await prompts_of(service, body) if prompts is None else prompts
    scored = body.logprobs if body.echo else None
    asked = [k for k in (scored, body.prompt_logprobs, 0 if body.max_tokens == 0 else None) if k is not None]
    grammar = await compile_grammar(body.constraint(marker_of(loaded.tokenizer)), request, service)
    params = [
        bounded_thinking(
            body.sampling(
                max_tokens=output_limit(service, body.max_tokens, default_limit, len(prompt.token_ids), "prompt"),
                logprobs=body.logprobs,
                prompt_logprobs=max(asked, default=None),
                grammar=grammar,
            ),
            thinking_marks(service, prompt.token_ids) if body.max_thinking_tokens is not None else None,
            body.max_thinking_tokens,
            loaded.tokenizer,
            tools=False,
        )
        for prompt in prompts
    ]
    return Generation(service, body, prompts, params, request.scope, grammar=grammar)


async def prompts_of(service: Service, body: CompletionBody) -> list[Prompt]:
    """The prompts, tokenized. Raises `ApiError`."""
    truncation = body.truncation(service.loaded.ready.max_model_len, body.max_tokens)
    special = body.add_special_tokens is not False
    encode, seconds = service.loaded.text.encode_inputs, body.kept_seconds
    found = await encode(body.prompt, add_special_tokens=special, param="prompt", truncation=truncation)
    images = service.loaded.images
    if images is not None and any(not images.rule.token_ids.isdisjoint(ids) for ids in found):
        raise image_token_error("prompt")
    prompts = []
    for ids, given in zip(found, body.prompt, strict=True):
        text = given if isinstance(given, str) and truncation is None else None
        prompts.append(Prompt(ids, text, (Retention(len(ids), seconds),) if seconds else ()))
    return prompts


class CompletionChoices(Choices):
    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, generation: Generation, body: CompletionBody, model: str) -> None:
        super().__init__(generation, model, int(time.time()))
        self._tokenizer = generation.service.loaded.tokenizer
        self._name = body.namer(self._tokenizer)
        self._body = body
        self._prompts = generation.prompts
        self._echo_length: dict[int, int] = {}
        """Characters of echoed prompt before each choice's text, for choices that have started."""

    @property
    def _uniform(self) -> bool:
        return self._body.logprobs is None and not self._body.return_token_ids

    def _chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        prompt = self._prompts[choice.prompt]
        first = choice.index not in self._echo_length
        echo = ""
        if first:
            if self._body.echo:
                echo = prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)
            self._echo_length[choice.index] = len(echo)
        out: dict[str, Any] = {
            "index": choice.index,
            "text": echo + piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._body.logprobs is not None:
            out["logprobs"] = self._logprobs(choice, piece, first)
        if self._body.return_token_ids:
            out["token_ids"] = piece.token_ids
            if first:
                out["prompt_token_ids"] = prompt.token_ids
        return out

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        shown = prompt_logprobs(self._tokenizer.token_text, choice.prompt_logprobs, self._body.prompt_logprobs)
        return {"token_ids": None, "prompt_token_ids": None, **self._chunk(choice, piece), "prompt_logprobs": shown}

    def _logprobs(self, choice: Choice, piece: Piece, first: bool) -> dict[str, Any]:
        """Arrays for the piece's tokens. With `echo`, the first piece starts with the prompt's tokens."""
        tokens: list[tuple[int, TokenLogprobs | None, int]] = []
        if first and self._body.echo:
            detokenizer, offset = self._tokenizer.detokenizer(), 0
            entries = [None, *choice.prompt_logprobs]
            for token_id, entry in zip(self._prompts[choice.prompt].token_ids, entries, strict=True):
                tokens.append((token_id, entry, offset))
                offset += len(detokenizer.feed(token_id))
        base = self._echo_length[choice.index]
        parallel = zip(piece.token_ids, piece.logprobs, piece.offsets, strict=True)
        tokens += [(token_id, entry, base + at) for token_id, entry, at in parallel]
        return completion_logprobs(self._name, tokens, self._body.shown_logprobs(self._body.logprobs))
