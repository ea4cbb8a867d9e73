"""Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and what describes the models."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from starlette.responses import JSONResponse

from weft import __version__
from weft.engine.config import GGUF_INDEX
from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.completions import begin_completion
from weft.server.api.embeddings import EmbeddingBody, Embeddings, begin_embeddings
from weft.server.api.events import MARK, Dialect
from weft.server.api.generate import Generation
from weft.server.api.messages import partial_input
from weft.server.api.ollama_protocol import (
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    GeneratingBody,
    OllamaChatBody,
    OllamaError,
    ShowBody,
)
from weft.server.api.protocol import ChatBody, CompletionBody
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.api.turn import begin_turn
from weft.server.api.turn_parser import TurnParser
from weft.server.errors import ApiError, bad_request, renamed, translate
from weft.server.observe.shared_state import SleepState
from weft.server.text.logprobs import chat_logprobs
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.stream import Call
from weft.server.tools.tool_parsers import reasoning_format, tool_format

VERSION = "0.13.0"
"""The version of Ollama with this API. Clients check it."""

LATEST = ":latest"
FOREVER = "9999-12-31T23:59:59Z"

_ERRORS: dict[int | str, dict[str, Any]] = {kind: {"model": OllamaError} for kind in ("4XX", "5XX")}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}}, **_ERRORS}


class OllamaRoute(JsonRoute):
    """Ollama's documentation sends JSON without saying so. This is safe unless a browser does: a page of another site
    could send a form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def any_type_handler(request: Request) -> Response:
            names = {name for name, _ in request.scope["headers"]}
            if not names & {b"origin", b"sec-fetch-site"}:
                kept = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*kept, (b"content-type", b"application/json")]
            return await handler(Request(request.scope, request.receive))

        return any_type_handler


router = APIRouter(route_class=OllamaRoute)


@router.post("/api/chat", summary="Answer a conversation, in Ollama's format", responses=_STREAMED)
async def ollama_chat(body: OllamaChatBody, request: Request, service: ServiceOf) -> Response:
    """Without messages, only wake the model."""
    if not body.messages:
        return await _wake(body, request, service, {"message": {"role": "assistant", "content": ""}})
    return await _turn(body, body.as_chat(_served(service, body.model)), request, service, _message)


@router.post("/api/generate", summary="Answer a prompt, in Ollama's format", responses=_STREAMED)
async def ollama_generate(body: GenerateBody, request: Request, service: ServiceOf) -> Response:
    """Without a prompt, only wake the model. A model without a chat template continues the prompt, as with `raw`."""
    if not body.prompt:
        return await _wake(body, request, service, {"response": ""})
    model = _served(service, body.model)
    chosen = await service.enter(model, request.scope)
    if chosen.loaded.tokenizer.has_chat_template and not body.raw:
        return await _turn(body, body.as_chat(model), request, service, _response)
    completion = _checked(CompletionBody, body.as_completion(model))
    completion.check()
    generation = await begin_completion(completion, request, chosen, default_limit=body.options.limit)
    body.options.check_context(chosen.loaded.ready.max_model_len)
    parser = TurnParser(None, forced=False, parallel=True, named=False)
    return Answer(generation, OllamaDialect(generation, parser, body, _response))


async def _turn(
    body: GeneratingBody, fields: dict[str, Any], request: Request, service: Service, show: Show
) -> Response:
    chat = _checked(ChatBody, fields)
    if body.think:
        chosen = await service.enter(chat.model, request.scope)
        if reasoning_format(chosen.config.reasoning_parser, chosen.loaded.tokenizer) is None:
            raise bad_request(f'"{body.model}" does not support thinking', "think")
    try:
        turn = await begin_turn(chat, request, service, default_limit=body.options.limit)
    except ApiError as error:
        raise renamed(error, "response_format", "format") from None
    body.options.check_context(turn.generation.service.loaded.ready.max_model_len)
    return Answer(turn.generation, OllamaDialect(turn.generation, turn.parser, body, show))


def _checked(kind: type[Any], fields: dict[str, Any]) -> Any:
    """A body of another API. Raises `ApiError`."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise translate(error) from None


async def _wake(body: GeneratingBody, request: Request, service: Service, empty: dict[str, Any]) -> Response:
    chosen = await service.enter(_served(service, body.model), request.scope, task=None)
    _ = chosen.loaded  # raises the reason
    answer = {"model": body.model, "created_at": _now(), **empty, "done_reason": "load", "done": True}
    return Response(orjson.dumps(answer) + b"\n", media_type=f"application/{'x-ndjson' if body.stream else 'json'}")


Show = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""The fields of an answer from its thinking, text and calls."""


