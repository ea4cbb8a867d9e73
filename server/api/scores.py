"""`/rerank`, `/score`, `/classify` and `/pooling`: scores of pairs of texts, classes and states of texts.

Fields are vLLM's, with those of Cohere and Jina. `/rerank` also takes the form of text-embeddings-inference (TEI),
which has `texts`. Pairs and texts are requests like any others, with the same queue, limits and fairness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema

from weft.engine.errors import ModelError
from weft.engine.wire.sampling import Pooling
from weft.server.api.answer import Answer
from weft.server.api.choice import Piece
from weft.server.api.embeddings import (
    EmbeddingBody,
    Embeddings,
    PoolingFields,
    base64_of,
    begin_embeddings,
    check_dimensions,
    pooler_of,
    pooling_generation,
    prompts_of,
)
from weft.server.api.events import Dialect
from weft.server.api.field_types import INT32, MAX_INPUTS, given
from weft.server.api.generate import Generation, Prompt
from weft.server.api.model_text import PairLimits, too_long
from weft.server.api.pooler import Pooler
from weft.server.api.routing import JsonRoute, ServiceOf
from weft.server.api.scorer import INSTRUCTION, Scorer, read_scorer
from weft.server.api.service import Service
from weft.server.errors import ApiError, bad_request
from weft.server.text.tokenizer import Truncation

router = APIRouter(route_class=JsonRoute)
COHERE_TOKENS = 4096  # Cohere's default of max_tokens_per_doc
_NONEMPTY = {"type": "string", "minLength": 1}


def _parse_documents(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one text, or of objects with a text")
    if len(value) > MAX_INPUTS:
        raise ValueError(f"must have at most {MAX_INPUTS} entries, not {len(value)}")
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("entries must be texts, or objects with a text: this server takes text only")
    return texts


def _parse_texts(value: Any) -> list[str]:
    return _parse_documents([value] if isinstance(value, str) else value)


_DOCUMENT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_DOCUMENTS = {
    "type": "array", "items": {"anyOf": [{"type": "string"}, _DOCUMENT]}, "minItems": 1, "maxItems": MAX_INPUTS,
}  # fmt: skip
Documents = Annotated[list[str], PlainValidator(_parse_documents), WithJsonSchema(_DOCUMENTS)]
Texts = Annotated[list[str], PlainValidator(_parse_texts), WithJsonSchema({"anyOf": [{"type": "string"}, _DOCUMENTS]})]


class PairFields(PoolingFields):
    """Fields of requests that score pairs."""

    use_activation: bool = True
    """Scores between 0 and 1; false: the model's logits."""
    max_tokens_per_doc: int | None = Field(None, ge=0, le=INT32)
    """Truncate documents to this many tokens, and to what fits the model; 0: do not truncate."""
    instruction: str | None = Field(None, max_length=4096)
    """The instruction in the prompt of a reranker that has one, such as Qwen3-Reranker."""

    def limits(self, default: int | None = None) -> PairLimits:
        """How to truncate. default: of `max_tokens_per_doc`."""
        document = default if self.max_tokens_per_doc is None else self.max_tokens_per_doc
        return PairLimits(self.truncate_prompt_tokens, document or None, self.truncation_side)


