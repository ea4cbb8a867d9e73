"""`POST /completion`, llama.cpp's endpoint that continues a prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from weft.server.api.answer import Answer
from weft.server.api.choice import Choice, Piece
from weft.server.api.completions import begin_completion
from weft.server.api.events import Dialect, event
from weft.server.api.field_types import INT32, MAX_PROMPTS, bounded
from weft.server.api.generate import Generation, Prompt
from weft.server.api.llama_fields import LlamaSampling
from weft.server.api.protocol import CompletionBody, TokenizeBody
from weft.server.api.routing import STREAMED, JsonRoute, ServiceOf
from weft.server.api.service import Service
from weft.server.errors import bad_request, clip, translate
from weft.server.observe.shared_state import OPEN
from weft.server.text.logprobs import chat_logprobs
from weft.server.tools.structured import MaybeGrammarText, Schema

router = APIRouter(route_class=JsonRoute)

_Text = str | list[int | str]  # a prompt: a text, or token ids and texts


def _parse_prompt(value: Any) -> list[_Text]:
    """The prompts. A list is one prompt if it has a token id, else several."""
    prompts = value if isinstance(value, list) and not any(type(part) is int for part in value) else [value]
    prompts = [_text_of(prompt) for prompt in prompts]
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise ValueError(f"must have 1 to {MAX_PROMPTS} entries")
    for prompt in prompts:
        parts = prompt if isinstance(prompt, list) else [prompt]
        one_text = isinstance(prompt, str)
        if not (one_text or (isinstance(prompt, list) and prompt and all(type(p) in (int, str) for p in parts))):
            raise ValueError("must be a text, a list of token ids and texts, or a list of such prompts")
        if any(type(part) is int and not 0 <= part <= INT32 for part in parts):
            raise ValueError(f"token ids must be between 0 and {INT32}")
    return prompts


def _text_of(prompt: Any) -> Any:
    """The text of a prompt in the form that may have images."""
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt_string"), str):
        return prompt
    if prompt.get("multimodal_data"):
        raise ValueError("multimodal_data is not supported: this server takes text")
    return prompt["prompt_string"]


def _parse_bias(value: Any) -> list[tuple[int | str, float]]:
    """Pairs of a token id or text and a bias. `false` bans the token."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("must be a list of pairs of a token id or text and a bias")
    out: list[tuple[int | str, float]] = []
    for token, bias in pairs:
        if isinstance(value, dict) and token.isascii() and token.isdigit():
            token = int(token)
        if type(token) not in (int, str) or type(bias) not in (int, float, bool) or bias is True:
            raise ValueError(f"{clip([token, bias])} is not a pair of a token id or text and a number or false")
        out.append((token, -100.0 if bias is False else float(bias)))
    return out


_PROMPT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]}
_BIAS: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "array"}]}


class LlamaBody(LlamaSampling):
    endpoint_path: ClassVar[str] = "/completion"

    prompt: Annotated[list[_Text], PlainValidator(_parse_prompt), WithJsonSchema(_PROMPT)]
    model: str | None = None
    min_p: float = bounded("min_p", 0.05)
    n_predict: int = Field(-1, ge=-2, le=INT32)  # negative: the rest of the context
    max_tokens: SkipJsonSchema[int | None] = Field(None, ge=-1, le=INT32)  # another name of `n_predict`
    stream: bool = False
    n_probs: int = bounded("logprobs", 0)  # alternatives to report per token
    logit_bias: Annotated[list[tuple[int | str, float]], PlainValidator(_parse_bias), WithJsonSchema(_BIAS)] = Field([])
    ignore_eos: bool = False
    grammar: MaybeGrammarText | None = None
    json_schema: Schema | None = None
    cache_prompt: bool = True  # false: compute the whole prompt
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] = Field([], max_length=64)
    """The fields of the answer; `a/b` is a field of `a`."""

    @property
    def limit(self) -> int | None:
        limit = self.n_predict if self.max_tokens is None else self.max_tokens
        return limit if limit >= 0 else None

    def check(self) -> None:
        """Raises `ApiError`."""
        if self.grammar and self.json_schema is not None:
            raise bad_request("Give only one output constraint, not grammar and json_schema.", "grammar")
        if self.limit == 0 and self.n_probs:
            raise bad_request("n_probs needs output tokens.", "n_probs")