def _message(thinking: str, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    more = {name: value for name, value in (("thinking", thinking), ("tool_calls", calls)) if value}
    return {"message": {"role": "assistant", "content": text, **more}}


def _response(thinking: str, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    del calls  # `/api/generate` has no tools
    return {"response": text, **({"thinking": thinking} if thinking else {})}


class OllamaDialect(Dialect):
    """Writes an answer as a JSON object, or as one per line. A call comes when it is complete."""

    content_type = b"application/x-ndjson"

    def __init__(self, generation: Generation, parser: TurnParser, body: GeneratingBody, show: Show) -> None:
        self._generation, self._parser, self._show = generation, parser, show
        self._tokenizer: Tokenizer = generation.service.loaded.tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None  # alternatives per token
        self._head = {"model": body.model, "created_at": _now()}
        self._calls: list[Call] = []  # the calls that may still be incomplete
        self._reason: str | None = None
        self._template: tuple[bytes, bytes] | None = None
        self.keepalive = self._line(show("", "", []))

    # -- plain

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        piece, choice = wholes[0], self._generation.choices[0]
        parts = self._parser.feed(choice, piece)
        shown = self._show(parts.reasoning, parts.text, [_call(call) for call in parts.calls])
        return orjson.dumps({**self._head, **shown, **self._end(piece.finish_reason), **self._logprobs(piece)})

    # -- streamed

    @property
    def plain(self) -> bool:
        return self._parser.plain and self._top is None

    def events(self, choice: Choice, piece: Piece) -> bytes:
        parts = self._parser.feed(choice, piece)
        self._reason = piece.finish_reason
        complete = self._complete(parts.calls, ended=piece.finish_reason is not None)
        logprobs = self._logprobs(piece)
        if not (parts.reasoning or parts.text or complete or logprobs.get("logprobs")):
            return b""
        return self._line({**self._show(parts.reasoning, parts.text, [_call(call) for call in complete]), **logprobs})

    def token_event(self, choice: Choice, token_id: int, text: str) -> bytes | None:
        if self._top is not None or self._calls or not self._parser.passes(choice, token_id, text):
            return None
        if not text:
            return b""
        if self._template is None:
            before, _, after = self._line(self._show("", MARK, [])).partition(orjson.dumps(MARK))
            self._template = before, after
        return self._template[0] + orjson.dumps(text) + self._template[1]

    async def end(self) -> bytes:
        return self._line({**self._show("", "", []), **self._end(self._reason)})

    async def failed(self, error: ApiError) -> bytes:
        return orjson.dumps({"error": error.message}) + b"\n"

    def _line(self, fields: dict[str, Any]) -> bytes:
        return orjson.dumps({**self._head, "done": False, **fields}) + b"\n"

    def _complete(self, deltas: Sequence[Call], *, ended: bool) -> list[Call]:
        """Add deltas to the open calls, and return those that are complete now."""
        for delta in deltas:
            if self._calls and self._calls[-1].index == delta.index:
                self._calls[-1] = replace(self._calls[-1], arguments=self._calls[-1].arguments + delta.arguments)
            else:
                self._calls.append(delta)
        complete = self._calls if ended else self._calls[:-1]
        self._calls = self._calls[len(complete) :]
        return complete

    # -- both

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if self._top is None:
            return {}
        names, data = self._tokenizer.token_text, self._tokenizer.token_bytes
        return {"logprobs": chat_logprobs(names, data, piece.logprobs, self._top)["content"]}

    def _end(self, reason: str | None) -> dict[str, Any]:
        """The last fields of an answer, with its durations in nanoseconds."""
        generation, choice = self._generation, self._generation.choices[0]
        usage, first = generation.usage(), choice.first_token_at or generation.arrival
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int(1e9 * (time.perf_counter() - generation.arrival)),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int(1e9 * (first - generation.arrival)),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int(1e9 * max(0.0, choice.last_token_at - first)),
        }


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": partial_input(call.arguments)}}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _served(service: Service, name: str) -> str:
    """The served name for a name that may have the default tag. Raises `ApiError` 404 for unknown names."""
    try:
        service.for_model(name)
    except ApiError:
        name = name.removesuffix(LATEST)
        service.for_model(name)
    return name


# -- embeddings


@router.post("/api/embed", summary="Embed texts, in Ollama's format", responses=_ERRORS)
async def ollama_embed(body: EmbedBody, request: Request, service: ServiceOf) -> Response:
    if not body.input:
        return JSONResponse({"model": body.model, "embeddings": []})
    fields: dict[str, Any] = {"input": body.input, "dimensions": body.dimensions}
    if body.truncate:
        fields["truncate_prompt_tokens"] = -1
    return await _embed(body, fields, request, service, OllamaEmbeddings)


@router.post("/api/embeddings", summary="Embed one text, in Ollama's former format", responses=_ERRORS)
async def ollama_embeddings(body: EmbeddingsBody, request: Request, service: ServiceOf) -> Response:
    fields = {"input": body.prompt, "truncate_prompt_tokens": -1}
    return await _embed(body, fields, request, service, OllamaEmbedding)


async def _embed(
    body: EmbedBody | EmbeddingsBody, fields: dict[str, Any], request: Request, service: Service,
    dialect: type[Embeddings],
) -> Response:  # fmt: skip
    body.options.fields()
    model = _served(service, body.model)
    chosen = await service.enter(model, request.scope, task="embed")
    body.options.check_context(chosen.loaded.ready.max_model_len)
    answer = _checked(EmbeddingBody, {**fields, "model": model})
    return await begin_embeddings(answer, request, service, dialect, body.model)


class OllamaEmbeddings(Embeddings):
    def _answer(self, vectors: list[Any]) -> dict[str, Any]:
        return {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": int(1e9 * (time.perf_counter() - self._generation.arrival)),
            "load_duration": 0,
            "prompt_eval_count": self._generation.usage()["prompt_tokens"],
        }


class OllamaEmbedding(Embeddings):
    def _answer(self, vectors: list[Any]) -> dict[str, Any]:
        return {"embedding": vectors[0]}


# -- models


def _size(number: int) -> str:
    """A number of parameters in Ollama's form."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.2f}M"


def _entry(service: Service, name: str) -> dict[str, Any]:
    """A model in the lists of models. Models that were never loaded lack figures."""
    loaded, path = service.last_loaded, service.config.model_path
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    details: dict[str, Any] = {"parent_model": "", "format": "gguf" if (path / GGUF_INDEX).exists() else "safetensors"}
    size = 0
    if loaded is not None:
        ready, family = loaded.ready, _family(loaded.ready.model_type)
        size = ready.memory.weights
        details |= {"family": family, "families": [family], "parameter_size": _size(ready.num_parameters)}
        details["quantization_level"] = ready.dtype.upper()
    digest = sha256(str(path).encode()).hexdigest()
    return {"name": name, "model": name, "modified_at": created, "size": size, "digest": digest, "details": details}


def _family(model_type: str) -> str:
    return model_type.partition("For")[0].lower()


@router.get("/api/tags", summary="List the served models, in Ollama's format", responses=_ERRORS)
async def ollama_tags(service: ServiceOf) -> dict[str, Any]:
    return {"models": [_entry(each, name) for each in service.models for name in each.config.model_names]}


@router.get("/api/ps", summary="List the models that are awake, in Ollama's format", responses=_ERRORS)
async def ollama_ps(service: ServiceOf) -> dict[str, Any]:
    awake = [each for each in service.models if each.sleep_state is SleepState.AWAKE and each.last_loaded is not None]
    found = []
    for each in awake:
        ready = each.known.ready
        entry = _entry(each, each.config.model_names[0])
        del entry["modified_at"]
        vram = 0 if ready.device == "cpu" else entry["size"]
        found.append({**entry, "expires_at": FOREVER, "size_vram": vram, "context_length": ready.max_model_len})
    return {"models": found}


@router.post("/api/show", summary="Describe a model, in Ollama's format", responses=_ERRORS)
async def ollama_show(body: ShowBody, service: ServiceOf) -> dict[str, Any]:
    name = body.model or body.name
    if name is None:
        raise bad_request("model: This field is required", "model")
    for field in ("system", "template", "options"):
        if getattr(body, field):
            raise bad_request(f"{field} is not supported here.", field)
    chosen = service.for_model(_served(service, name))
    loaded = chosen.known
    entry, ready, tokenizer = _entry(chosen, name), loaded.ready, loaded.tokenizer
    family = _family(ready.model_type)
    named = {"generate": "completion", "embed": "embedding"}
    capabilities = [named[task] for task in loaded.tasks if task in named]
    if "generate" in ready.tasks and "embed" in loaded.tasks:
        capabilities.remove("embedding")  # Ollama's clients would take a chat model for an embedder
    if tokenizer.can_chat and tool_format(chosen.config.tool_call_parser, tokenizer) is not None:
        capabilities.append("tools")
    if reasoning_format(chosen.config.reasoning_parser, tokenizer) is not None:
        capabilities.append("thinking")
    return {
        "modelfile": f"FROM {chosen.config.model_names[0]}",
        "parameters": "",
        "template": tokenizer.chat_template or "",
        "details": entry["details"],
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": ready.num_parameters,
            f"{family}.context_length": ready.max_model_len,
            f"{family}.embedding_length": ready.hidden_size,
            f"{family}.vocab_size": ready.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": entry["modified_at"],
    }


@router.get("/api/version", summary="Return the version of Ollama's API", responses=_ERRORS)
async def ollama_version() -> dict[str, str]:
    return {"version": VERSION, "weft": __version__}
