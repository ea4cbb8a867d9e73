"""`POST /v1/embeddings`: pooled hidden states, with the same queue, pages and prefix cache as other requests."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import Field

from weft.engine.errors import ModelError
from weft.engine.wire.sampling import SamplingParams
from weft.server.api.answer import Answer
from weft.server.api.choice import Piece
from weft.server.api.events import Dialect
from weft.server.api.field_types import INT32, CacheKey, CacheSalt, Inputs, Priority
from weft.server.api.generate import Generation, Prompt
from weft.server.api.model_text import too_long
from weft.server.api.protocol import REQUEST_ID, GenerationBody
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.bodies import Body
from weft.server.errors import ApiError, bad_request, clip
from weft.server.text.pooling import Pooler, read_pooler

router = APIRouter(route_class=JsonRoute)


class EmbeddingBody(Body):
    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=INT32)
    """Truncate embeddings to this many numbers and normalize them again, for models trained for it."""
    prompt_name: str | None = Field(None, max_length=256)
    """The model's prompt (`config_sentence_transformers.json`) to put before the texts."""
    add_special_tokens: bool = True
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    prompt_cache_key: CacheKey | None = None
    user: str | None = None
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    include_energy: bool = False  # see `GenerationBody`


@router.post("/v1/embeddings", summary="Embed texts: the model's hidden states, pooled")
async def embeddings(body: EmbeddingBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope)
    width = service.loaded.ready.hidden_size
    model = service.name(body.model)
    pooler = await _pooler(service)
    if body.dimensions is not None and body.dimensions > width:
        raise bad_request(f"dimensions: this model's embeddings have only {width}.", "dimensions")
    prompts = await _prompts(service, body, pooler)
    params = SamplingParams(max_tokens=0, pooling=pooler.pooling)
    shared = {name: getattr(body, name) for name in _SHARED if getattr(body, name) is not None}
    generation = Generation(service, GenerationBody(**shared), prompts, [params] * len(prompts), request.scope)
    return Answer(generation, Embeddings(generation, body, pooler, model))


_SHARED = set(GenerationBody.model_fields) & set(EmbeddingBody.model_fields)


async def _pooler(service: Service) -> Pooler:
    """The model's pooler. Raises `ApiError`."""
    config = service.config
    try:
        pooler = await service.offload(partial(read_pooler, config.model_path, config.pooling))
    except ModelError as error:
        raise ApiError(501, f"This model cannot embed: {error}.", code="pooling_not_supported") from None
    if pooler is None:
        raise ApiError(404, "Embeddings are disabled (--pooling none).", code="embeddings_off")
    return pooler


async def _prompts(service: Service, body: EmbeddingBody, pooler: Pooler) -> list[Prompt]:
    """The inputs, tokenized. Raises `ApiError`."""
    limit = service.loaded.ready.max_model_len
    texts = [text for text in body.input if isinstance(text, str)]
    before = pooler.default
    if (name := body.prompt_name) is not None:
        if name not in pooler.prompts:
            known = ", ".join(map(repr, pooler.prompts)) or "none"
            raise bad_request(f"prompt_name: there is no prompt {clip(name)!r}; known prompts: {known}.", "prompt_name")
        if not texts:
            raise bad_request("prompt_name needs texts; the input has token ids.", "prompt_name")
        before = pooler.prompts[name]
    if texts:
        given = [before + text for text in texts]
        ids = await service.loaded.text.encode(given, add_special_tokens=body.add_special_tokens, param="input")
    else:
        ids = [part for part in body.input if isinstance(part, list)]
        for part in ids:
            service.loaded.text.check_ids(part, "input")
    for i, part in enumerate(ids):
        if not part:
            raise bad_request("input: must have at least one token.", "input")
        if len(part) > limit:
            raise too_long(limit, f"input {i} has {len(part)} tokens", "input")
    return [Prompt(part) for part in ids]


class Embeddings(Dialect):
    """The dialect of embeddings: a list in the order of the inputs, never a stream."""

    def __init__(self, generation: Generation, body: EmbeddingBody, pooler: Pooler, model: str) -> None:
        self._generation, self._body, self._pooler, self._model = generation, body, pooler, model

    async def body(self, _wholes: Sequence[Piece]) -> bytes:
        return await self._generation.service.offload(self._write)

    def _write(self) -> bytes:
        body, usage = self._body, self._generation.usage()
        del usage["completion_tokens"]
        states = [choice.pooled for choice in self._generation.choices]
        assert all(state is not None for state in states)
        vectors = (self._pooler.finish(state, body.dimensions) for state in states if state is not None)
        code: Any = _base64 if body.encoding_format == "base64" else np.ascontiguousarray
        data = [{"object": "embedding", "index": i, "embedding": code(v)} for i, v in enumerate(vectors)]
        answer = {"object": "list", "data": data, "model": self._model, "usage": usage}
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
