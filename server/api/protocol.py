"""The bodies that clients send, as pydantic models: every field typed and bounded; nulls count as absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from weft.engine.wire.grammar_text import literal
from weft.engine.wire.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, SamplingParams
from weft.server.bodies import Body
from weft.server.errors import bad_request, clip
from weft.server.text.tokenizer import Tokenizer
from weft.server.text.truncation import Side, Truncation
from weft.server.tools.cache_control import MINUTES, CacheControl, longest_mark
from weft.server.tools.structured import (
    Grammar,
    LegacyConstraints,
    ResponseFormat,
    StructuredOutputs,
    Words,
    Writer,
    of_response_format,
    of_structured_outputs,
)
from weft.server.tools.template import TemplateBody
from weft.server.tools.tool_format import Marker
from weft.server.tools.tools import AllowedTools, NamedToolChoice, ToolChoice, names_of

MAX_PROMPTS = 1024
MAX_INPUTS = 2048
"""of one request for embeddings: as many as OpenAI takes"""
MAX_SEQUENCES = 1024
"""n × prompts of one request"""
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 8192
"""they are checked on the event loop"""
MAX_PARTS = 8192
"""of one message"""
MAX_CALLS = 1024
REQUEST_ID = r"^[!-~]{1,128}$"
INT32 = 2**31 - 1
DAY = 86400.0
"""seconds"""


class ErrorDetail(BaseModel):
    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every answer that is not a 2xx."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


# -- field types


def _parse_prompts(value: Any, most: int = MAX_PROMPTS) -> list[str] | list[list[int]]:
    """Any of the four forms of `prompt` as a list of prompts. By hand: a union of lists is slow on long id lists."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif isinstance(value, list):
        prompts = [value] if value and set(map(type, value)) == {int} else value
    else:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if not prompts or not all(prompts):
        raise ValueError("must not be empty")
    if len(prompts) > most:
        raise ValueError(f"must have at most {most} entries, not {len(prompts)}")
    kinds = set(map(type, prompts))
    if kinds == {str} or (kinds == {list} and all(set(map(type, prompt)) == {int} for prompt in prompts)):
        return prompts
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _parse_stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} entries")
    if not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"entries must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _parse_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries")
    bias: dict[int, float] = {}
    for key, number in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"keys must be token ids, not {clip(key)!r}")
        if type(number) not in (int, float) or not -100 <= number <= 100:
            raise ValueError("values must be numbers between -100 and 100")
        bias[int(key)] = float(number)
    return bias


_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""types of parts that are text, and the field that has it"""


def _flatten_content(value: Any) -> str:
    """Content as one string; a list of text parts is joined with newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if len(value) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts")
    return "\n".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    field = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise ValueError(f"a part of type {clip(kind)!r} is not supported: this server takes text")
    if not isinstance(part.get(field), str):
        raise ValueError(f"a part of type {kind} needs a string {field!r}")
    text: str = part[field]
    return text


def _some(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    """The schema of a list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1} | ({} if most is None else {"maxItems": most})


_TEXT = {"type": "string", "minLength": 1}
_ID = {"type": "integer", "minimum": 0, "maximum": INT32}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_TEXT_PART = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
            "required": ["text"],
        },
        *(
            {
                "type": "object",
                "properties": {"type": {"const": kind}, kind: {"type": "string"}},
                "required": ["type", kind],
            }
            for kind in ("refusal", "thinking")
        ),
    ]
}

Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_parse_prompts),
    WithJsonSchema({"anyOf": [_TEXT, _some(_TEXT, MAX_PROMPTS), _some(_ID), _some(_some(_ID), MAX_PROMPTS)]}),
]
Inputs = Annotated[
    list[str] | list[list[int]],
    PlainValidator(partial(_parse_prompts, most=MAX_INPUTS)),
    WithJsonSchema({"anyOf": [_TEXT, _some(_TEXT, MAX_INPUTS), _some(_ID), _some(_some(_ID), MAX_INPUTS)]}),
]
Stop = Annotated[
    list[str],
    PlainValidator(_parse_stop),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}]}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_parse_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
Content = Annotated[
    str,
    PlainValidator(_flatten_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART, "maxItems": MAX_PARTS}]}),
]
TokenId = Annotated[int, Field(ge=0, le=INT32)]


def _parse_ids(value: Any) -> list[int]:
    """By hand: as for prompts."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("must be a list of token ids")
    if value and not (min(value) >= 0 and max(value) <= INT32):
        raise ValueError(f"token ids must be between 0 and {INT32}")
    return value


TokenIds = Annotated[list[int], PlainValidator(_parse_ids), WithJsonSchema({"type": "array", "items": _ID})]
"""Any number; the endpoint knows how many the model can mean"""


# -- chat messages


class ToolFunction(Body):
    name: str
    arguments: str = "{}"


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, data: Any) -> Any:
        """A custom tool's call is that of a function of one text (`Tool`)."""
        if isinstance(data, dict) and data.get("type") == "custom" and isinstance(data.get("custom"), dict):
            about = data["custom"]
            function = {"name": about.get("name"), "arguments": json.dumps({"input": about.get("input", "")})}
            return {"id": data.get("id"), "function": function}
        return data