class RerankBody(PairFields):
    """Either `documents`, or TEI's `texts`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("documents"), given("texts")]})
    endpoint_path: ClassVar[str] = "/v1/rerank"

    query: str = Field(min_length=1)
    documents: Documents | None = None
    top_n: int | None = Field(None, ge=0, le=INT32)
    """Return only the best documents; 0: all."""
    return_documents: bool = True
    texts: Documents | None = None  # TEI's documents, and its fields
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool = False
    truncation_direction: Literal["Left", "Right"] = "Right"

    def check(self) -> None:
        """Raises `ApiError`."""
        if (self.documents is None) == (self.texts is None):
            raise bad_request("Give either documents or texts.", "documents")
        if self.texts is None:
            return
        if self.raw_scores:
            self.use_activation = False
        if self.truncate:
            self.truncate_prompt_tokens = self.truncate_prompt_tokens or -1
        if self.truncation_direction == "Left":
            self.truncation_side = "left"


class ScoreBody(PairFields):
    endpoint_path: ClassVar[str] = "/v1/score"

    text_1: Texts
    text_2: Texts

    def pairs(self) -> list[tuple[str, str]]:
        """One text with each of the others, or each with its counterpart. Raises `ApiError`."""
        first, second = self.text_1, self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise bad_request("text_1 must have one text, or as many as text_2.", "text_1")
        return list(zip(first, second, strict=True))

    def check(self) -> None:
        """Raises `ApiError`."""
        self.pairs()


class ClassifyBody(EmbeddingBody):
    endpoint_path: ClassVar[str] = "/classify"

    use_activation: bool = True
    """Probabilities of the classes; false: the model's logits."""


class PoolingBody(EmbeddingBody):
    endpoint_path: ClassVar[str] = "/pooling"

    task: Literal["embed", "token_embed", "classify"] | None = None
    """Default: the states of all tokens (token_embed) if the model is an encoder, else what it can do."""
    use_activation: bool = True
    """False: neither normalize nor activate."""

    def check(self) -> None:
        """Raises `ApiError`."""
        super().check()
        self.normalize &= self.use_activation


@router.post("/rerank", summary="Order documents by relevance, in the format of vLLM, Cohere, Jina or TEI")
@router.post("/v1/rerank", name="rerank_v1", summary="Order documents by relevance to a query")
@router.post("/v2/rerank", name="rerank_v2", summary="Order documents by relevance, in Cohere's format")
async def rerank(body: RerankBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope, body.check, task="score")
    documents = body.documents if body.documents is not None else body.texts or []
    limits = body.limits(COHERE_TOKENS if request.scope["path"] == "/v2/rerank" else None)
    pairs = [(body.query, document) for document in documents]
    kind = Reranking if body.texts is None else TeiReranking
    return await _begin_scores(service, body, pairs, limits, request, partial(kind, documents=documents))


@router.post("/score", summary="As /v1/score")
@router.post("/v1/score", name="score_v1", summary="Score pairs of texts")
async def score(body: ScoreBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope, body.check, task="score")
    return await _begin_scores(service, body, body.pairs(), body.limits(), request, Scores)


async def _begin_scores(
    service: Service, body: Any, pairs: list[tuple[str, str]], limits: PairLimits, request: Request,
    dialect: Callable[..., Scores],
) -> Answer:  # fmt: skip
    scorer = await _scorer(service)
    if body.instruction is not None and scorer.prompt == "pair":
        raise bad_request("instruction: this model's prompt has no instruction.", "instruction")
    pooler = await pooler_of(service) if scorer.activation == "cosine" else None
    prompts, places = await _pair_prompts(service, body, scorer, pairs, limits)
    pooling = scorer.pooling if pooler is None else pooler.pooling
    generation = pooling_generation(service, body, prompts, pooling, request.scope)
    return Answer(generation, dialect(generation, body, scorer, places, pooler=pooler))


async def _pair_prompts(
    service: Service, body: Any, scorer: Scorer, pairs: list[tuple[str, str]], limits: PairLimits
) -> tuple[list[Prompt], list[tuple[int, int]]]:
    """The prompts of pairs, and the indices of each pair's; with a cross-encoder twice the same. Raises `ApiError`."""
    text, ready = service.loaded.text, service.loaded.ready
    if scorer.activation == "cosine":
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        limit = limits.total(ready.max_model_len)
        truncation = None if limit is None else Truncation(limit, limits.side)
        found = await text.encode(texts, add_special_tokens=True, param="documents", truncation=truncation)
        number = {each: i for i, each in enumerate(texts)}
        for ids in found:
            if len(ids) > ready.max_model_len:
                raise too_long(ready.max_model_len, f"a text has {len(ids)} tokens", "documents")
        return [Prompt(ids) for ids in found], [(number[a], number[b]) for a, b in pairs]
    encoded = await text.encode_pairs(pairs, limits, scorer.prompt, body.instruction or INSTRUCTION)
    return [Prompt(ids, segment=segment) for ids, segment in encoded], [(i, i) for i in range(len(pairs))]


