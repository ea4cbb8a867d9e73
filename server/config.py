"""`ServeConfig`: all options of `weft serve`, those of the engine and of the server, in one flat model."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from weft.engine.config import NO_OPTION, EngineConfig, OptionGroup, expanded, option_groups
from weft.engine.errors import invalid_option

LogLevel = Literal["debug", "info", "warning", "error"]
ToolParserName = Literal[
    "auto", "deepseek_v3", "deepseek_v31", "deepseek_v32", "functiongemma", "gemma", "gemma4", "glm45", "granite",
    "hermes", "kimi_k2", "llama3_json", "llama4_json", "llama4_pythonic", "minimax_m2", "mistral", "openai",
    "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_xml",
]  # fmt: skip
ReasoningParserName = Literal[
    "auto", "none", "deepseek_r1", "deepseek_v3", "gemma4", "glm45", "granite", "kimi_k2", "minimax_m2", "mistral",
    "openai_gptoss", "qwen3",
]  # fmt: skip

ANY_NAME = "*"  # the served name that stands for all others
_ROOT_PATH = re.compile(r"(?:/[\w.~-]+)+", re.ASCII)
HOST = re.compile(r"\*|(?:\*?\.)?[\w-]+(?:\.[\w-]+)*", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*\s]*")
ENGINE_OPTIONS = frozenset(
    name for name, field in EngineConfig.model_fields.items() if field.json_schema_extra != NO_OPTION
)
"""Options of the engine."""
MODEL_OPTIONS = ENGINE_OPTIONS | {
    "served_model_name", "memory_share", "replicas", "data_parallel_size", "pooling", "tool_call_parser",
    "reasoning_parser", "allow_special_tokens", "chat_template", "classifier_from_token",
}  # fmt: skip
"""Options that each of several models can set for itself."""


@option_groups.described
class ServeConfig(EngineConfig):
    """Options of one daemon. The text below a field is its description in `weft serve --help`."""

    GROUPS: ClassVar[tuple[OptionGroup, ...]] = option_groups.merged(
        EngineConfig.GROUPS,
        (
            OptionGroup(
                option_groups.MODEL,
                ("served_model_name", "tool_call_parser", "reasoning_parser", "models"),
                (
                    "chat_template", "pooling", "classifier_from_token", "allow_special_tokens", "memory_share",
                    "max_awake_models", "wake_on_request", "wake_timeout",
                ),
            ),
            OptionGroup(
                "network",
                ("host", "port", "tls_cert", "tls_key", "api_workers"),
                (
                    "uds", "root_path", "cors_origin", "allowed_host", "max_body_mib", "strict_fields",
                    "request_timeout", "client_stall_timeout", "ui", "handover", "admin_port",
                ),
            ),
            OptionGroup(option_groups.MEMORY),
            OptionGroup(option_groups.BATCHING, ("max_queued_requests",), ("max_queued_tokens",)),
            OptionGroup(option_groups.DEVICES, ("replicas", "data_parallel_size"), ("mps",)),
            OptionGroup(
                "security",
                ("api_key", "api_key_file"),
                ("admin_api_key", "best_priority", "rate_limit", "rate_limit_tokens", "salt_per_key"),
            ),
            OptionGroup(
                "files, batches and stored responses",
                (),
                ("files_dir", "files_max_gib", "responses_dir", "responses_max_mib", "responses_max_hours"),
            ),
            OptionGroup(
                "images",
                (),
                (
                    "limit_images", "image_urls", "allowed_media_domains", "allowed_local_media_path", "max_image_mib",
                    "max_image_pixels",
                ),
            ),
            OptionGroup("restarts and shutdown", (), ("restart_engine", "hang_timeout", "drain_timeout")),
            OptionGroup(
                option_groups.OBSERVABILITY, ("log_level",),
                ("log_format", "access_log", "log_requests", "otlp_endpoint"),
            ),
            OptionGroup(
                option_groups.INTERNALS,
                (),
                ("tokenizer_threads", "engine_restart_limit", "api_hang_timeout", "step_timeout", "start_timeout"),
            ),
        ),
    )  # fmt: skip

    host: str = Field("127.0.0.1", min_length=1)
    """address to listen on; 0.0.0.0 for all interfaces"""
    port: int = Field(8000, ge=0, le=65535)
    """port to listen on; 0 picks a free port"""
    uds: str | None = Field(None, min_length=1)
    """Unix socket to listen on instead of --host and --port; the umask sets who may connect"""
    root_path: str = ""
    """path prefix under which a proxy serves this daemon, such as /llm; requests may come with or without it"""
    served_model_name: list[str] = Field([])
    """names that requests may use; responses carry the first; '*' accepts any name [the model's own name]"""
    api_workers: int = Field(1, ge=1, le=64)
    """HTTP server processes, which share the port"""
    admin_port: int | None = Field(None, ge=0, le=65535)
    """another port for health, metrics and /admin/ only, which answers even if clients hold all connections [none]"""
    handover: str | None = Field(None, min_length=1)
    """Unix socket for restarts without downtime: a daemon started later with the same socket takes over the port"""
    tls_cert: str | None = Field(None, min_length=1)
    """PEM file of the certificate chain; enables https"""
    tls_key: str | None = Field(None, min_length=1)
    """PEM file of the private key [in --tls-cert]"""
    ui: bool = True
    """serve a status page with a prompt box at /"""
    cors_origin: list[str] = Field([])
    """origins allowed to call from web pages; '*' for all [none]"""
    allowed_host: list[str] = Field([])
    """names in URLs of this server, such as llm.example.org or *.example.org, in addition to localhost and addresses;
    '*' for all [only localhost and addresses on loopback without API keys, else all]"""
    api_key: list[str] = Field([], repr=False)
    """API keys that clients may use, or their sha256:HEX digests [no key needed]"""
    api_key_file: str | None = Field(None, min_length=1)
    """file with further API keys, one per line"""
    admin_api_key: str | None = Field(None, min_length=1, repr=False)
    """API key for /admin/ [/admin/ is off]"""
    best_priority: int = Field(0, ge=-999_999_999, le=999_999_999)
    """best (lowest) priority that counts between API keys, which otherwise take turns; a key's line in --api-key-file
    may set its own. Other priorities order the requests of a key"""
    salt_per_key: bool | None = None
    """do not share cached prefixes between API keys, whose timing could leak prompts [on with several keys]"""
    rate_limit: int | None = Field(None, ge=1, le=10**9)
    """completions per minute and API key; beyond that 429 with Retry-After"""
    rate_limit_tokens: int | None = Field(None, ge=1, le=10**12)
    """prompt and output tokens per minute and API key; beyond that 429"""
    max_queued_requests: int = Field(1024, ge=0, le=10**9)
    """maximum sequences waiting for the engine; beyond that 503 with Retry-After"""
    max_queued_tokens: int = Field(1_000_000, ge=1, le=10**12)
    """maximum prompt tokens waiting for their first output token; beyond that 503"""
    request_timeout: float | None = Field(None, gt=0, le=1e9)
    """maximum seconds per request [no limit]"""
    drain_timeout: float = Field(30.0, ge=0)
    """seconds for open requests to finish after SIGTERM"""
    client_stall_timeout: float = Field(300.0, ge=0, le=1e9)
    """seconds before a client that does not read its data is disconnected; 0 for never"""
    strict_fields: bool = False
    """refuse requests with unknown fields, which are otherwise ignored and reported in x-weft-ignored-fields"""
    max_body_mib: float | None = Field(None, gt=0, le=4096)
    """maximum size of a request body in MiB [1, plus 1 per 1024 tokens of context, up to 32]"""
    allow_special_tokens: bool = False
    """parse special tokens in user messages and tool results instead of treating them as text"""
    chat_template: str | None = Field(None, min_length=1)
    """file with a Jinja chat template, or the template itself, instead of the model's"""
    replicas: int = Field(1, ge=1, le=64)
    """engines per device, with one copy of the weights; requests are balanced over them, and they split the device's
    memory"""
    mps: bool = False
    """run the replicas of a GPU at the same time, with NVIDIA MPS, instead of alternating"""
    data_parallel_size: int = Field(1, ge=1, le=64)
    """GPUs to use, each with --replicas engines; on a CPU it multiplies --replicas"""
    models: list[dict[str, JsonValue]] = Field([], title="a list of models, each a text or a mapping with a model")
    """several models, each with its own options, such as 'ORG/NAME memory_share=0.4 max_num_seqs=64'; requests choose
    by name. Repeating --model does the same"""
    memory_share: float | None = Field(None, gt=0, le=1)
    """with several models: one model's fraction of the memory [equal shares]"""
    max_awake_models: int | None = Field(None, ge=1, le=1024)
    """with several models: maximum awake at once; the others sleep [as memory_share allows]"""
    wake_on_request: bool = True
    """wake a sleeping model when a request names it; otherwise such a request gets 503"""
    wake_timeout: float = Field(60.0, gt=0, le=1e9)
    """seconds that a request waits for its model to wake; then 503 with Retry-After"""
    tool_call_parser: ToolParserName = "auto"
    """format of the model's tool calls (names: --help-all); 'auto' detects it from the chat template"""
    reasoning_parser: ReasoningParserName = "auto"
    """format of the model's reasoning (names: --help-all); 'auto' detects it from the chat template, 'none' leaves it
    in the text"""
    pooling: Literal["auto", "last", "mean", "none"] = "auto"
    """hidden states to use as embeddings: the last token's or their mean; 'auto' follows 1_Pooling/config.json, else
    last, or mean for an encoder; 'none' disables /v1/embeddings"""
    classifier_from_token: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=2)
    """for a reranker that answers with a token, such as Qwen3-Reranker: its no and its yes; it then serves /v1/rerank
    [as the model's files say]"""
    tokenizer_threads: int = Field(2, ge=1, le=64)
    """threads for tokenization and chat templates"""
    restart_engine: bool = True
    """restart an engine process that ends or hangs, instead of ending the daemon"""
    engine_restart_limit: int = Field(10, ge=1, le=10**9)
    """maximum engine restarts within ten minutes; then the daemon exits with status 1"""
    hang_timeout: float = Field(30.0, ge=0, le=1e9)
    """seconds without progress before the engine is killed and its stacks are logged; 0 for never"""
    api_hang_timeout: float = Field(10.0, ge=0, le=1e9)
    """--hang-timeout for HTTP processes; 0 for never"""
    step_timeout: float = Field(600.0, gt=0, le=1e9)
    """maximum seconds of an iteration on a CPU; on a GPU --hang-timeout applies"""
    start_timeout: float = Field(600.0, gt=0, le=1e9)
    """maximum seconds without progress while loading and compiling"""
    files_dir: str | None = Field(None, min_length=1)
    """folder for files and batches; enables /v1/files and /v1/batches"""
    files_max_gib: float = Field(10.0, gt=0, le=2**20)
    """maximum size of --files-dir in GiB"""
    responses_dir: str | None = Field(None, min_length=1)
    """folder that keeps responses and conversations across restarts [in memory]"""
    responses_max_mib: float = Field(256.0, ge=0, le=2**30)
    """maximum size of stored responses in MiB; the oldest are dropped; 0 stores none"""
    responses_max_hours: float = Field(720.0, gt=0, le=10**6)
    """hours after which unused stored responses are dropped"""
    limit_images: int = Field(16, ge=0, le=1024)
    """images per request; 0 refuses images"""
    image_urls: bool = False
    """fetch images by http(s) URL, from public addresses; otherwise requests must contain them as data: URLs"""
    allowed_media_domains: list[str] = Field([])
    """with --image-urls: hosts that images may come from, such as images.example.org or *.example.org [all]"""
    allowed_local_media_path: str | None = Field(None, min_length=1)
    """folder from which requests may read images by file: URL [none]"""
    max_image_mib: float = Field(20.0, gt=0, le=256)
    """maximum size of an image file in MiB"""
    max_image_pixels: int = Field(50_000_000, ge=1024, le=2**28)
    """maximum width times height of an image"""
    log_level: LogLevel = "info"
    """minimum level of log lines on stderr"""
    log_format: Literal["text", "json"] = "text"
    """text lines, or one JSON object per line"""
    access_log: bool = True
    """log a line per request, except probes and scrapes"""
    log_requests: bool = False
    """also log request bodies, including prompts"""
    otlp_endpoint: str | None = Field(None, min_length=1)
    """URL of an OpenTelemetry collector for spans; needs the extra otel"""

    @field_validator("admin_api_key")
    @classmethod
    def _no_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be blank")
        return value

    @field_validator("served_model_name", "api_key", "cors_origin", "allowed_host", "allowed_media_domains")
    @classmethod
    def _no_empty_entries(cls, value: list[str]) -> list[str]:
        if any(not entry.strip() for entry in value):
            raise ValueError("must not contain an empty entry")
        return value

    @field_validator("root_path")
    @classmethod
    def _is_prefix(cls, value: str) -> str:
        value = value.rstrip("/")
        if value and not _ROOT_PATH.fullmatch(value):
            raise ValueError("must be a path such as /llm")
        return value

    @field_validator("cors_origin")
    @classmethod
    def _origins_as_browsers_send_them(cls, value: list[str]) -> list[str]:
        """Origins are compared literally, so one that no browser sends would silently match nothing."""
        if odd := [origin for origin in value if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin)]:
            like = "https://example.org (no trailing slash, no wildcard; '*' alone allows all)"
            raise ValueError(f"{odd[0]!r} is not an origin such as {like}")
        return value

    @field_validator("allowed_host", "allowed_media_domains")
    @classmethod
    def _hosts_as_browsers_send_them(cls, value: list[str]) -> list[str]:
        value = [host.lower().removesuffix(".") for host in value]
        if odd := [host for host in value if not HOST.fullmatch(host)]:
            raise ValueError(f"{odd[0]!r} is not a host such as llm.example.org or *.example.org, without a port")
        return value

    @field_validator("models", mode="before")
    @classmethod
    def _models_as_texts(cls, value: Any) -> Any:
        return [entry_of(each) if isinstance(each, str) else each for each in value] if type(value) is list else value

    @model_validator(mode="after")
    def _models_are_compatible(self) -> ServeConfig:
        if not self.models:
            return self
        if self.model != "demo" or self.model_preset is not None:
            raise ValueError("give --model or --models, not both")
        if self.served_model_name or self.memory_share is not None:
            raise ValueError("served_model_name and memory_share belong to each model: give them inside --models")
        if self.mps:
            raise ValueError("--mps: several models alternate on a GPU; serve one model, with replicas")
        for entry in self.models:
            if unknown := sorted(set(entry) - MODEL_OPTIONS):
                raise ValueError(f"models: {unknown[0]} is not an option of a single model")
        each = self.each
        for i, config in enumerate(each):
            if config.memory_share is None and _even_share(each, self.max_awake_models) <= 0:
                raise ValueError(f"models: no memory is left for number {i + 1}: give each model a memory_share")
        return self

    @model_validator(mode="after")
    def _companions_are_given(self) -> ServeConfig:
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        if self.uds is not None and self.tls_cert is not None:
            raise ValueError("--uds: a Unix socket has no TLS; remove tls_cert")
        if self.allowed_media_domains and not self.image_urls:
            raise ValueError("allowed_media_domains needs image_urls")
        if self.allowed_local_media_path is not None and not expanded(self.allowed_local_media_path).is_dir():
            raise ValueError(f"allowed_local_media_path: there is no folder {self.allowed_local_media_path}")
        if self.mps and self.replicas == 1:
            raise ValueError("--mps needs replicas of 2 or more")
        if self.slo and not self.adaptive_limit:
            raise ValueError("--slo needs max_num_seqs auto")
        return self

    @property
    def engine(self) -> EngineConfig:
        """The options of one engine process."""
        given = {name: getattr(self, name) for name in EngineConfig.model_fields}
        if self.kv_events_endpoint is not None:
            given["kv_events_topic"] = self.kv_topic(self.model_names[0])
        return EngineConfig.model_validate(given)

    @property
    def each(self) -> list[ServeConfig]:
        """The configuration of each model: the common options and its own. Raises `ValueError`."""
        if not self.models:
            return [self]
        common = self.model_dump(exclude={"models", "model"}, exclude_unset=True)
        found = []
        for i, entry in enumerate(self.models):
            lists = {k: [v] for k, v in entry.items() if isinstance(v, str) and k in LIST_OPTIONS}
            try:
                found.append(ServeConfig.model_validate({**common, **entry, **lists}))
            except ValidationError as error:
                name, reason = invalid_option(error, ServeConfig)
                raise ValueError(f"models, number {i + 1}: {name}{': ' if name else ''}{reason}") from None
        return found

    @property
    def memory_shares(self) -> list[float]:
        """Each model's fraction of the memory. Models that may be awake together sum to 1 at most."""
        each = self.each
        even = _even_share(each, self.max_awake_models)
        return [even if config.memory_share is None else config.memory_share for config in each]

    @property
    def engine_numbers(self) -> list[range]:
        """Each model's engine numbers; engines are numbered consecutively across models."""
        found: list[range] = []
        for config in self.each:
            first = found[-1].stop if found else 0
            found.append(range(first, first + config.num_engines))
        return found

    @property
    def num_engines(self) -> int:
        """Engines of all models."""
        if self.models:
            return sum(config.num_engines for config in self.each)
        return self.replicas * self.data_parallel_size

    @property
    def model_names(self) -> list[str]:
        """The names to show, the first of which answers carry."""
        return [name for name in self.served_model_name if name != ANY_NAME] or [self.model_name]

    @property
    def any_name(self) -> bool:
        """Requests may use any name that no other model has."""
        return ANY_NAME in self.served_model_name


LIST_OPTIONS = frozenset(
    name for name, field in ServeConfig.model_fields.items() if get_origin(field.annotation) is list
)
"""Options with several values. A model's entry may give one value without a list."""


def entry_of(text: str) -> dict[str, JsonValue]:
    """Parse `MODEL option=value ...`; a repeated option becomes a list. Raises `ValueError`."""
    words = shlex.split(text)
    if not words or "=" in words[0]:
        raise ValueError(f"models: {text!r} must start with a model")
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
    """Return the memory fraction of each model without `memory_share`. `most`: models awake at once."""
    given = [config.memory_share for config in each if config.memory_share is not None]
    if not given:
        return 1 / min(len(each), most or len(each))
    return (1 - sum(given)) / max(1, len(each) - len(given))