_THOUGHTS = ("thinking", "reasoning")


def _thought_text(part: dict[str, Any]) -> str:
    """Of a part that is thinking: a text, or, as Mistral has it, parts that are text."""
    inside = part.get(part["type"], part.get("text", ""))
    if isinstance(inside, str):
        return inside
    return _flatten_content(inside)


class ChatMessage(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
                {"properties": {"role": {"const": "assistant"}}, "required": ["role"]},
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    """what the assistant thought before: some templates show it again"""
    refusal: str | None = Field(None, exclude=True)
    """what the assistant said instead of content"""
    cache_control: CacheControl | None = Field(None, exclude=True)
    """keep the conversation up to here; it may stand in a part of the content, too"""

    @model_validator(mode="before")
    @classmethod
    def _marked(cls, data: Any) -> Any:
        """A mark on a part counts for the message."""
        if not isinstance(data, dict) or not isinstance(parts := data.get("content"), list):
            return data
        mark = longest_mark((data, *parts[:MAX_PARTS]))
        return data if mark is None else {**data, "cache_control": mark}

    @model_validator(mode="before")
    @classmethod
    def _thoughts_apart(cls, data: Any) -> Any:
        """Parts of the assistant's content that are thinking are its reasoning."""
        if not isinstance(data, dict) or data.get("role") != "assistant" or not isinstance(data.get("content"), list):
            return data
        thoughts = [part for part in data["content"] if isinstance(part, dict) and part.get("type") in _THOUGHTS]
        if not thoughts:
            return data
        rest = [part for part in data["content"] if not any(part is thought for thought in thoughts)]
        texts = [_thought_text(part) for part in thoughts]
        given = data.get("reasoning_content") or data.get("reasoning")
        return {**data, "content": rest or None, "reasoning_content": given or "\n".join(texts)}

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("a message needs content (null is for the assistant's)")
        if self.content is None and self.refusal is not None:
            self.content = self.refusal
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


# -- generation


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Body):
    """What every endpoint that generates lets a client say of sampling and scheduling."""

    min_tokens: int = Field(0, ge=0, le=INT32)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: LogitBias = Field({})
    stop: Stop = Field([])
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    priority: int = Field(0, ge=-INT32, le=INT32)
    cache_salt: str = Field("", max_length=128)
    prompt_cache_key: str | None = Field(None, max_length=1024)
    """requests with the same one go to the same engine, of several, where load and kept prefixes leave a choice"""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """how long the prompt is kept in the cache: five minutes, also where there is a `prompt_cache_key`, or a day"""
    user: str | None = None
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    """what X-Request-Id is where that header is not given"""

    @property
    def kept_seconds(self) -> float:
        """How long the prompt is to be kept in the cache; 0: nobody asks."""
        if self.prompt_cache_retention == "24h":
            return DAY
        return MINUTES if self.prompt_cache_retention is not None or self.prompt_cache_key is not None else 0.0


class GenerationBody(SamplingFields, LegacyConstraints):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=INT32)
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_energy: bool = False
    """joules in `usage`, charged to this request by its work; null where no counter is read"""
    add_special_tokens: bool | None = None
    """default: true for a prompt, false for messages, whose template brings its own"""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32)
    """-1: what the context leaves beside the output"""
    truncation_side: Side = "left"
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    allowed_token_ids: TokenIds | None = Field(None, min_length=1)
    bad_words: Words = Field([])
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n_predict: SkipJsonSchema[int | None] = Field(None, ge=-1, le=INT32)
    """llama.cpp's `max_tokens`; -1: what the context leaves"""
    no_stop_trim: SkipJsonSchema[bool] = False
    """SGLang's `include_stop_str_in_output`"""
    use_beam_search: SkipJsonSchema[Any] = None
    logits_processors: SkipJsonSchema[Any] = None
    prompt_embeds: SkipJsonSchema[Any] = None
    kv_transfer_params: SkipJsonSchema[Any] = None
    """what other servers know and this one refuses, because to ignore it would be another answer"""

    def check(self) -> None:
        """Rules between fields, and what this server cannot do. Raises `ApiError`."""
        for name in ("use_beam_search", "logits_processors", "prompt_embeds", "kv_transfer_params"):
            if getattr(self, name):
                raise bad_request(f"{name} is not supported.", name)
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true.", "stream_options")
        if self.best_of not in (None, 1, self.n):
            raise bad_request("best_of must be 1 or equal to n.", "best_of")
        if self.max_tokens is None and self.n_predict is not None and self.n_predict >= 0:
            self.max_tokens = self.n_predict
        self.include_stop_str_in_output |= self.no_stop_trim
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs cannot be streamed.", "prompt_logprobs")
        if len(asked := self._writers(literal)) > 1:
            raise bad_request(
                f"Give one constraint of the output, not {' and '.join(field for field, _ in asked)}.",
                "structured_outputs",
            )

    def constraint(self, marker: Marker) -> Writer | None:
        """What writes the grammar of the output, if one was asked for. `marker`: how grammars for the model name
        marks."""
        writers = self._writers(marker)
        return writers[0] if writers else None

    @property
    def asks_for_structure(self) -> bool:
        return bool(self._writers(literal))

    def truncation(self, max_model_len: int, output: int | None) -> Truncation | None:
        """How prompts are to be shortened, beside `output` tokens of output, if at all."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return None
        room = max_model_len - (1 if output is None else output)
        return Truncation(max(0, room) if limit < 0 else limit, self.truncation_side)

    def namer(self, tokenizer: Tokenizer) -> Callable[[int], str]:
        """How tokens are named beside their log-probabilities."""
        return "token_id:{}".format if self.return_tokens_as_token_ids else tokenizer.token_text

    def _writers(self, marker: Marker) -> list[Writer]:
        asked = [of_response_format(self.response_format, marker)] if self.response_format is not None else []
        if self.structured_outputs is not None:
            asked.append(of_structured_outputs(self.structured_outputs, marker))
        return [writer for writer in asked if writer is not None] or self.legacy_writers()

    def sampling(
        self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, grammar: Grammar | None = None
    ) -> SamplingParams:
        """Raises `RequestError` for what only the engine's rules refuse."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(dict.fromkeys(self.allowed_token_ids)),
            bad_words=tuple(self.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if grammar is None else grammar.text,
            grammar_bytes=0 if grammar is None else grammar.num_bytes,
        )