async def _scorer(service: Service) -> Scorer:
    """The model's scorer, read once. Raises `ApiError`."""
    loaded, config = service.loaded, service.config
    key = loaded.ready.model_id, loaded.ready.labels, loaded.tokenizer  # other weights after a restart
    if service.scorer is None or service.scorer[0] != key:
        read = partial(read_scorer, config.model_path, loaded.ready, loaded.tokenizer, config.classifier_from_token)
        try:
            service.scorer = key, await service.offload(read)
        except ModelError as error:
            raise ApiError(501, f"This model cannot score: {error}.", code="scores_not_supported") from None
    return service.scorer[1]


class Scores(Dialect):
    """The dialect of `/score`: a list in the order of the pairs."""

    def __init__(
        self, generation: Generation, body: Any, scorer: Scorer, places: list[tuple[int, int]],
        pooler: Pooler | None = None,
    ) -> None:  # fmt: skip
        self._generation, self._body, self._scorer, self._places = generation, body, scorer, places
        self._pooler = pooler  # of embeddings to compare
        self._model = generation.service.name(body.model)

    async def body(self, _wholes: Sequence[Piece]) -> bytes:
        return await self._generation.service.offload(lambda: orjson.dumps(self._answer(self._scores())))

    def _scores(self) -> list[float]:
        states = [choice.pooled or b"" for choice in self._generation.choices]
        if self._pooler is not None:
            units = [self._pooler.finish(state, None).astype(np.float64) for state in states]
            return [float(units[a] @ units[b]) for a, b in self._places]
        activate = self._body.use_activation
        return [float(self._scorer.probabilities(state, activate=activate)[0]) for state in states]

    def _answer(self, scores: list[float]) -> Any:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        return {**_head(self), "data": data, "usage": usage_of(self._generation)}


def _head(dialect: Scores) -> dict[str, Any]:
    generation = dialect._generation
    return {"id": generation.id, "object": "list", "created": int(time.time()), "model": dialect._model}


def usage_of(generation: Generation) -> dict[str, Any]:
    """Token counts without those of output."""
    usage = generation.usage()
    del usage["completion_tokens"]
    return usage


class Reranking(Scores):
    """The dialect of vLLM, Cohere and Jina: the best first; equal scores in the order of the documents."""

    def __init__(self, *given: Any, documents: list[str], **more: Any) -> None:
        super().__init__(*given, **more)
        self._documents = documents

    def _best(self, scores: list[float]) -> list[int]:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        return order[: self._body.top_n or None]

    def _answer(self, scores: list[float]) -> Any:
        results = []
        for i in self._best(scores):
            document = {"document": {"text": self._documents[i]}} if self._body.return_documents else {}
            results.append({"index": i, **document, "relevance_score": scores[i]})
        usage = usage_of(self._generation)
        return {"id": self._generation.id, "model": self._model, "usage": usage, "results": results}


class TeiReranking(Reranking):
    """The dialect of TEI: a bare list."""

    def _answer(self, scores: list[float]) -> Any:
        text = self._documents if self._body.return_text else None
        return [
            {"index": i, "score": scores[i], **({} if text is None else {"text": text[i]})} for i in self._best(scores)
        ]


@router.post("/classify", summary="Classify texts")
async def classify(body: ClassifyBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope, body.check, task="classify")
    return await _begin_classes(service, body, request, Classes)


async def _begin_classes(service: Service, body: Any, request: Request, dialect: type[Classes]) -> Answer:
    scorer = await _scorer(service)
    prompts = await prompts_of(service, body, None)
    generation = pooling_generation(service, body, prompts, scorer.pooling, request.scope)
    return Answer(generation, dialect(generation, body, scorer, []))


