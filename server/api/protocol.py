"""Request bodies as pydantic models. Every field is typed and bounded; null counts as absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from weft.engine.wire.grammar_text import literal
from weft.engine.wire.sampling import MAX_STOP_TOKENS, SamplingParams
from weft.server.api.chat_message import Messages
from weft.server.api.field_types import (
    INT32,
    MAX_PROMPTS,
    CacheKey,
    CacheSalt,
    LogitBias,
    LogprobIds,
    Priority,
    Prompts,
    SomeTokenIds,
    Stop,
    StopRegex,
    TokenId,
    TokenIds,
    bounded,
    given,
)
from weft.server.api.prediction import Prediction, SpeculationLimit
from weft.server.bodies import Body
from weft.server.errors import bad_request
from weft.server.text.tokenizer import Side, Tokenizer, Truncation
from weft.server.tools.cache_control import MINUTES, CacheControl
from weft.server.tools.structured import (
    PLAIN,
    Grammar,
    LegacyConstraints,
    ResponseFormat,
    StructuredOutputs,
    Words,
    Writer,
    of_response_format,
    of_structured_outputs,
)
from weft.server.tools.template import TemplateBody, ThinkingSwitch
from weft.server.tools.tool_format import Marker
from weft.server.tools.tools import AllowedTools, NamedToolChoice, ToolChoice, names_of

MAX_SEQUENCES = 1024  # limit of n × prompts per request
REQUEST_ID = r"^[!-~]{1,128}$"
DAY = 86400.0  # seconds


class ErrorDetail(BaseModel, extra="forbid"):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel, extra="forbid"):
    """The body of every non-2xx answer."""

    error: ErrorDetail


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(LegacyConstraints):
    """Sampling, output and scheduling fields of all endpoints of OpenAI's that generate."""

    min_tokens: int = bounded("min_tokens", 0, le=INT32)
    temperature: float = bounded("temperature", 1.0)
    top_p: float = bounded("top_p", 1.0)
    top_k: int = bounded("top_k", 0, le=INT32)
    min_p: float = bounded("min_p", 0.0)
    seed: int | None = bounded("seed", None)
    presence_penalty: float = bounded("presence_penalty", 0.0)
    frequency_penalty: float = bounded("frequency_penalty", 0.0)
    repetition_penalty: float = bounded("repetition_penalty", 1.0)
    logit_bias: LogitBias = Field({})
    logprob_token_ids: LogprobIds = Field([])
    """Tokens whose log-probabilities to return besides the sampled token's, instead of the most likely ones."""
    stop: Stop = Field([])
    stop_regex: StopRegex = None
    """Patterns that end the output like stop strings, see `text.stop_regex`."""
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    no_stop_trim: SkipJsonSchema[bool] = False  # SGLang's `include_stop_str_in_output`
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: SomeTokenIds | None = None
    bad_words: Words = Field([])
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    max_thinking_tokens: int | None = Field(None, ge=0, le=INT32)
    """Tokens after which thinking is ended."""
    priority: Priority = 0
    cache_salt: CacheSalt = ""
    prompt_cache_key: CacheKey | None = None
    """Requests with the same key go to the same engine if load and cached prefixes allow."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Retain the prompt in the cache for five minutes (as `prompt_cache_key` does) or a day."""
    speculation: SpeculationLimit | None = None
    user: str | None = None
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    """The request id if there is no X-Request-Id header."""

    @property
    def kept_seconds(self) -> float:
        """Seconds to retain the prompt in the cache; 0 if not requested."""
        if self.prompt_cache_retention == "24h":
            return DAY
        return MINUTES if self.prompt_cache_retention is not None or self.prompt_cache_key is not None else 0.0


