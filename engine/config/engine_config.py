"""`EngineConfig`: all options of one engine, validated once. `None` means: chosen once the device is known."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from weft.engine.config.objectives import Objective, itl_objective, kept_percentiles
from weft.engine.config.option_groups import ENGINE_GROUPS, OptionGroup, described
from weft.engine.config.paths import PRESETS, TOKENIZER_FILES, cache_home, expanded
from weft.engine.config.speculation import MOST_DRAFTS, DraftOptions, Speculation, draft_options, parse_config
from weft.engine.demo import MODEL_PATH as DEMO_MODEL_PATH
from weft.engine.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
ModelImpl = Literal["auto", "native", "transformers"]
Pod = Literal["off", "auto", "on"]
Attention = Literal["auto", "triton", "flash-attn", "torch"]

NO_OPTION: dict[str, JsonValue] = {"option": False}
"""Marks a field that is not an option: the daemon sets it for each engine."""
MAX_BATCHED_TOKENS = 65536
"""Tokens per iteration, at most."""
_AUTO = r"^auto(:[1-9]\d{0,2}|:[1-3]\d{3}|:40[0-8]\d|:409[0-6])?$"
_LORA_MODULE, _LORA_TITLE = r"^[^=\s,]+=.+$", "NAME=PATH, with a NAME without spaces and commas"
_SEQUENCE_LIMIT = Field(pattern=_AUTO, title="auto or auto:N")
_ADDRESS = "tcp://ADDRESS:PORT or ipc://PATH"
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)/snapshots/[0-9a-f]{40}$")
"""A snapshot directory of the Hugging Face cache."""


class Share(BaseModel):
    """One engine's share of the machine, assigned by a daemon with several engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: int = 0
    """Number of this engine."""
    sharers: int = 1
    """Engines on the same device, including this one."""
    weight_sharers: int = 1
    """Engines among them that share one copy of the weights."""
    cpus: tuple[int, ...] = ()
    """Cores to pin the engine to; empty for no pinning."""
    gpu: str = ""
    """The only visible GPU, in the format of `CUDA_VISIBLE_DEVICES`; empty for all."""
    sleeps: bool = False
    """Whether the engine can release its memory and take it back."""
    memory: float = 1.0
    """Fraction of the device's memory for the model; 1 if it has the device to itself."""
    models: int = 1
    """Models of the daemon, which take turns on the device."""
    awake: int = 1
    """Models that may be awake at the same time."""
    pixels: str = ""
    """Directory of the shelf with the pixels of images (`wire.pixels`); empty: no image has any."""