@router.post("/completion", summary="Continue a prompt, in llama.cpp's format", responses=STREAMED)
async def completion(body: LlamaBody, request: Request, service: ServiceOf) -> Response:
    service = await service.enter(body.model, request.scope, body.check)
    fields = await _completion_fields(body, service)
    try:
        completion = CompletionBody.model_validate(fields)
    except ValidationError as error:
        raise translate(error) from None
    prompts = [await _prompt(prompt, service) for prompt in body.prompt]
    generation = await begin_completion(completion, request, service, prompts, default_limit=body.limit)
    return Answer(generation, LlamaDialect(generation, body, completion.logit_bias, service.name(body.model)))


@router.get("/slots", summary="List the slots and how many are in use, in llama.cpp's format")
async def slots(service: ServiceOf) -> list[dict[str, Any]]:
    """The scheduler moves requests between slots, so only the number of those in use means something."""
    ready, used = service.known.ready, int(service.shared_state.load[:, service.model, OPEN].sum())
    return [{"id": i, "n_ctx": ready.max_model_len, "is_processing": i < used} for i in range(ready.max_num_seqs)]


async def _completion_fields(body: LlamaBody, service: Service) -> dict[str, Any]:
    bias: dict[str, float] = {}
    for token, value in body.logit_bias:
        ids = await _encode([token], service, "logit_bias", add_special=False)
        bias |= {str(token_id): value for token_id in ids}
    return {
        **body.sampling(),
        "prompt": "-",  # `_prompt` makes the real ones
        "stream": body.stream,
        "logprobs": body.n_probs or None,
        "logit_bias": bias,
        "ignore_eos": body.ignore_eos,
        "grammar": body.grammar,
        "json_schema": body.json_schema,
        "cache_salt": "" if body.cache_prompt else uuid.uuid4().hex,
        **({"max_tokens": 0, "prompt_logprobs": 0, "stream": False} if body.limit == 0 else {}),
    }


