"""`POST /v1/embeddings`: pooled hidden states, with the same queue, pages and prefix cache as other requests."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field
from starlette.types import Scope

from weft.engine.errors import ModelError
from weft.engine.wire.sampling import Pooling, SamplingParams
from weft.server.api.answer import Answer
from weft.server.api.chat_message import Messages
from weft.server.api.chat_prompt import template_input
from weft.server.api.choice import Piece
from weft.server.api.events import Dialect
from weft.server.api.field_types import INT32, CacheKey, CacheSalt, Inputs, Priority, given
from weft.server.api.generate import Generation, Prompt
from weft.server.api.model_text import too_long
from weft.server.api.pooler import Pooler, read_pooler
from weft.server.api.protocol import REQUEST_ID, GenerationBody
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.bodies import Body
from weft.server.errors import ApiError, bad_request, clip
from weft.server.text.tokenizer import Side, Truncation
from weft.server.tools.template import TemplateBody

router = APIRouter(route_class=JsonRoute)


class PoolingFields(Body):
    """Fields of all requests for states instead of output."""

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32)
    """Truncate inputs to this many tokens; -1: to the context."""
    truncation_side: Side = "right"  # the side that is cut
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    prompt_cache_key: CacheKey | None = None
    user: str | None = None
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    include_energy: bool = False  # see `GenerationBody`


class EmbeddingBody(PoolingFields, TemplateBody):
    """Either `input`, or `messages`, which the chat template makes one input."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("input"), given("messages")]})
    endpoint_path: ClassVar[str] = "/v1/embeddings"

    input: Inputs | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = False
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=INT32)
    """Truncate embeddings to this many numbers and normalize them again, for models trained for it."""
    prompt_name: str | None = Field(None, max_length=256)
    """The model's prompt (`config_sentence_transformers.json`) to put before the texts."""
    normalize: bool = True
    """Scale embeddings to length 1."""
    add_special_tokens: bool | None = None
    """Default: true for `input`, false for messages, whose template adds its own."""

    def check(self) -> None:
        """Raises `ApiError`."""
        if (self.input is None) == (self.messages is None):
            raise bad_request("Give either input or messages.", "input")
        if self.messages is None:
            self.check_without_messages()
        self.check_template()


@router.post("/v1/embeddings", summary="Embed texts: the model's hidden states, pooled")
async def embeddings(body: EmbeddingBody, request: Request, service: ServiceOf) -> Response:
    return await begin_embeddings(body, request, service, Embeddings)


async def begin_embeddings(
    body: EmbeddingBody, request: Request, service: Service, dialect: type[Embeddings], model: str | None = None
) -> Answer:
    """The answer to a request, in a dialect. `model`: its name in the answer, instead of the body's."""
    service = await service.enter(body.model, request.scope, body.check, task="embed")
    model = service.name(model or body.model)
    pooler = await pooler_of(service)
    check_dimensions(body, pooler.width(service.loaded.ready.hidden_size))
    prompts = await prompts_of(service, body, pooler)
    generation = pooling_generation(service, body, prompts, pooler.pooling, request.scope)
    return Answer(generation, dialect(generation, body, pooler, model))


def check_dimensions(body: EmbeddingBody, width: int) -> None:
    """Raises `ApiError`."""
    if body.dimensions is not None and body.dimensions > width:
        raise bad_request(f"dimensions: this model's embeddings have only {width}.", "dimensions")


def pooling_generation(
    service: Service, body: PoolingFields, prompts: Sequence[Prompt], pooling: Pooling, scope: Scope
) -> Generation:
    """A request for pooled states of each prompt, without output."""
    params = SamplingParams(max_tokens=0, pooling=pooling)
    shared = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    return Generation(service, GenerationBody(**shared), prompts, [params] * len(prompts), scope)


_SHARED = set(GenerationBody.model_fields) & set(PoolingFields.model_fields)


async def pooler_of(service: Service) -> Pooler:
    """The model's pooler, read once. Raises `ApiError`."""
    loaded, config = service.loaded, service.config
    key = loaded.ready.model_id, loaded.tokenizer  # other weights after a restart
    if service.pooler is None or service.pooler[0] != key:
        ready, encoder = loaded.ready, "generate" not in loaded.ready.tasks
        read = partial(read_pooler, config.model_path, config.pooling, ready.hidden_size, encoder=encoder)
        try:
            pooler = await service.offload(read)
        except ModelError as error:
            raise ApiError(501, f"This model cannot embed: {error}.", code="pooling_not_supported") from None
        if pooler is None:
            raise ApiError(404, "Embeddings are disabled (--pooling none).", code="embeddings_off")
        service.pooler = key, pooler
    return service.pooler[1]


async def prompts_of(service: Service, body: EmbeddingBody, pooler: Pooler | None) -> list[Prompt]:
    """The prompts of the body's inputs, after the pooler's text. Raises `ApiError`."""
    limit = service.loaded.ready.max_model_len
    before, text = pooler.default if pooler is not None else "", service.loaded.text
    asked = limit if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    truncation = None if asked is None else Truncation(asked, body.truncation_side)
    if (name := body.prompt_name) is not None:
        named = pooler.prompts if pooler is not None else {}
        if name not in named:
            known = ", ".join(map(repr, named)) or "none"
            raise bad_request(f"prompt_name: there is no prompt {clip(name)!r}; known prompts: {known}.", "prompt_name")
        if body.input is None or not isinstance(body.input[0], str):
            raise bad_request("prompt_name needs texts, not token ids or messages.", "prompt_name")
        before = named[name]
    if body.input is not None:
        param, special = "input", body.add_special_tokens is not False
        inputs = [before + part if isinstance(part, str) else part for part in body.input]
        found = await text.encode_inputs(inputs, add_special_tokens=special, param=param, truncation=truncation)
    else:
        param = "messages"
        rendered = template_input(body, body.messages or [], body.tools, service)
        special = bool(body.add_special_tokens)
        found = [(await text.encode_chat(*rendered, add_special_tokens=special, truncation=truncation)).ids]
        if not found[0]:
            raise bad_request("messages: must have at least one token.", param)
    for i, ids in enumerate(found):
        if len(ids) > limit:
            raise too_long(limit, f"input {i} has {len(ids)} tokens", param)
    return [Prompt(ids) for ids in found]


class Embeddings(Dialect):
    """The dialect of embeddings: a list in the order of the inputs, never a stream."""

    def __init__(self, generation: Generation, body: EmbeddingBody, pooler: Pooler, model: str) -> None:
        self._generation, self._body, self._pooler, self._model = generation, body, pooler, model

    async def body(self, _wholes: Sequence[Piece]) -> bytes:
        return await self._generation.service.offload(self._write)

    def _write(self) -> bytes:
        body = self._body
        states = [choice.pooled for choice in self._generation.choices]
        assert all(state is not None for state in states)
        vectors = (
            self._pooler.finish(state, body.dimensions, normalize=body.normalize)
            for state in states
            if state is not None
        )
        code: Any = base64_of if body.encoding_format == "base64" else np.ascontiguousarray
        return orjson.dumps(self._answer([code(vector) for vector in vectors]), option=orjson.OPT_SERIALIZE_NUMPY)

    def _answer(self, vectors: list[Any]) -> dict[str, Any]:
        usage = self._generation.usage()
        del usage["completion_tokens"]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        head = {"id": self._generation.id, "object": "list", "created": int(time.time())}
        return {**head, "data": data, "model": self._model, "usage": usage}


def base64_of(vector: npt.NDArray[np.float32]) -> str:
    """Little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