class GenerationBody(SamplingFields):
    """Fields shared by completions and chat."""

    model: str | None = None
    lora_path: str | None = Field(None, max_length=256)
    """SGLang's field: the name of a LoRA adapter of the model."""
    max_tokens: int | None = bounded("max_tokens", None, le=INT32)
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = Field(None, ge=1, le=128)
    prompt_logprobs: int | None = bounded("prompt_logprobs", None)
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_energy: bool = False
    """Add the request's energy in joules to `usage`; null if there is no energy counter."""
    add_special_tokens: bool | None = None
    """Default: true for prompts, false for messages, whose template adds its own."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32)  # -1: the context minus the output
    truncation_side: Side = "left"
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    n_predict: SkipJsonSchema[int | None] = Field(None, ge=-1, le=INT32)
    """llama.cpp's `max_tokens`; -1: the rest of the context."""

    def check(self) -> None:
        """Check rules between fields. Raises `ApiError`."""
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options requires stream: true.", "stream_options")
        if self.best_of not in (None, 1, self.n):
            raise bad_request("best_of must be 1 or equal to n.", "best_of")
        if self.max_tokens is None and self.n_predict is not None and self.n_predict >= 0:
            self.max_tokens = self.n_predict
        self.include_stop_str_in_output |= self.no_stop_trim
        has_json = (
            (self.response_format is not None and "json" in self.response_format.type)
            or (self.structured_outputs is not None and self.structured_outputs.is_json)
            or self.guided_json is not None
            or self.json_schema is not None
        )
        styles = {"structured_outputs": self.structured_outputs, "guided_whitespace_pattern": self}
        for name, styled in styles.items():
            if not has_json and styled is not None and styled.json_style not in (None, PLAIN):
                raise bad_request(f"{name}: whitespace and additional properties need a constraint to JSON.", name)
        if self.stream and self.prompt_logprobs is not None:
            raise bad_request("prompt_logprobs cannot be streamed.", "prompt_logprobs")
        if len(asked := self._writers(literal)) > 1:
            fields = " and ".join(field for field, _ in asked)
            raise bad_request(f"Give only one output constraint, not {fields}.", "structured_outputs")

    def constraint(self, marker: Marker) -> Writer | None:
        """A writer of the requested output grammar, if any. `marker`: how grammars spell the model's special tokens."""
        return next(iter(self._writers(marker)), None)

    @property
    def asks_for_structure(self) -> bool:
        return bool(self._writers(literal))

    def truncation(self, max_model_len: int, output: int | None) -> Truncation | None:
        """How to shorten prompts, leaving `output` tokens for the output; None if not requested."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return None
        left = max_model_len - (1 if output is None else output)
        return Truncation(max(0, left) if limit < 0 else limit, self.truncation_side)

    def _requested_logprobs(self, top: int | None) -> int | None:
        """The number of most likely tokens to return: none with `logprob_token_ids`, which replace them."""
        return 0 if self.logprob_token_ids else top

    def shown_logprobs(self, top: int | None) -> int:
        """The number of log-probabilities to show per token. `top`: the number of most likely ones."""
        return len(dict.fromkeys(self.logprob_token_ids)) or top or 0

    def namer(self, tokenizer: Tokenizer) -> Callable[[int], str]:
        """How log-probabilities name tokens."""
        return "token_id:{}".format if self.return_tokens_as_token_ids else tokenizer.token_text

    def _writers(self, marker: Marker) -> list[Writer]:
        given = self.structured_outputs
        json = self.json_style if given is None or given.json_style is None else given.json_style
        asked = [] if self.response_format is None else [of_response_format(self.response_format, marker, json)]
        if given is not None:
            asked.append(of_structured_outputs(given, marker, json))
        return [writer for writer in asked if writer is not None] or self.legacy_writers(json)

    def sampling(
        self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, grammar: Grammar | None = None
    ) -> SamplingParams:
        """The engine's parameters. Raises `RequestError` for values that only the engine rejects."""
        return SamplingParams(
            **{name: getattr(self, name) for name in _SAMPLING_FIELDS},
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids)) if logprobs is not None else (),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(dict.fromkeys(self.allowed_token_ids)),
            bad_words=tuple(self.bad_words),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=None if grammar is None else grammar.text,
            grammar_bytes=0 if grammar is None else grammar.num_bytes,
        )


_CONVERTED = {
    "max_tokens",
    "stop_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "grammar",
}
_SAMPLING_FIELDS = (set(SamplingParams.__struct_fields__) & set(GenerationBody.model_fields)) - _CONVERTED
"""Fields that are passed to the engine unchanged under the same name."""


class CompletionBody(GenerationBody):
    endpoint_path: ClassVar[str] = "/v1/completions"

    prompt: Prompts
    echo: bool = False
    logprobs: int | None = bounded("logprobs", None)

    def check(self) -> None:
        super().check()
        self.logprobs = self._requested_logprobs(self.logprobs)
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise bad_request("max_tokens must be at least 1; 0 requires echo, to score a prompt.", "max_tokens")
        if self.n * len(self.prompt) > MAX_SEQUENCES:
            raise bad_request(f"n times the number of prompts must be at most {MAX_SEQUENCES}.", "n")