async def _encode(
    text: str | Sequence[int | str], service: Service, param: str, *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Tokenize a text, or texts between token ids. Texts after the beginning get no start token. Raises `ApiError`."""
    loaded = service.loaded
    ids: list[int] = []
    for i, part in enumerate([text] if isinstance(text, str) else text):
        if isinstance(part, str):
            part = part if parse_special else loaded.tokenizer.as_text(part)
            (found,) = await loaded.text.encode([part], add_special_tokens=add_special and i == 0, param=param)
            ids += found
        else:
            ids.append(part)
    loaded.text.check_ids(ids, param)
    return ids


async def tokenize_content(body: TokenizeBody, service: Service) -> dict[str, Any]:
    """The answer to `POST /tokenize` with `content`. Raises `ApiError`."""
    how = {"add_special": body.add_special, "parse_special": body.parse_special}
    ids = await _encode(body.content or "", service, "content", **how)
    if not body.with_pieces:
        return {"tokens": ids}
    pieces: list[dict[str, Any]] = []
    for token_id in ids:
        data = service.loaded.tokenizer.token_bytes(token_id)
        try:
            pieces.append({"id": token_id, "piece": data.decode()})
        except UnicodeDecodeError:
            pieces.append({"id": token_id, "piece": list(data)})
    return {"tokens": pieces}


async def _prompt(prompt: _Text, service: Service) -> Prompt:
    """Raises `ApiError`."""
    ids = await _encode(prompt, service, "prompt", add_special=True)
    if not ids:
        raise bad_request("prompt: must have at least one token.", "prompt")
    return Prompt(ids, prompt if isinstance(prompt, str) else None)


class LlamaDialect(Dialect):
    """Writes one object for a prompt and a list for several. Events have no names, and no mark ends them."""

    def __init__(self, generation: Generation, body: LlamaBody, biases: dict[int, float], model: str) -> None:
        """`biases`: by token id."""
        self._biases = biases
        self._generation, self._body, self._model = generation, body, model
        self._tokenizer = generation.service.loaded.tokenizer
        self._lines: set[int] = set()  # choices whose text has a line break

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        return await self._generation.service.offload(lambda: self._write(wholes))

    def _write(self, wholes: Sequence[Piece]) -> bytes:
        choices = zip(self._generation.choices, wholes, strict=True)
        answers = [self._selected({**self._part(c, piece), **self._end(c, piece)}) for c, piece in choices]
        return orjson.dumps(answers[0] if len(answers) == 1 else answers)

    def events(self, choice: Choice, piece: Piece) -> bytes:
        ended = piece.finish_reason is not None
        out = b""
        if piece.text or piece.token_ids or not ended:
            part = self._part(choice, piece)
            part |= {"timings": self._timings(choice)} if self._body.timings_per_token else {}
            out = event(orjson.dumps(part))
        if ended:
            last = {**self._part(choice, Piece()), **self._end(choice, piece)}
            out += event(orjson.dumps(self._selected(last)))
        return out

    async def end(self) -> bytes:
        return b""

    def _part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        if "\n" in piece.text:
            self._lines.add(choice.index)
        out: dict[str, Any] = {
            "index": choice.index,
            "content": piece.text,
            "tokens": piece.token_ids if self._body.return_tokens or self._body.stream else [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": len(self._generation.prompts[choice.prompt].token_ids),
        }
        if self._body.n_probs and piece.logprobs:
            out["completion_probabilities"] = self._probabilities(piece)
        return out

    def _probabilities(self, piece: Piece) -> list[dict[str, Any]]:
        names, data = self._tokenizer.token_text, self._tokenizer.token_bytes
        found: list[dict[str, Any]] = chat_logprobs(names, data, piece.logprobs, self._body.n_probs)["content"]
        for entry, about in zip(found, piece.logprobs, strict=True):
            entry["id"] = about.ids[0]
            for other, token_id in zip(entry["top_logprobs"], about.ids[1:], strict=False):
                other["id"] = token_id
        return found

    def _end(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """The last fields of an answer."""
        prompt = self._generation.prompts[choice.prompt]
        word = piece.stop_reason if isinstance(piece.stop_reason, str) else ""
        return {
            "stop": True,
            "model": self._model,
            "prompt": self._tokenizer.decode(prompt.token_ids, special=True),
            "generation_settings": self._settings(),
            "has_new_line": choice.index in self._lines,
            "truncated": False,
            "stop_type": "limit" if piece.finish_reason == "length" else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": len(prompt.token_ids) + choice.num_tokens,
            "timings": self._timings(choice),
        }

    def _settings(self) -> dict[str, Any]:
        body = self._body
        limit = -1 if body.limit is None else body.limit
        names = (
            "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty", "stop",
            "ignore_eos", "stream", "n_probs", "grammar",
        )  # fmt: skip
        same = {name: getattr(body, name) for name in names}
        seed = -1 if body.seed is None else body.seed
        ready = self._generation.service.loaded.ready
        biases = [*self._biases.items(), *((end, None) for end in ready.eos_token_ids if body.ignore_eos)]
        return {
            **same,
            "seed": seed,
            "n_predict": limit,
            "max_tokens": limit,
            "n_ctx": ready.max_model_len,
            "logit_bias": [{"token": token_id, "bias": bias} for token_id, bias in biases],
        }

    def _timings(self, choice: Choice) -> dict[str, Any]:
        first = choice.first_token_at or self._generation.arrival
        prompt = len(self._generation.prompts[choice.prompt].token_ids)
        computed, predicted = prompt - choice.cached_tokens, choice.num_tokens
        prompt_ms = 1e3 * (first - self._generation.arrival)
        predicted_ms = 1e3 * max(0.0, choice.last_token_at - first)
        return {
            "cache_n": choice.cached_tokens,
            **_rates("prompt", computed, computed, prompt_ms),
            **_rates("predicted", predicted, predicted - 1, predicted_ms),  # The prompt's step gives the first token.
        }

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields of the answer that the body asks for."""
        if not self._body.response_fields:
            return answer
        out: dict[str, Any] = {}
        for path in self._body.response_fields:
            value: Any = answer
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                out[path] = value
        return out


def _rates(name: str, tokens: int, timed: int, milliseconds: float) -> dict[str, Any]:
    """Return the figures of a phase. `timed`: the tokens that took the time; without any, rates are 0."""
    ms = round(milliseconds, 3)
    known = timed > 0 and ms > 0
    return {
        f"{name}_n": tokens,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / timed if known else 0.0,
        f"{name}_per_second": 1e3 * timed / ms if known else 0.0,
    }
