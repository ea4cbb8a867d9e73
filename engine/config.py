"""`EngineConfig`: everything the engine can be told, validated once. `None` means: decided when the device is known."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from weft.engine.demo import MODEL_PATH as DEMO_MODEL_PATH
from weft.engine.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "native", "transformers"]
Pod = Literal["off", "auto", "on"]
Attention = Literal["auto", "triton", "flash-attn", "torch"]

NO_OPTION: dict[str, JsonValue] = {"option": False}
"""marks a field that is no option: a daemon tells it to its engines"""
PRESETS = Path(__file__).parent / "model" / "presets"
"""configurations of known models, a folder each"""
MAX_BATCHED_TOKENS = 65536
"""of an iteration"""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip
"""a model that has a tokenizer has one of these"""
_AUTO = r"^auto(:[1-9]\d{0,2}|:[1-3]\d{3}|:40[0-8]\d|:409[0-6])?$"
_SEATS = Field(pattern=_AUTO, title="auto or auto:N")
_ADDRESS = "tcp://ADDRESS:PORT or ipc://PATH"
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/[0-9a-f]{40}$")
"""a directory of the hub's cache"""

MEASURES = {
    "itl": "time between two tokens of a request",
    "ttft": "time to its first token",
    "tpot": "time per output token behind the first",
    "e2e": "its whole time",
}
"""what an objective may be on"""
_STATISTIC = re.compile(r"mean|median|max|p(\d{1,2}(?:\.\d+)?)")
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m)?")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def cache_home() -> Path:
    """Of what can be made anew. Raises `ConfigError` where nobody knows the user's home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"
    except RuntimeError:
        raise ConfigError(f"user {os.getuid()} has no home directory: set HOME or XDG_CACHE_HOME") from None


def expanded(path: str | Path) -> Path:
    """With the user's home for a `~` in front. Raises `ConfigError` where nobody knows it."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path}: nobody knows that home directory; write the whole path") from None


class Objective(NamedTuple):
    """A service level objective, as `weft load --slo` has them: `itl:p99:50ms`."""

    measure: str
    statistic: float | None
    """a percentile; None for the mean"""
    limit: float
    """in seconds"""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Raises `ConfigError`, one line."""
        parts = text.strip().lower().split(":")
        if len(parts) != 3:
            raise ConfigError(f"{text!r} is not MEASURE:STATISTIC:LIMIT, such as itl:p99:50ms")
        measure, statistic, limit = parts
        if measure not in MEASURES:
            raise ConfigError(f"{measure!r} in {text!r} is none of {', '.join(MEASURES)}")
        if (found := _STATISTIC.fullmatch(statistic)) is None:
            raise ConfigError(f"{statistic!r} in {text!r} is none of mean, median, max, p50, p99, p99.9 …")
        if (number := _LIMIT.fullmatch(limit)) is None or float(number[1]) <= 0:
            raise ConfigError(f"{limit!r} in {text!r} is not a time such as 50ms or 2s")
        q = {"mean": None, "median": 50.0, "max": 100.0}.get(statistic, float(found[1]) if found[1] else None)
        return cls(measure, q, float(number[1]) * _UNITS[number[2] or "s"])

    def __str__(self) -> str:
        statistic = {None: "mean", 100.0: "max"}.get(self.statistic) or f"p{self.statistic:g}"
        limit = f"{self.limit * 1e3:g}ms" if self.limit < 1 else f"{self.limit:g}s"
        return f"{self.measure}:{statistic}:{limit}"

    def of(self, values: np.ndarray) -> float:
        """The statistic of some values, in seconds; NaN of none."""
        if not len(values):
            return float("nan")
        if self.statistic is None:
            return float(values.mean())
        import numpy as np

        return float(np.percentile(values, self.statistic))


def itl_objective(text: str) -> Objective:
    """On the time between tokens: a limit alone is of the 99th percentile, an objective needs no measure. Raises
    `ConfigError`, one line."""
    words = text.strip().split(":")
    objective = Objective.parse(":".join([*("itl", "p99")[: max(0, 3 - len(words))], *words]))
    if objective.measure != "itl":
        raise ConfigError(f"{objective.measure} is not the time between tokens (itl): 50ms or p99:50ms, say")
    return objective


def kept_percentiles(objectives: Iterable[Objective]) -> list[Objective]:
    """Those that few late tokens break."""
    return [o for o in objectives if o.statistic is not None and o.statistic > 50]


class Share(BaseModel):
    """What a daemon with several engines gives one of them of the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: int = 0
    """its number"""
    sharers: int = 1
    """engines on the same device, this one included"""
    weight_sharers: int = 1
    """those of them that have its weights in common (`runner/shared_weights.py`)"""
    cpus: tuple[int, ...] = ()
    """cores that it keeps to; none: all"""
    gpu: str = ""
    """the only one that it sees, as `CUDA_VISIBLE_DEVICES` names it; empty: all"""
    sleeps: bool = False
    """its memory can be given back and taken again (`runner/resting.py`)"""
    memory: float = 1.0
    """part of the device's memory that its model may take; 1: it has no neighbours"""
    models: int = 1
    """of the daemon, which take turns on the device"""
    awake: int = 1
    """of these, at most, at the same time"""