class Reasoning(Body):
    """Reasoning options in the form of OpenRouter and others."""

    effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    max_tokens: int | None = Field(None, ge=0, le=INT32)
    enabled: bool | None = None
    exclude: bool = False


class ChatBody(GenerationBody, TemplateBody):
    endpoint_path: ClassVar[str] = "/v1/chat/completions"

    messages: Messages
    cache_control: CacheControl | None = None  # retain the full prompt in the cache
    prediction: Prediction | None = None
    include_reasoning: bool = True  # include the model's thinking in the answer
    reasoning: Reasoning | None = None
    max_completion_tokens: int | None = bounded("max_tokens", None, le=INT32)
    logprobs: bool = False
    top_logprobs: int | None = bounded("logprobs", None)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    echo: bool = False  # start the answer with the last message if it is the assistant's

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        super().check()
        if self.output_limit == 0 and self.prompt_logprobs is None:
            raise bad_request("max_tokens must be at least 1.", "max_tokens")
        self._drop_disallowed_tools()
        self._apply_reasoning()
        for name in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, name) and not self.logprobs:
                raise bad_request(f"{name} requires logprobs: true.", name)
        self.top_logprobs = self._requested_logprobs(self.top_logprobs)
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise bad_request("tool_choice requires tools.", "tool_choice")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names_of(self.tools):
            raise bad_request(f"tool_choice: there is no tool {self.tool_choice.function.name!r}.", "tool_choice")
        self.check_template()

    def _apply_reasoning(self) -> None:
        """Copy the options of `thinking` and `reasoning` to their own fields."""
        if isinstance(self.thinking, ThinkingSwitch) and self.max_thinking_tokens is None:
            self.max_thinking_tokens = self.thinking.budget_tokens
        if (asked := self.reasoning) is None:
            return
        self.include_reasoning &= not asked.exclude
        if self.reasoning_effort is None:
            self.reasoning_effort = asked.effort
        if self.thinks is None:
            self.enable_thinking = asked.enabled
        if self.max_thinking_tokens is None:
            self.max_thinking_tokens = asked.max_tokens

    def _drop_disallowed_tools(self) -> None:
        """Keep only the tools that `tool_choice` allows."""
        if isinstance(allowed := self.tool_choice, AllowedTools):
            if missing := allowed.names - names_of(self.tools):
                raise bad_request(f"tool_choice: there is no tool {min(missing)!r}.", "tool_choice")
            self.tools = [tool for tool in self.tools if tool.function.name in allowed.names]
            self.tool_choice = allowed.mode


class TemplatedBody(TemplateBody):
    """A conversation to render."""

    model: str | None = None
    messages: Messages


class TokenizeBody(TemplateBody):
    """Either `prompt` (a text, or a list of texts), `messages`, or `content`: llama.cpp's name, for a text or a list of
    token ids and texts, whose answer has llama.cpp's format."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [given("prompt"), given("messages"), given("content")]})

    model: str | None = None
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    messages: Messages | None = None
    tool_choice: SkipJsonSchema[Any] = None  # none leaves the tools out
    add_special_tokens: bool | None = None
    """Default: true for prompts, false for messages, whose template adds its own."""
    return_token_strs: bool = False
    content: str | Annotated[list[TokenId | str], Field(max_length=INT32)] | None = None
    add_special: bool = False  # with `content`: write the start token
    parse_special: bool = True  # with `content`: read special tokens instead of treating them as text
    with_pieces: bool = False  # with `content`: also return each token's text, or its bytes if they are no text

    def check(self) -> None:
        """Check rules between fields. Raises `ApiError`."""
        if self.content == self.prompt:  # for servers of either kind
            self.content = None
        if sum(given is not None for given in (self.prompt, self.messages, self.content)) != 1:
            raise bad_request("Give either prompt, messages or content.", "prompt")
        others = "prompt or messages" if self.content is not None else "content"
        for name in _FORMS[others]:
            if getattr(self, name) != type(self).model_fields[name].get_default():
                raise bad_request(f"{name} requires {others}.", name)
        if self.messages is None:
            self.check_without_messages()
        self.check_template()


_FORMS = {
    "content": ("add_special", "parse_special", "with_pieces"),
    "prompt or messages": ("add_special_tokens", "return_token_strs"),
}
"""Fields of `TokenizeBody` that one form of it has."""


class DetokenizeBody(Body):
    model: str | None = None
    tokens: TokenIds
