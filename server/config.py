"""`ServeConfig`: everything `weft serve` can be told: the options of the engine and of HTTP, flat."""

from __future__ import annotations

import re
import shlex
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from weft.engine.config import NO_OPTION, EngineConfig
from weft.engine.errors import wrong_option

LogLevel = Literal["debug", "info", "warning", "error"]
ToolParserName = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "functiongemma",
    "gemma",
    "gemma4",
    "glm45",
    "granite",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "openai",
    "phi4_mini_json",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningParserName = Literal[
    "auto",
    "none",
    "deepseek_r1",
    "deepseek_v3",
    "gemma4",
    "glm45",
    "granite",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "openai_gptoss",
    "qwen3",
]


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*\s]*")
OF_A_MODEL = frozenset(
    name for name, field in EngineConfig.model_fields.items() if field.json_schema_extra != NO_OPTION
)
"""options of the engine, which each of several models may have for itself"""
OWN_OPTIONS = OF_A_MODEL | {
    "served_model_name",
    "memory_share",
    "replicas",
    "data_parallel_size",
    "pooling",
    "tool_call_parser",
    "reasoning_parser",
    "allow_special_tokens",
}
"""all that each of several models may have for itself"""


class ServeConfig(EngineConfig):
    """Options of one daemon. The field descriptions are the text of `weft serve --help`."""

    GROUPS: ClassVar[dict[str, str]] = {
        **EngineConfig.GROUPS,
        "host": "HTTP",
        "api_key": "keys and limits of each",
        "max_queued_requests": "limits of all",
        "replicas": "several engines",
        "models": "several models",
        "tool_call_parser": "processes",
        "files_dir": "files and batches",
        "responses_dir": "stored responses",
        "log_level": "logs and traces",
    }

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: list[str] = Field(
        [], description="names that requests may use, the first is the one that answers carry [the model's own name]"
    )
    api_workers: int = Field(
        1, ge=1, le=64, description="processes that answer HTTP on the one port, in front of the one engine"
    )
    handover: str | None = Field(
        None,
        min_length=1,
        description="Unix socket where a daemon started later, with the same option, takes the port over without a gap",
    )
    tls_cert: str | None = Field(None, min_length=1, description="PEM file of the certificate chain: serves https")
    tls_key: str | None = Field(None, min_length=1, description="PEM file of its private key [in --tls-cert]")
    ui: bool = Field(True, description="a page at / that shows how the daemon fares, with a box to try the model")
    cors_origin: list[str] = Field([], description="origins whose web pages may call, '*' for all [none]")
    api_key: list[str] = Field(
        [], repr=False, description="keys that clients may present, or their sha256:HEX digests [no key needed]"
    )
    api_key_file: str | None = Field(None, min_length=1, description="file with more such keys, one a line")
    admin_api_key: str | None = Field(None, min_length=1, repr=False, description="key of /admin/ [/admin/ is off]")
    salt_per_key: bool | None = Field(
        None, description="keys share no cached prefixes, whose timing tells what others asked [on with several keys]"
    )
    rate_limit: int | None = Field(
        None, ge=1, description="completions a minute that a key may ask for; beyond that 429 with Retry-After"
    )
    rate_limit_tokens: int | None = Field(
        None, ge=1, description="tokens a minute, prompt and output, that a key may use; beyond that 429"
    )
    max_queued_requests: int = Field(
        1024, ge=0, description="sequences waiting for the engine at most; beyond that 503 with Retry-After"
    )
    max_queued_tokens: int = Field(
        1_000_000, ge=1, description="prompt tokens waiting for their first output token at most; beyond that 503"
    )
    request_timeout: float | None = Field(None, gt=0, description="seconds a request may take in all [no limit]")
    drain_timeout: float = Field(30.0, ge=0, description="seconds that open requests get to finish after SIGTERM")
    client_stall_timeout: float = Field(
        300.0, ge=0, description="seconds that a client may leave data unread before it is cut off; 0 for ever"
    )
    max_body_mib: float | None = Field(
        None,
        gt=0,
        description="size of a request body at most, in MiB [1, and 1 for each 1024 tokens of context, to 32]",
    )
    allow_special_tokens: bool = Field(
        False, description="let control tokens that users' messages and tools' results spell be such, not text"
    )
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="engines on the same device, with one set of weights, which requests are shared out to; they "
        "divide its memory and its time",
    )
    data_parallel_size: int = Field(
        1, ge=1, le=64, description="GPUs with --replicas engines each; on a CPU engines beside those"
    )
    models: list[dict[str, JsonValue]] = Field(
        [],
        title="a list of models, each a text or a mapping with a model",
        description="several models, which requests choose among by name: each a text, the model and its own options, "
        "as 'ORG/NAME memory_share=0.4 max_num_seqs=64'; --model given several times says the same",
    )
    memory_share: float | None = Field(
        None, gt=0, le=1, description="with several models, a model's part of the memory [an equal part]"
    )
    max_awake_models: int | None = Field(
        None, ge=1, description="models awake at once at most; the others sleep [as many as memory_share lets]"
    )
    wake_on_request: bool = Field(
        True, description="wake a sleeping model when a request names it; else such a request gets 503"
    )
    wake_timeout: float = Field(
        60.0, gt=0, description="seconds that a request waits for its model to wake; then 503 with Retry-After"
    )
    tool_call_parser: ToolParserName = Field(
        "auto", description="how the model writes tool calls; auto reads it off the chat template"
    )
    reasoning_parser: ReasoningParserName = Field(
        "auto", description="how the model marks its thinking; auto reads it off the chat template, none leaves it in"
    )
    pooling: Literal["auto", "last", "mean", "none"] = Field(
        "auto",
        description="hidden states that are embeddings: of the last token, or their mean; auto: as the model's "
        "1_Pooling/config.json says, else last; none: no /v1/embeddings",
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="threads that tokenize and render chat templates")
    restart_engine: bool = Field(
        True, description="start another engine process when one ends or hangs, instead of ending the daemon"
    )
    engine_restart_limit: int = Field(
        10, ge=1, description="engine processes started anew within ten minutes at most; then the daemon ends, status 1"
    )
    hang_timeout: float = Field(
        30.0,
        ge=0,
        description="seconds without progress after which the engine is killed, its stacks logged; 0 for never",
    )
    api_hang_timeout: float = Field(10.0, ge=0, description="the same for a process that answers HTTP; 0 for never")
    step_timeout: float = Field(
        600.0, gt=0, description="seconds an iteration may take on a CPU; on a GPU --hang-timeout bounds it"
    )
    start_timeout: float = Field(
        600.0, gt=0, description="seconds that loading, compiling and the like may go on without a step of progress"
    )
    files_dir: str | None = Field(
        None, min_length=1, description="folder of /v1/files and /v1/batches, which are off without one"
    )
    files_max_gib: float = Field(10.0, gt=0, description="what they may take of the disk, in GiB")
    responses_dir: str | None = Field(
        None, min_length=1, description="folder that keeps responses and conversations over restarts [in memory]"
    )
    responses_max_mib: float = Field(
        256.0, ge=0, description="what they may take, in MiB; the oldest go first; 0 stores none"
    )
    responses_max_hours: float = Field(720.0, gt=0, description="hours without use after which they go")
    log_level: LogLevel = Field("info", description="how much is logged to stderr")
    log_format: Literal["text", "json"] = Field("text", description="lines of text, or a JSON object a line")
    access_log: bool = Field(True, description="log a line for each request, but for probes and scrapes")
    log_requests: bool = Field(False, description="log the bodies of requests too, with the prompts in them")
    otlp_endpoint: str | None = Field(
        None, min_length=1, description="URL of a collector that gets OpenTelemetry spans; needs the extra otel"
    )

    @field_validator("admin_api_key")
    @classmethod
    def _no_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be blank")
        return value

    @field_validator("served_model_name", "api_key", "cors_origin")
    @classmethod
    def _no_empty_entries(cls, value: list[str]) -> list[str]:
        if any(not entry.strip() for entry in value):
            raise ValueError("must not contain an empty entry")
        return value

    @field_validator("cors_origin")
    @classmethod
    def _as_browsers_say_it(cls, value: list[str]) -> list[str]:
        """It is compared letter by letter: what no browser sends would let nobody in, without a word."""
        if odd := [origin for origin in value if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin)]:
            like = "https://example.org (no slash at its end, no * in it; * alone lets all in)"
            raise ValueError(f"{odd[0]!r} is no origin such as {like}")
        return value

    @field_validator("models", mode="before")
    @classmethod
    def _models_as_texts(cls, value: Any) -> Any:
        return [entry_of(each) if isinstance(each, str) else each for each in value] if type(value) is list else value

    @model_validator(mode="after")
    def _models_fit_together(self) -> ServeConfig:
        if not self.models:
            return self
        if self.model != "demo" or self.model_preset is not None:
            raise ValueError("give --model or --models, not both")
        if self.served_model_name or self.memory_share is not None:
            raise ValueError("served_model_name and memory_share are each model's own: give them inside --models")
        for entry in self.models:
            if unknown := sorted(set(entry) - OWN_OPTIONS):
                raise ValueError(f"models: {unknown[0]} is no option of one model")
        each = self.each
        for i, config in enumerate(each):
            if config.memory_share is None and _even_share(each, self.max_awake_models) <= 0:
                raise ValueError(f"models: nothing is left for number {i + 1}: give each a memory_share")
        return self

    @model_validator(mode="after")
    def _key_of_a_certificate(self) -> ServeConfig:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        return self

    @model_validator(mode="after")
    def _an_objective_is_kept_by_somebody(self) -> ServeConfig:
        if self.slo and not self.adapts:
            raise ValueError("--slo is what max_num_seqs auto keeps: give that too, or leave --slo out")
        return self

    @property
    def engine(self) -> EngineConfig:
        """The part that the engine process is told."""
        given = {name: getattr(self, name) for name in EngineConfig.model_fields}
        if self.kv_events_endpoint is not None:
            given["kv_events_topic"] = self.kv_topic(self.model_names[0])
        return EngineConfig.model_validate(given)

    @property
    def each(self) -> list[ServeConfig]:
        """The configuration of every model: what is given for all, and its own options. Raises `ValueError`."""
        if not self.models:
            return [self]
        common = self.model_dump(exclude={"models", "model"}, exclude_unset=True)
        found = []
        for i, entry in enumerate(self.models):
            lists = {k: [v] for k, v in entry.items() if isinstance(v, str) and k in ("served_model_name", "slo")}
            try:
                found.append(ServeConfig.model_validate({**common, **entry, **lists}))
            except ValidationError as error:
                name, reason = wrong_option(error, ServeConfig)
                raise ValueError(f"models, number {i + 1}: {name}{': ' if name else ''}{reason}") from None
        return found

    @property
    def memory_shares(self) -> list[float]:
        """Of the memory, by model. Those that may be awake together have 1 at most."""
        each = self.each
        even = _even_share(each, self.max_awake_models)
        return [even if config.memory_share is None else config.memory_share for config in each]

    @property
    def engine_numbers(self) -> list[range]:
        """Of each model's engines: all are counted through."""
        found: list[range] = []
        for config in self.each:
            first = found[-1].stop if found else 0
            found.append(range(first, first + config.num_engines))
        return found

    @property
    def num_engines(self) -> int:
        """Of all models."""
        if self.models:
            return sum(config.num_engines for config in self.each)
        return self.replicas * self.data_parallel_size

    @property
    def model_names(self) -> list[str]:
        return self.served_model_name or [self.model_name]


def entry_of(text: str) -> dict[str, JsonValue]:
    """A model and its own options, from `MODEL option=value …`; one named twice is a list. Raises `ValueError`."""
    words = shlex.split(text)
    if not words or "=" in words[0]:
        raise ValueError(f"models: {text!r} must begin with a model")
    entry: dict[str, JsonValue] = {"model": words[0]}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals:
            raise ValueError(f"models: {word!r} must be option=value")
        before = entry.get(name)
        if before is None:
            entry[name] = value
        else:
            entry[name] = [*before, value] if isinstance(before, list) else [before, value]
    return entry


def _even_share(each: list[ServeConfig], most: int | None) -> float:
    """Of the memory, for each model that is given none. `most`: awake at once."""
    given = [config.memory_share for config in each if config.memory_share is not None]
    if not given:
        return 1 / min(len(each), most or len(each))
    return (1 - sum(given)) / max(1, len(each) - len(given))