class EngineConfig(BaseModel):
    """Options of one engine. The field descriptions are the text of `weft serve --help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    GROUPS: ClassVar[dict[str, str]] = {
        "model": "model",
        "device": "device and precision",
        "max_model_len": "how much at once",
        "page_size": "KV pages and where they are kept",
        "attention_backend": "how it is computed",
    }
    """of `weft serve --help`: the first field of each group, and its title"""

    model: str = Field(
        "demo",
        description="'demo' for the embedded demo model, a Hugging Face model directory, a GGUF file, or ORG/NAME on "
        "the hub (ORG/NAME:FILE for a GGUF file of it), downloaded once",
    )
    model_preset: str | None = Field(
        None,
        min_length=1,
        description="a shape that weft knows, instead of a model, with --load-format dummy: qwen3-30b-a3b and others "
        "(weft inspect --model-preset help)",
    )
    revision: str | None = Field(None, min_length=1, description="branch, tag or commit of ORG/NAME [main]")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="'auto' reads the files; 'dummy' fills the config's shapes with seeded random weights"
    )
    model_impl: ModelImpl = Field(
        "auto",
        description="'native' for weft's own layers, 'transformers' for the code of transformers with weft's "
        "attention, slower; 'auto' takes the second where the first does not know the architecture",
    )
    trust_remote_code: bool = Field(
        False, description="run code that a model's directory brings, with your rights; only from people you trust"
    )
    dummy_weights: Literal["plain", "realistic"] = Field(
        "plain",
        description="with --load-format dummy: 'realistic' has the scales and outlier channels of trained weights, "
        "which a card's power depends on",
    )
    dummy_skew: float = Field(
        0.0,
        ge=0,
        le=100,
        description="with --load-format dummy, which routes at random: added to the router's logits of the first "
        "eighth of the experts, so that they take most tokens",
    )
    device: Device = Field("auto", description="where the model runs; 'auto' takes a GPU when there is one")
    dtype: DType = Field(
        "auto",
        description="weights and KV; 'auto' is the checkpoint's on a GPU; on a CPU bfloat16 if native",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="K and V in their pages: 'auto' as --dtype; 'fp8' in e4m3, half of bfloat16's bytes, with the "
        "checkpoint's scales, or 1. On a GPU experimental",
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="'fp8': a checkpoint in 16 bits becomes FP8 while it loads (e4m3, a scale for each output channel; "
        "embedding, head, routers and norms stay). FP8 checkpoints are read as they are, without this. "
        "On a GPU experimental [as the checkpoint is]",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="prompt and output tokens per request at most [the model's own limit]"
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | Annotated[str, _SEATS] | None = Field(
        None,
        description="requests running at once; 'auto' (auto:N: N at most) as many as keep --slo at the time "
        "[CPU 256, GPU 1024]",
    )
    slo: list[str] = Field(
        [],
        description="what --max-num-seqs auto keeps: itl:STATISTIC:LIMIT, such as itl:p99:50ms, of the time between "
        "two tokens of a request",
    )
    itl_slo: str | None = Field(
        None,
        description="time between two tokens of a request that prompts must leave them, 50ms or p99:50ms, say: prompts "
        "computed beside decodes are cut to what fits, not to the dense batch [off; with --max-num-seqs auto the "
        "shortest percentile of --slo]",
    )
    itl_slo_patience: float = Field(
        5.0,
        gt=0,
        le=3600,
        description="with --itl-slo: once a prompt has been first in line for so many seconds, more of it is computed "
        "than fits, all that the dense batch holds at twice as many",
    )
    max_num_batched_tokens: int | None = Field(
        None, ge=1, le=MAX_BATCHED_TOKENS,
        description="the dense batch: tokens per iteration at most [CPU 512, GPU 2048]",
    )  # fmt: skip
    page_size: int = Field(64, ge=1, le=1024, description="tokens per KV page")
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        description="memory for KV pages in GiB [CPU: up to a quarter of RAM; GPU: what is left]",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=0.98, description="share of the GPU's memory for weights, buffers and KV pages"
    )
    num_pages: int | None = Field(None, ge=2, lt=2**31, description="KV pages, instead of --kv-cache-gib")
    prefix_caching: bool = Field(True, description="reuse the KV pages of shared prefixes")
    pinned_cache_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of the KV pages that requests may have kept for a time (cache_control, prompt_cache_key); "
        "these are evicted last; 0 for none",
    )
    host_kv_gib: float = Field(
        0.0, ge=0, description="pinned host memory in GiB that keeps KV pages beyond the GPU's; 0 for none"
    )
    idle_spill_seconds: float = Field(
        30.0,
        ge=0,
        le=86400,
        description="pages that nobody used for so long are copied to the tiers below in the background; 0 for never",
    )
    ssd_kv_path: str | None = Field(
        None, min_length=1, description="directory that keeps KV pages beyond the host's, across restarts; one daemon's"
    )
    tier_kv_format: Literal["raw", "packed"] = Field(
        "raw",
        description="KV pages on host and SSD: 'packed' keeps bfloat16 in 12 bits a value, exactly, so that nearly a "
        "third more pages fit and pass the link; one that does not pack stays as it is",
    )
    ssd_kv_gib: float = Field(64.0, gt=0, description="disk space in GiB for --ssd-kv-path, taken at start")
    kv_events_endpoint: str | None = Field(
        None,
        pattern=r"^(tcp://.+:(\d+|\*)|ipc://.+)$",
        title=_ADDRESS,
        description="ZeroMQ address, tcp://*:5557 say, that tells routers of KV pages and their tokens [off]",
    )
    kv_events_replay_endpoint: str | None = Field(
        None,
        pattern=r"^(tcp://.+:(\d+|\*)|ipc://.+)$",
        title=_ADDRESS,
        description="address that sends them again, tcp://*:5558 say [off]",
    )
    kv_events_topic: str | None = Field(
        None, min_length=1, max_length=255, description="their topic [kv@POD@MODEL: $POD_IP or the host, and the name]"
    )
    attention_backend: Attention = Field(
        "auto", description="attention kernels; 'auto' is triton on a GPU, torch on a CPU; flash-attn needs its package"
    )
    pod: Pod = Field(
        "off",
        description="attention of decodes and of prompts' chunks in one launch (POD-Attention; Hopper GPUs, the serial "
        "plan): 'auto' in the way that measured batches (weft bench attention --keep) or a rule say, 'on' always with "
        "both on every SM at the same time; experimental",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=8,
        description="ranks: processes that share one model, each with a part of its weights and KV; on GPUs one each, "
        "experimental. Sizes of memory and disk are for all of them together",
    )
    batch_invariant: bool = Field(
        False,
        description="one accumulation order everywhere: a request's tokens and log-probabilities never depend on its "
        "neighbours; they may in the last bits where it was preempted or began with a cached prefix. Slower",
    )
    cache_dir: str | None = Field(
        None, min_length=1, description="folder of compiled kernels and tuned tiles [$XDG_CACHE_HOME/weft]"
    )
    tuning_seconds: float = Field(
        60.0, ge=0, description="time a start on a GPU may take to tune matrix shapes never seen before; 0 for none"
    )
    fair_prefill_share: float = Field(
        0.25,
        ge=0,
        le=0.5,
        description="share of each iteration's prompt tokens, and of seats when they are short, "
        "for the shortest prompts; the rest is first come, first served; 0 for none",
    )
    priority_preemption: bool = Field(
        True, description="when all seats are taken, a better priority takes that of a worse one, which resumes later"
    )
    async_scheduling: bool = Field(True, description="schedule the next iteration while this one runs")
    late_launch: bool | None = Field(
        None,
        description="schedule the next iteration shortly before the one that runs ends, so that requests that come "
        "meanwhile are in it [on where an engine has one GPU for itself]",
    )
    plan: str = Field(
        "auto",
        description="pipeline of nano-batches: a file that `weft search` wrote, 'serial' for none, "
        "or 'auto': a shipped one that fits the model and the GPU",
    )
    wait_for_plan: bool = Field(
        False,
        description="serve only once all pipelines of the plan are there, not as soon as the serial plan is, "
        "while they are compiled and captured beside it",
    )
    cpu_threads: int | None = Field(None, ge=1, description="threads for CPU execution [all cores but one]")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of dummy weights and of requests that bring none")
    share: Share = Field(Share(), description="one engine's share of the machine", json_schema_extra=NO_OPTION)

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a model directory, or 'demo'")
        return value

    @staticmethod
    def known_preset(name: str) -> str:
        """The name, if weft has such a preset. Raises `ConfigError`, which lists them."""
        known = sorted(path.parent.name for path in PRESETS.glob("*/config.json"))
        if name not in known:
            raise ConfigError(f"there is no model preset {name!r}; there are {', '.join(known)}")
        return name

    @model_validator(mode="after")
    def _a_preset_has_no_weights(self) -> EngineConfig:
        if self.model_preset is not None:
            try:
                self.known_preset(self.model_preset)
            except ConfigError as error:
                raise ValueError(str(error)) from None
            if self.load_format != "dummy":
                raise ValueError("model_preset is a shape without weights: it needs load_format dummy")
            if self.model != "demo":
                raise ValueError("give model or model_preset, not both")
        return self

    @model_validator(mode="after")
    def _only_dummies_are_skewed(self) -> EngineConfig:
        if self.dummy_skew and self.load_format != "dummy":
            raise ValueError("dummy_skew needs load_format dummy: a checkpoint's router stays as it is")
        if self.dummy_weights != "plain" and self.load_format != "dummy":
            raise ValueError("dummy_weights needs load_format dummy: a checkpoint has weights of its own")
        return self

    @model_validator(mode="after")
    def _one_pool_size(self) -> EngineConfig:
        if self.kv_cache_gib is not None and self.num_pages is not None:
            raise ValueError("give kv_cache_gib or num_pages, not both")
        return self

    @field_validator("slo")
    @classmethod
    def _objectives_are_such(cls, value: list[str]) -> list[str]:
        try:
            return [str(Objective.parse(text)) for text in value]
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("itl_slo")
    @classmethod
    def _a_time_between_tokens(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(itl_objective(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _seats_keep_something(self) -> EngineConfig:
        if not self.adapts:
            return self
        if not self.slo:
            raise ValueError("max_num_seqs auto needs --slo, which it keeps: itl:p99:50ms, say")
        if other := next((o for o in self.objectives if o.measure != "itl"), None):
            raise ValueError(
                f"max_num_seqs auto keeps the time between tokens (itl) alone, which fewer running requests make "
                f"shorter; of {other.measure} that is not so: {other}"
            )
        return self

    @model_validator(mode="after")
    def _late_only_where_ahead(self) -> EngineConfig:
        if self.late_launch and not self.async_scheduling:
            raise ValueError("late_launch needs async_scheduling, which launches ahead at all")
        return self

    @model_validator(mode="after")
    def _patience_with_a_limit(self) -> EngineConfig:
        if self.itl_objective is None and self.itl_slo_patience != type(self).model_fields["itl_slo_patience"].default:
            raise ValueError(
                "itl_slo_patience needs itl_slo, or max_num_seqs auto with a percentile: else no prompt is cut"
            )
        return self

    @model_validator(mode="after")
    def _tiers_rest_on_each_other(self) -> EngineConfig:
        if self.host_kv_gib and not self.prefix_caching:
            raise ValueError("host_kv_gib needs prefix_caching")
        if self.tier_kv_format != "raw" and not self.host_kv_gib:
            raise ValueError("tier_kv_format needs host_kv_gib: it is of the tiers below the device")
        if self.ssd_kv_path is not None and not self.host_kv_gib:
            raise ValueError("ssd_kv_path needs host_kv_gib: pages reach the disk through host memory")
        return self

    @model_validator(mode="after")
    def _events_of_something(self) -> EngineConfig:
        if self.kv_events_endpoint is not None and not self.prefix_caching:
            raise ValueError("kv_events_endpoint needs prefix_caching")
        if self.kv_events_replay_endpoint is not None and self.kv_events_endpoint is None:
            raise ValueError("kv_events_replay_endpoint needs kv_events_endpoint")
        return self

    def for_measuring(self) -> EngineConfig:
        """The same, for an engine that is ready only when nothing is left to be done beside its work."""
        return self.model_copy(update={"wait_for_plan": True})

    @property
    def adapts(self) -> bool:
        """The bound on running requests follows what is measured."""
        return isinstance(self.max_num_seqs, str)

    @property
    def seats(self) -> int | None:
        """Requests that may ever run at once; None: not said."""
        if isinstance(self.max_num_seqs, str):
            return int(self.max_num_seqs.partition(":")[2] or 0) or None
        return self.max_num_seqs

    @property
    def itl_objective(self) -> Objective | None:
        """What prompts computed beside decodes must leave them. A percentile that the bound on running requests keeps
        is kept by prompts, too: however few run, a whole dense batch of prompts makes the next token late.

        None: nothing is asked of them."""
        if self.itl_slo is not None:
            return itl_objective(self.itl_slo)
        return min(self.kept_percentiles, key=lambda o: o.limit, default=None)

    @property
    def kept_percentiles(self) -> list[Objective]:
        """Of what the bound on running requests keeps, those that few late tokens break."""
        return kept_percentiles(self.objectives) if self.adapts else []

    @property
    def objectives(self) -> list[Objective]:
        return [Objective.parse(text) for text in self.slo]

    @property
    def model_path(self) -> Path:
        if self.model_preset is not None:
            return PRESETS / self.model_preset
        return DEMO_MODEL_PATH if self.model == "demo" else expanded(self.model)

    @property
    def stands_in(self) -> bool:
        """The model has no tokenizer, and with made-up weights none is needed that fits: the demo's is taken."""
        return self.load_format == "dummy" and not any((self.model_path / name).exists() for name in TOKENIZER_FILES)

    @property
    def tokenizer_path(self) -> Path:
        return DEMO_MODEL_PATH if self.stands_in else self.model_path

    def kv_topic(self, name: str) -> str:
        """Of the KV events of a model that is served under this name."""
        pod = os.environ.get("POD_IP") or socket.gethostname()
        return self.kv_events_topic or f"kv@{pod}@{name}"

    @property
    def cache_path(self) -> Path:
        return cache_home() if self.cache_dir is None else expanded(self.cache_dir)

    @property
    def model_name(self) -> str:
        """The name the model is served under unless the operator gives another: the directory's, as it was given. That
        of a link stays when the link leads to other weights."""
        if self.model_preset is not None:
            return self.model_preset
        if self.model == "demo":
            return "demo"
        path = os.path.abspath(self.model_path)
        of_hub = _SNAPSHOT.search(path)
        return f"{of_hub[1]}/{of_hub[2]}" if of_hub else os.path.basename(path)
