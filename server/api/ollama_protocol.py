"""The bodies of Ollama's API, and their translation to `ChatBody`, `CompletionBody` and `EmbeddingBody`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from weft.server.api.chat_message import MAX_CALLS, MAX_MESSAGES
from weft.server.api.field_types import INT32, MAX_INPUTS, bounded
from weft.server.api.llama_fields import LlamaSampling
from weft.server.api.other_fields import INSTEAD
from weft.server.bodies import Body
from weft.server.errors import bad_request
from weft.server.tools.tools import MAX_TOOLS, FunctionName, Tools

_DURATION = re.compile(r"-?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|ms|s|m|h))+|-?0")


class OllamaError(BaseModel, extra="forbid"):
    """The body of every non-2xx answer of these paths."""

    error: str


def _parse_format(value: Any) -> dict[str, Any] | None:
    """The equivalent `response_format`."""
    if value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": value, "strict": True}}
    raise ValueError("must be 'json' or a JSON schema")


def _parse_keep_alive(value: Any) -> Any:
    text = isinstance(value, str) and _DURATION.fullmatch(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (text or number):
        raise ValueError("must be a number of seconds or a duration such as '5m'")
    if not re.search(r"[1-9]", str(value)):
        raise ValueError("0 would unload the model; an operator can put it to sleep with /admin/sleep")
    return value


def _parse_think(value: Any) -> bool | str:
    if not (isinstance(value, bool) or value in ("low", "medium", "high", "max")):
        raise ValueError("must be true, false, 'low', 'medium', 'high' or 'max'")
    return value


Format = Annotated[
    Any, PlainValidator(_parse_format), WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]})
]
KeepAlive = Annotated[
    Any, PlainValidator(_parse_keep_alive), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number"}]})
]
Think = Annotated[
    bool | str,
    PlainValidator(_parse_think),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": ["low", "medium", "high", "max"]}]}),
]


class Options(LlamaSampling):
    top_p: float = bounded("top_p", 0.9)
    num_predict: int = Field(-1, ge=-2, le=INT32)  # negative: the rest of the context
    num_ctx: int | None = Field(None, ge=1, le=INT32)  # at most the context of the server

    def fields(self) -> dict[str, Any]:
        """The fields of `SamplingFields`. Raises `ApiError`."""
        if self.num_predict == 0:
            raise bad_request("options.num_predict: must be at least 1, or -1 for no limit.", "options.num_predict")
        return self.sampling("options.")

    @property
    def limit(self) -> int | None:
        return self.num_predict if self.num_predict > 0 else None

    def check_context(self, max_model_len: int) -> None:
        """Raises `ApiError`."""
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            what = f"options.num_ctx: the context is {max_model_len} tokens (--max-model-len)"
            raise bad_request(f"{what}, not {self.num_ctx}.", "options.num_ctx")


DEFAULTS = Options.model_validate({})


class NamedBody(Body):
    model: str = Field(min_length=1, max_length=512)


class CallFunction(Body):
    name: FunctionName
    description: str | None = None
    arguments: dict[str, Any] = Field({})
    index: int | None = None


class Call(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CallFunction


class Message(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Call] = Field([], max_length=MAX_CALLS)
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None  # the former name of `tool_name`


class GeneratingBody(NamedBody):
    stream: bool = True
    format: Format | None = None
    options: Options = DEFAULTS
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    """Checked only: models stay loaded until the operator puts them to sleep."""
    logprobs: bool = False
    top_logprobs: int | None = bounded("logprobs", None)

    def _fields(self, model: str) -> dict[str, Any]:
        """The fields of `GenerationBody`. Raises `ApiError`."""
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs requires logprobs: true.", "top_logprobs")
        form = {} if self.format is None else {"response_format": self.format}
        return {"model": model, "stream": self.stream, **form, **self.options.fields()}

    def _chat_fields(self, model: str) -> dict[str, Any]:
        """The fields of `ChatBody`, without the messages. Raises `ApiError`."""
        fields = {**self._fields(model), "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        elif self.think is not None:
            fields["enable_thinking"] = self.think
        return fields


class OllamaChatBody(GeneratingBody):
    endpoint_path: ClassVar[str] = "/api/chat"

    messages: list[Message] = Field([], max_length=MAX_MESSAGES)
    tools: Tools = Field([], max_length=MAX_TOOLS)

    def as_chat(self, model: str) -> dict[str, Any]:
        """The fields of the equivalent `ChatBody`. Raises `ApiError`."""
        fields = self._chat_fields(model)
        tools = [tool.for_template() for tool in self.tools]
        return {**fields, "messages": self._messages(), "tools": tools}

    def _messages(self) -> list[dict[str, Any]]:
        """The messages, with the ids that connect calls and results in other formats."""
        out: list[dict[str, Any]] = []
        number = 0
        open_calls: list[tuple[str, str]] = []  # (id, name) of calls without a result
        for message in self.messages:
            entry: dict[str, Any] = {"role": message.role, "content": message.content}
            if message.thinking:
                entry["reasoning_content"] = message.thinking
            if message.role == "tool":
                name, call_id = message.tool_name or message.name, message.tool_call_id
                found = next((c for c in open_calls if (call_id or name) in (None, *c)), None)
                if found is not None:
                    open_calls.remove(found)
                    call_id, name = call_id or found[0], name or found[1]
                entry |= {key: value for key, value in (("name", name), ("tool_call_id", call_id)) if value}
            if message.tool_calls:
                calls = []
                for call in message.tool_calls:
                    number += 1
                    call_id = call.id or f"{number:09d}"  # Mistral's templates require nine characters
                    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                    calls.append({"id": call_id, "type": "function", "function": function})
                    open_calls.append((call_id, call.function.name))
                entry |= {"tool_calls": calls, "content": message.content or None}
            out.append(entry)
        return out


class GenerateBody(GeneratingBody):
    endpoint_path: ClassVar[str] = "/api/generate"

    prompt: str = ""
    system: str = ""
    raw: bool = False  # continue the prompt as it is, without the chat template

    def as_chat(self, model: str) -> dict[str, Any]:
        """The fields of a `ChatBody` with the prompt as its user message. Raises `ApiError`."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return {**self._chat_fields(model), "messages": [*messages, {"role": "user", "content": self.prompt}]}

    def as_completion(self, model: str) -> dict[str, Any]:
        """The fields of a `CompletionBody` that continues the prompt. Raises `ApiError`."""
        if self.system:
            raise bad_request("system needs a chat template, which raw switches off.", "system")
        if self.think:
            raise bad_request("think needs a chat template, which raw switches off.", "think")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {**self._fields(model), "prompt": self.prompt, "logprobs": logprobs}