class Classes(Scores):
    """The dialect of `/classify`."""

    def _scores(self) -> list[Any]:
        activate = self._body.use_activation
        states = (choice.pooled or b"" for choice in self._generation.choices)
        return [self._scorer.probabilities(state, activate=activate) for state in states]

    def _answer(self, scores: list[Any]) -> Any:
        labels = self._scorer.labels
        data = [
            {"index": i, "label": labels[int(each.argmax())], "probs": each.tolist(), "num_classes": len(each)}
            for i, each in enumerate(scores)
        ]
        return {**_head(self), "data": data, "usage": usage_of(self._generation)}


@router.post("/pooling", summary="Return pooled or all hidden states, or the logits of classes, in vLLM's format")
async def pooling(body: PoolingBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope, body.check, task=None)
    tasks, ready = service.loaded.tasks, service.loaded.ready
    usual = "classify" if "classify" in tasks else "embed" if "generate" in ready.tasks else "token_embed"
    task = body.task or usual
    if task == "token_embed" and "generate" in ready.tasks:
        raise bad_request("task: a decoder's states are pooled; use embed.", "task")
    if task.removeprefix("token_") not in tasks:
        raise bad_request(f"task: this model does not {task}; it does {', '.join(tasks)}.", "task")
    if task == "classify":
        return await _begin_classes(service, body, request, PooledClasses)
    if task == "embed":
        return await begin_embeddings(body, request, service, PooledEmbeddings)
    check_dimensions(body, service.loaded.ready.hidden_size)
    prompts = await prompts_of(service, body, await pooler_of(service))
    every: Pooling = "all"
    generation = pooling_generation(service, body, prompts, every, request.scope)
    return Answer(generation, TokenStates(generation, body))


def _pooled(generation: Generation, body: PoolingBody, arrays: Sequence[Any]) -> bytes:
    """vLLM's answer to `/pooling`, with an array per input."""
    coded = base64_of if body.encoding_format == "base64" else np.ascontiguousarray
    data = [{"index": i, "object": "pooling", "data": coded(array)} for i, array in enumerate(arrays)]
    model, usage = generation.service.name(body.model), usage_of(generation)
    head = {"id": generation.id, "object": "list", "created": int(time.time()), "model": model}
    return orjson.dumps({**head, "data": data, "usage": usage}, option=orjson.OPT_SERIALIZE_NUMPY)


class PooledClasses(Classes):
    async def body(self, _wholes: Sequence[Piece]) -> bytes:
        arrays = [np.asarray(each, np.float32) for each in self._scores()]
        return await self._generation.service.offload(lambda: _pooled(self._generation, self._body, arrays))


class PooledEmbeddings(Embeddings):
    def _answer(self, vectors: list[Any]) -> dict[str, Any]:
        data = [{"index": i, "object": "pooling", "data": vector} for i, vector in enumerate(vectors)]
        return {**super()._answer([]), "data": data}


class TokenStates(Dialect):
    """The states of all tokens, `[T, H]` for each input, of length 1 each unless `normalize` is false."""

    def __init__(self, generation: Generation, body: PoolingBody) -> None:
        self._generation, self._body = generation, body

    async def body(self, _wholes: Sequence[Piece]) -> bytes:
        return await self._generation.service.offload(self._write)

    def _write(self) -> bytes:
        body, width = self._body, self._generation.service.loaded.ready.hidden_size
        arrays = []
        for choice in self._generation.choices:
            states = np.frombuffer(choice.pooled or b"", np.float32).reshape(-1, width)[:, : body.dimensions]
            if body.normalize:
                lengths = np.linalg.norm(states.astype(np.float64), axis=1, keepdims=True)
                states = (states / np.where(lengths == 0, 1.0, lengths)).astype(np.float32)
            arrays.append(states)
        return _pooled(self._generation, body, arrays)