@described
class EngineConfig(BaseModel):
    """Options of one engine. The text below a field is its description in `weft serve --help`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    GROUPS: ClassVar[tuple[OptionGroup, ...]] = ENGINE_GROUPS

    model: str = "demo"
    """'demo', a Hugging Face model directory, a GGUF file, or ORG/NAME on the hub (ORG/NAME:FILE for a GGUF file),
    which is downloaded once"""
    model_preset: str | None = Field(None, min_length=1)
    """built-in model shape to use with --load-format dummy, such as qwen3-30b-a3b (list: weft inspect --model-preset
    help)"""
    revision: str | None = Field(None, min_length=1)
    """branch, tag or commit of ORG/NAME [main]"""
    load_format: Literal["auto", "dummy"] = "auto"
    """'auto' loads the checkpoint; 'dummy' fills the config's shapes with seeded random weights"""
    model_impl: ModelImpl = "auto"
    """'native' uses weft's layers, 'transformers' its slower code with weft's attention; 'auto' falls back to
    transformers for unknown architectures"""
    trust_remote_code: bool = False
    """run code from the model's directory with your privileges; only for sources you trust"""
    dummy_weights: Literal["plain", "realistic"] = "plain"
    """with --load-format dummy: 'realistic' imitates scales and outlier channels of trained weights, which affect a
    GPU's power"""
    dummy_skew: float = Field(0.0, ge=0, le=100)
    """with --load-format dummy: bias added to the router logits of the first eighth of the experts"""
    device: Device = "auto"
    """device to run on; 'auto' uses a GPU if there is one"""
    dtype: DType = "auto"
    """dtype of weights and KV; 'auto' is the checkpoint's on a GPU, bfloat16 on a CPU that supports it"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """dtype of KV pages: 'auto' is --dtype; 'fp8' is e4m3 with the checkpoint's scales, or 1 (on GPUs tested on the
    H200)"""
    quantization: Literal["fp8", "none"] | None = None
    """'fp8' converts a 16-bit checkpoint to e4m3 at load time, one scale per output channel (on GPUs tested on the
    H200). FP8 checkpoints do not need it. 'none' widens matrices in 4 and 8 bits to --dtype, exactly; by default a CPU
    computes with them as they are, with activations in int8"""
    max_model_len: int | None = Field(None, ge=2)
    """maximum prompt and output tokens per request [the model's limit]"""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | Annotated[str, _SEQUENCE_LIMIT] | None = None
    """maximum requests running at once; 'auto' or 'auto:MAX' adapts the limit to keep --slo [CPU 256, GPU 1024]"""
    slo: list[str] = Field([])
    """objectives for --max-num-seqs auto, as itl:STATISTIC:LIMIT; itl is the time between two tokens of a request, as
    in itl:p99:50ms"""
    itl_slo: str | None = None
    """limit on the time between tokens while prompts are being computed, such as 50ms or p99:50ms; prefill chunks are
    shortened to keep it [off; with --max-num-seqs auto, the tightest percentile limit in --slo]"""
    itl_slo_patience: float = Field(5.0, gt=0, le=3600)
    """with --itl-slo: seconds at the head of the queue before a prompt may exceed the limit; at twice that it gets the
    full token budget"""
    max_num_batched_tokens: int | None = Field(None, ge=1, le=MAX_BATCHED_TOKENS)
    """maximum tokens per iteration, prompts and decodes together [CPU 512, GPU 2048]"""
    page_size: int = Field(64, ge=1, le=1024)
    """tokens per KV page"""
    kv_cache_gib: float | None = Field(None, gt=0)
    """memory for KV pages in GiB [CPU: up to a quarter of RAM; GPU: the remaining memory]"""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=0.98)
    """fraction of GPU memory for weights, buffers and KV pages"""
    num_pages: int | None = Field(None, ge=2, lt=2**31)
    """number of KV pages, instead of --kv-cache-gib"""
    prefix_caching: bool = True
    """reuse the KV pages of shared prefixes"""
    pinned_cache_share: float = Field(0.5, ge=0, le=1)
    """fraction of KV pages that requests may retain for a time (cache_control, prompt_cache_key); 0 disables retention
    """
    host_kv_gib: float = Field(0.0, ge=0, le=2**20)
    """pinned host memory in GiB for copies of KV pages, kept after the device evicts them; 0 disables it"""
    idle_spill_seconds: float = Field(30.0, ge=0, le=86400)
    """copy KV pages to the lower tiers in the background after this many idle seconds; 0 disables it"""
    ssd_kv_path: str | None = Field(None, min_length=1)
    """directory for KV pages from host memory; survives restarts, used by one daemon at a time; needs --host-kv-gib"""
    encoder_cache_tokens: int | None = Field(None, ge=1, le=2**24)
    """embeddings of images to keep for later prompts; an image may not have more [twice --max-num-batched-tokens, or
    the context limit up to 16384]"""
    state_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """dtype of recurrent states (Mamba, gated delta rule); 'auto' is the model's, usually float32. Convolutions keep
    the dtype of activations"""
    state_interval: int = Field(0, ge=0, le=2**24)
    """tokens between saved recurrent states in long prompts; 0 saves them only at a prompt's end, at its cache_control
    marks and where prompts diverge"""
    tier_kv_format: Literal["raw", "packed"] = "raw"
    """format of KV pages on host and SSD: 'packed' stores bfloat16 losslessly in 12 bits per value; pages that do not
    pack stay raw"""
    ssd_kv_gib: float = Field(64.0, gt=0, le=2**20)
    """disk space in GiB for --ssd-kv-path, allocated at start"""
    enable_lora: bool = False
    """serve LoRA adapters over the model, also without `lora_modules`"""
    lora_modules: list[Annotated[str, Field(pattern=_LORA_MODULE, title=_LORA_TITLE)]] = Field([])
    """adapters to load at start and their model names; may be repeated; a directory in PEFT's format each"""
    lora_dir: str | None = Field(None, min_length=1)
    """folder with a directory per LoRA adapter, which a request for a model of that name loads; the only folder from
    which adapters may be loaded while serving"""
    max_loras: int = Field(8, ge=1, le=1024)
    """adapters in memory at once; the others are loaded again when a request needs them"""
    max_cpu_loras: int | None = Field(None, ge=1, le=65536)
    """adapters in host memory, those in use on a GPU included; others are read from their files again [none is kept]"""
    max_lora_rank: int = Field(64, ge=1, le=512)
    """largest rank of an adapter"""
    kv_events_endpoint: str | None = Field(None, pattern=r"^(tcp://.+:(\d+|\*)|ipc://.+)$", title=_ADDRESS)
    """ZeroMQ address that publishes KV cache events for routers, such as tcp://*:5557 [off]"""
    kv_events_replay_endpoint: str | None = Field(None, pattern=r"^(tcp://.+:(\d+|\*)|ipc://.+)$", title=_ADDRESS)
    """ZeroMQ address that replays KV cache events, such as tcp://*:5558 [off]"""
    kv_events_topic: str | None = Field(None, min_length=1, max_length=255)
    """topic of KV cache events [kv@POD@MODEL: $POD_IP or the host name, and the model name]"""
    attention_backend: Attention = "auto"
    """attention kernels; 'auto' is triton on a GPU, torch on a CPU; flash-attn needs its package"""
    pod: Pod = "off"
    """run attention of decodes and prefill chunks in one launch (POD-Attention; Hopper, serial plan, experimental):
    'auto' follows measurements (weft bench attention --keep) or a rule"""
    tensor_parallel_size: int = Field(1, ge=1, le=8)
    """ranks that share one model, each with a shard of weights and KV; one GPU each (tested on 2 and 4 H200s). Memory
    and disk sizes are for all ranks together"""
    speculation: Speculation = "off"
    """verify several drafted tokens of a request per iteration, which changes no token; drafts repeat the request's own
    text. 'auto' drafts as much as measurements show to pay, 'suffix' and 'ngram' draft as much as they can"""
    speculation_depth: int | None = Field(None, ge=1, le=MOST_DRAFTS)
    """maximum draft tokens of a request per iteration [16; ngram 5]"""
    speculative_config: str | None = Field(None, min_length=1)
    """vLLM's JSON instead of --speculation, such as {"method": "eagle3", "model": DIR}; keys that weft does not support
    are refused"""
    batch_invariant: bool = False
    """make a request's tokens and log-probabilities independent of the batch; slower. Preemption may still
    change the last bits of a model with recurrent layers"""
    enforce_eager: bool = False
    """run without CUDA graphs and without a nano-batch plan, for debugging; slower. No effect on a CPU"""
    cache_dir: str | None = Field(None, min_length=1)
    """folder of compiled kernels and tuned tiles [$XDG_CACHE_HOME/weft]"""
    tuning_seconds: float = Field(60.0, ge=0, le=1e9)
    """seconds that a start on a GPU may spend tuning new matrix shapes; 0 disables tuning"""
    fair_prefill_share: float = Field(0.25, ge=0, le=0.5)
    """share of prefill tokens, and of scarce slots, for the shortest prompts; the rest is shared round robin over
    API keys; 0 disables it"""
    priority_preemption: bool = True
    """let a higher priority preempt a lower one when all slots are taken"""
    async_scheduling: bool = True
    """schedule the next iteration while the current one runs"""
    late_launch: bool | None = None
    """schedule the next iteration just before the current one ends, so that late arrivals can join it [on if an engine
    has a GPU to itself]"""
    plan: str = "auto"
    """nano-batch pipeline: a file from `weft search`, 'serial' for none, or 'auto' for a shipped plan that fits the
    model and GPU"""
    wait_for_plan: bool = False
    """wait until all pipelines of the plan are compiled and captured, instead of serving with the serial plan meanwhile
    """
    cpu_threads: int | None = Field(None, ge=1, le=1024)
    """threads for CPU execution [all cores but one]"""
    seed: int = Field(0, ge=0, lt=2**63)
    """seed of dummy weights and of requests without a seed"""
    chat_template: str | None = Field(None, json_schema_extra=NO_OPTION)
    """Chat template, or its file, that replaces the model's; the tokens that end its answers are end tokens."""
    share: Share = Field(Share(), json_schema_extra=NO_OPTION)
    """one engine's share of the machine"""

    @field_validator("model")
    @classmethod
    def _model_is_named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must name a model directory, or 'demo'")
        return value

    @staticmethod
    def known_preset(name: str) -> str:
        """Return `name` if the preset exists. Raises `ConfigError`, which lists all presets."""
        known = sorted(path.parent.name for path in PRESETS.glob("*/config.json"))
        if name not in known:
            raise ConfigError(f"unknown model preset {name!r}; choose one of {', '.join(known)}")
        return name

    @field_validator("slo")
    @classmethod
    def _valid_objectives(cls, value: list[str]) -> list[str]:
        try:
            return [str(Objective.parse(text)) for text in value]
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("itl_slo")
    @classmethod
    def _valid_itl_objective(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(itl_objective(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("speculative_config")
    @classmethod
    def _valid_speculative_config(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                parse_config(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _options_are_compatible(self) -> EngineConfig:
        if self.model_preset is not None:
            try:
                self.known_preset(self.model_preset)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        if conflict := next((text for wrong, text in self._conflicts() if wrong), None):
            raise ValueError(conflict)
        return self

    def _conflicts(self) -> Iterator[tuple[object, str]]:
        """Yield conditions that must be false, each with its error."""
        preset, dummy, tiered = self.model_preset is not None, self.load_format == "dummy", bool(self.host_kv_gib)
        yield preset and not dummy, "model_preset has no weights: it needs load_format dummy"
        yield preset and self.model != "demo", "give model or model_preset, not both"
        yield self.dummy_skew and not dummy, "dummy_skew needs load_format dummy"
        yield self.dummy_weights != "plain" and not dummy, "dummy_weights needs load_format dummy"
        yield self.kv_cache_gib is not None and self.num_pages is not None, "give kv_cache_gib or num_pages, not both"
        yield self.adaptive_limit and not self.slo, "max_num_seqs auto needs --slo, such as itl:p99:50ms"
        other = next((o for o in self.objectives if o.measure != "itl"), None) if self.adaptive_limit else None
        yield other, f"max_num_seqs auto only limits the time between tokens (itl), not {other}"
        yield self.late_launch and not self.async_scheduling, "late_launch needs async_scheduling"
        few = self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras
        yield few, f"max_cpu_loras must be at least max_loras ({self.max_loras})"
        many = self.max_cpu_loras is not None and self.tensor_parallel_size > 1
        yield many, "max_cpu_loras needs tensor_parallel_size 1"
        patient = self.itl_slo_patience != type(self).model_fields["itl_slo_patience"].default
        needs = "itl_slo_patience needs itl_slo, or max_num_seqs auto with a percentile"
        yield self.itl_objective is None and patient, needs
        yield tiered and not self.prefix_caching, "host_kv_gib needs prefix_caching"
        yield self.state_interval and not self.prefix_caching, "state_interval needs prefix_caching"
        yield self.tier_kv_format != "raw" and not tiered, "tier_kv_format needs host_kv_gib"
        ssd = self.ssd_kv_path is not None and not tiered
        yield ssd, "ssd_kv_path needs host_kv_gib: pages reach the disk through host memory"
        published = self.kv_events_endpoint is not None
        yield published and not self.prefix_caching, "kv_events_endpoint needs prefix_caching"
        replayed = self.kv_events_replay_endpoint is not None
        yield replayed and not published, "kv_events_replay_endpoint needs kv_events_endpoint"
        both = self.speculative_config is not None
        yield both and self.speculation != "off", "give speculation or speculative_config, not both"
        yield self.speculation_depth and self.speculation == "off", "speculation_depth needs speculation"
        yield self.adapters and dummy, "LoRA adapters need a model with weights, not load_format dummy"

    def for_measuring(self) -> EngineConfig:
        """Return a copy for an engine that becomes ready only after all background preparation."""
        return self.model_copy(update={"wait_for_plan": True})

    @property
    def adapters(self) -> bool:
        """Whether requests may use LoRA adapters."""
        return self.enable_lora or bool(self.lora_modules) or self.lora_dir is not None

    @property
    def drafting(self) -> DraftOptions | None:
        """How drafts are made; None if speculation is off."""
        return draft_options(self.speculation, self.speculation_depth, self.speculative_config)

    @property
    def adaptive_limit(self) -> bool:
        """Whether the sequence limit follows measurements."""
        return isinstance(self.max_num_seqs, str)

    @property
    def sequence_limit(self) -> int | None:
        """Maximum of running requests; None if not configured."""
        if isinstance(self.max_num_seqs, str):
            return int(self.max_num_seqs.partition(":")[2] or 0) or None
        return self.max_num_seqs

    @property
    def itl_objective(self) -> Objective | None:
        """The objective for the time between tokens that prefill chunks must respect; None for no limit.

        Percentiles of an adaptive sequence limit apply to chunks, too: with few requests running, a full batch of
        prefill tokens still delays the next token."""
        if self.itl_slo is not None:
            return itl_objective(self.itl_slo)
        return min(self.kept_percentiles, key=lambda o: o.limit, default=None)

    @property
    def kept_percentiles(self) -> list[Objective]:
        """Objectives of the adaptive sequence limit that a few late tokens can break."""
        return kept_percentiles(self.objectives) if self.adaptive_limit else []

    @property
    def objectives(self) -> list[Objective]:
        return [Objective.parse(text) for text in self.slo]

    @property
    def model_path(self) -> Path:
        if self.model_preset is not None:
            return PRESETS / self.model_preset
        return DEMO_MODEL_PATH if self.model == "demo" else expanded(self.model)

    @property
    def uses_demo_tokenizer(self) -> bool:
        """Whether a dummy model without a tokenizer borrows the demo model's."""
        return self.load_format == "dummy" and not any((self.model_path / name).exists() for name in TOKENIZER_FILES)

    @property
    def tokenizer_path(self) -> Path:
        return DEMO_MODEL_PATH if self.uses_demo_tokenizer else self.model_path

    def kv_topic(self, name: str) -> str:
        """Topic of the KV events of a model served under `name`."""
        pod = os.environ.get("POD_IP") or socket.gethostname()
        return self.kv_events_topic or f"kv@{pod}@{name}"

    @property
    def cache_path(self) -> Path:
        return cache_home() if self.cache_dir is None else expanded(self.cache_dir)

    @property
    def model_name(self) -> str:
        """Default served name: the directory's name as given, so that a symbolic link keeps its own name."""
        if self.model_preset is not None:
            return self.model_preset
        if self.model == "demo":
            return "demo"
        path = os.path.abspath(self.model_path)
        of_hub = _SNAPSHOT.search(path)
        return f"{of_hub[1]}/{of_hub[2]}" if of_hub else os.path.basename(path)