_SAMPLING_FIELDS = (set(SamplingParams.__struct_fields__) & set(GenerationBody.model_fields)) - {
    "max_tokens",
    "stop_token_ids",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "grammar",
}
"""fields that the engine takes as the client sent them, under the same name"""


class CompletionBody(GenerationBody):
    prompt: Prompts
    suffix: str | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise bad_request("suffix is not supported by this model.", "suffix")
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise bad_request("max_tokens must be at least 1 (0 is for scoring a prompt with echo).", "max_tokens")
        if self.n * len(self.prompt) > MAX_SEQUENCES:
            raise bad_request(f"n times the number of prompts must be at most {MAX_SEQUENCES}.", "n")


class Reasoning(Body):
    """How OpenRouter and others are told of it, in one object."""

    effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    max_tokens: int | None = Field(None, ge=0, le=INT32)
    enabled: bool | None = None
    exclude: bool = False


class ChatBody(GenerationBody, TemplateBody):
    messages: Messages
    cache_control: CacheControl | None = None
    """keep the whole prompt in the cache"""
    include_reasoning: bool = True
    """false: what the model thinks is not sent"""
    max_thinking_tokens: int | None = Field(
        None, ge=0, le=INT32, validation_alias=AliasChoices("max_thinking_tokens", "thinking_token_budget")
    )
    """after so many tokens its thinking is ended"""
    reasoning: Reasoning | None = None
    max_completion_tokens: int | None = Field(None, ge=0, le=INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    echo: bool = False
    """begin the answer with the last message, when that is the assistant's"""
    functions: SkipJsonSchema[Any] = None
    function_call: SkipJsonSchema[Any] = None
    """the oldest form of tools"""

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.output_limit == 0 and self.prompt_logprobs is None:
            raise bad_request("max_tokens must be at least 1.", "max_tokens")
        self._keep_allowed_tools()
        self._take_reasoning()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, name):
                raise bad_request(f"{name} is not supported; use {instead}.", name)
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise bad_request("tool_choice needs tools.", "tool_choice")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names_of(self.tools):
            raise bad_request(f"tool_choice: there is no tool {self.tool_choice.function.name!r}.", "tool_choice")
        self.check_template()

    def _take_reasoning(self) -> None:
        """What `reasoning` says, in the fields of their own."""
        if (asked := self.reasoning) is None:
            return
        self.include_reasoning &= not asked.exclude
        if self.reasoning_effort is None:
            self.reasoning_effort = asked.effort
        if self.enable_thinking is None:
            self.enable_thinking = asked.enabled
        if self.max_thinking_tokens is None:
            self.max_thinking_tokens = asked.max_tokens

    def _keep_allowed_tools(self) -> None:
        """Of the tools offered only those that `tool_choice` allows."""
        if isinstance(allowed := self.tool_choice, AllowedTools):
            if missing := allowed.names - names_of(self.tools):
                raise bad_request(f"tool_choice: there is no tool {min(missing)!r}.", "tool_choice")
            self.tools = [tool for tool in self.tools if tool.function.name in allowed.names]
            self.tool_choice = allowed.mode


# -- tokens


class TemplatedBody(TemplateBody):
    """A conversation to be rendered."""

    model: str | None = None
    messages: Messages


class TokenizeBody(TemplateBody):
    """Either `prompt` (a text, or a list of texts) or `messages`."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {name: {"not": {"type": "null"}}}, "required": [name]} for name in ("prompt", "messages")
            ]
        }
    )

    model: str | None = None
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """default: true for a prompt, false for messages, whose template brings its own"""
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