for _path in (OllamaChatBody.endpoint_path, GenerateBody.endpoint_path):
    INSTEAD.update(((_path, name), f"use options.{name}") for name in Options.model_fields)
    INSTEAD.update(((_path, name), "use options.num_predict") for name in ("max_tokens", "max_completion_tokens"))
    INSTEAD.update(((_path, name), "use format") for name in ("response_format", "structured_outputs", "json_schema"))
    INSTEAD.update(((_path, name), "use think") for name in ("reasoning_effort", "enable_thinking", "thinking"))
INSTEAD["/api/generate", "messages"] = "use /api/chat"
INSTEAD["/api/chat", "prompt"] = "use /api/generate"


def _parse_input(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a text or a list of texts")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"must have at most {MAX_INPUTS} entries, not {len(texts)}")
    return texts


class EmbedBody(NamedBody):
    input: Annotated[
        list[str],
        PlainValidator(_parse_input),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ]
    truncate: bool = True  # shorten inputs that do not fit the context
    dimensions: int | None = Field(None, ge=1, le=INT32)
    options: Options = DEFAULTS
    keep_alive: KeepAlive | None = None


class EmbeddingsBody(NamedBody):
    prompt: str = ""
    options: Options = DEFAULTS
    keep_alive: KeepAlive | None = None


class ShowBody(Body):
    model: str | None = Field(None, min_length=1, max_length=512)
    name: SkipJsonSchema[str | None] = Field(None, min_length=1, max_length=512)  # the former name of `model`
    system: SkipJsonSchema[Any] = None
    template: SkipJsonSchema[Any] = None
    options: SkipJsonSchema[Any] = None
    verbose: bool = False
