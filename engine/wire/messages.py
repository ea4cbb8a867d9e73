"""The messages between API processes and the engine process: tagged msgspec structs, never pickle.

Token ids and other per-iteration columns are raw little-endian arrays (`bytes`), so that an iteration of a thousand
requests is one message with a few buffers.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from weft.engine.wire.sampling import SamplingParams


class Finish(IntEnum):
    """Why a sequence ended (0: it has not)."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    REFUSED = 4
    """The request cannot be served as sent."""
    NONFINITE = 5
    """The model computed logits that are not finite (NaN, inf)."""
    BUSY = 6
    """The request was not served now, but may be later."""


HANDLE_BITS = 40  # a client's handles are `client << HANDLE_BITS | k`, so that a handle identifies its client


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A client's first message; answered by `EngineReady`."""

    pages: bool = False
    """Whether to send the pages that the engine holds, and their changes."""


class ClientGone(msgspec.Struct, tag="client_gone", frozen=True):
    """Sent by the watcher of client processes when one has ended: its requests are dropped."""

    client: int


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """A request to retain the first pages of a prompt."""

    tokens: int
    """Prompt tokens to retain, from the first one."""
    seconds: float
    """Seconds to retain them, from when the prompt is computed. 0: only save the recurrent state after them."""


class Image(msgspec.Struct, frozen=True, array_like=True):
    """An image in a prompt: where its embeddings go, and where its pixels are."""

    digest: bytes
    """SHA-256 over the file's bytes and everything else that decides the embeddings: the family, the version of its
    rule and of the library that resizes, the options."""
    start: int
    """First prompt position of the span that holds embeddings."""
    mask: bytes
    """One byte for each position of the span, 1 where the next embedding goes; empty: everywhere."""
    length: int
    """Positions in the span."""
    file: str
    """Name of the file with the pixels (`wire.pixels`)."""
    shapes: tuple[tuple[int, int], ...]
    """(height, width) of each tile in the file: uint8 RGB rows, back to back."""
    grid: tuple[int, ...] = ()
    """Patches of the image as (time, height, width), for families whose positions depend on it."""


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """One sequence to generate. The sender chooses a `handle` that is unique among its open requests."""

    handle: int
    prompt_token_ids: bytes
    """int32."""
    params: SamplingParams
    priority: int = 0
    """Orders the requests of its tenant and precedence; lower ones go first."""
    cache_salt: str = ""
    leader: int = -1
    """Handle of an earlier request with the same prompt, whose pages this one waits for; -1 for none."""
    tenant: int = 0
    """Number of the request's API key. Tenants of one precedence share the engine fairly."""
    precedence: int = 0
    """Requests with a lower one go first, of any tenant."""
    metered: bool = False
    """Report the energy charged (`Outputs.joules`)."""
    retention: tuple[Retention, ...] = ()
    """If several cover a page, the longest time counts."""
    names: tuple[bytes, ...] = ()
    """Names of the conversation for its next turn, 16 bytes each."""
    adapter: str = ""
    """Digest of the LoRA adapter (`AdapterNews`); "" for none."""
    prediction: bytes = b""
    """int32: a text that the output may repeat in part, to draft from; empty for none."""
    max_drafts: int | None = None
    """Maximum draft tokens of an iteration; None for as many as the engine chooses."""
    segment: int = 0
    """Prompt tokens before the second text of a pair, for encoders that distinguish the two; 0: no pair."""
    images: tuple[Image, ...] = ()
    """Images of the prompt in order; their spans do not overlap."""


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    handles: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    pass


class Prefetch(msgspec.Struct, tag="prefetch", frozen=True):
    """Load the pages of a conversation to the device before its next turn arrives."""

    names: tuple[bytes, ...]
    """Names of the conversation (`AddRequest.names`), most specific first."""


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Load a LoRA adapter and give it a name. Answered by `AdapterNews`, to all clients if it succeeds."""

    name: str
    path: str
    digest: str = ""
    """The expected content; "" for any."""


class DropAdapter(msgspec.Struct, tag="drop_adapter", frozen=True):
    """Forget a name. Open requests keep the adapter. Answered by `AdapterNews` without a digest, to all clients."""

    name: str


class Profile(msgspec.Struct, tag="profile", frozen=True):
    """Record a Chrome trace of the engine process for some seconds, in a new file."""

    path: str
    seconds: float


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """Free the memory until `Wake`; no request is open. Answered by `SleepReply`."""


class Wake(msgspec.Struct, tag="wake", frozen=True):
    """Serve again. Answered by `SleepReply`."""


ToEngine = (
    Hello | ClientGone | AddRequest | AbortRequests | ResetPrefixCache | Prefetch | LoadAdapter | DropAdapter | Profile
    | Sleep | Wake
)  # fmt: skip


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's maximum memory in bytes: of its process on a CPU, of the device on a GPU."""

    weights: int = 0
    kv_pages: int = 0
    host_pages: int = 0
    """Pages of the host tier, which are in host memory for a GPU too."""
    working: int = 0
    """Everything else: libraries, buffers, caches of compiled kernels."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_pages + self.host_pages + self.working


class PlanStats(msgspec.Struct, frozen=True, array_like=True):
    """The pipelines of the plan. Those that neither serve nor are left out are still being prepared."""

    pipelines: int = 0
    serving: int = 0
    left_out: int = 0


class EngineReady(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """Sent to every client, once the model is loaded and the pool is sized."""

    model_type: str
    num_parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    """Number of slots: the maximum of requests that run at once."""
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    load_seconds: float
    slot_limit: int = 0
    """Initial slot limit."""
    hidden_size: int = 0
    """Values per hidden state."""
    memory: MemoryBudget = MemoryBudget()
    energy_source: str = ""
    """Source of the energy counter: nvml or rapl; empty if there is none."""
    energy_missing: str = ""
    """Why there is no energy counter."""
    plan: PlanStats = PlanStats()
    """Progress of the plan at this time."""
    threads: int = 0
    """Compute threads of a CPU engine."""
    model_id: str = ""
    """Model id in the root of page keys (`page_keys.root`)."""
    pages: bytes = b""
    """Brief keys of the pages in the prefix index, if the client requested them."""
    tasks: tuple[str, ...] = ("generate", "embed")
    """What the model can do, in vLLM's words: generate, embed, classify, score."""
    labels: tuple[str, ...] = ()
    """Names of the model's classes."""
    prefetches: bool = False
    """The engine has tiers, so `Prefetch` has an effect."""
    recurrent: bool = False
    """A cached prefix is used only up to a page with a recurrent state."""
    modalities: tuple[str, ...] = ("text",)
    """What prompts may hold: text, image."""
    pixels: str = ""
    """Directory of the shelf with the pixels of images (`wire.pixels`)."""


class TierStats(msgspec.Struct, kw_only=True):
    """A tier of the KV cache. Counters are totals since start."""

    up: bool = True
    used: int = 0
    """Pages in the tier, including held ones."""
    capacity: int = 0
    hit_tokens: int = 0
    """Prompt tokens found here and in no faster tier."""
    missed_tokens: int = 0
    """Prompt tokens found neither here nor in a faster tier."""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_saved: int = 0
    """Bytes saved by packing, of those stored and loaded."""
    raw_pages: int = 0
    """Pages stored unpacked, because they could not be packed."""
    evictions: int = 0
    spilled: int = 0
    """Pages stored here because they were idle."""
    prefetched: int = 0
    """Pages loaded from here before their request could run."""
    failures: int = 0
    """Pages that could not be stored or loaded, plus the failure that switched the tier off."""


LENGTHS = {"1k": 1024, "4k": 4096, "16k": 16384, "64k": 65536}
"""Upper bounds of prompt lengths by name. Longer prompts count as "more"."""


class LengthHits(msgspec.Struct, kw_only=True):
    """Looked-up prompt tokens of one length class, by the tier that held them. Totals since start."""

    gpu: int = 0
    host: int = 0
    ssd: int = 0
    missed: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's state. Counters are totals since start."""

    running: int = 0
    slot_limit: int = 0
    """Requests that may run at once now."""
    slot_limit_changes: dict[str, int] = {}
    """Changes of the slot limit by reason (`scheduling.slot_limit.REASONS`), if it follows an objective."""
    waiting: int = 0
    queue: dict[str, int] = {}
    """Waiting requests by reason: slots, pages, tokens (no token budget in the iteration), sibling (another request
    computes the same prompt), grammar (being compiled), load (KV pages being loaded to the GPU), adapter (not in
    memory), encoder (an image is being encoded)."""
    pages_held: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    retained_pages: int = 0
    """Pages retained for clients, which are evicted last."""
    retentions_displaced: int = 0
    """Pages released early in favor of other retained pages."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_stateless_tokens: int = 0
    """Prompt tokens whose K and V were found, but that were computed again: no recurrent state was saved there."""
    state_checkpoints: dict[str, int] = {}
    """Recurrent states in the prefix index, by the tiers that hold them."""
    state_bytes: int = 0
    """Device memory of recurrent states: those of running requests and those in the prefix index."""
    prefix_lengths: dict[str, LengthHits] = {}
    """Hits by the name of the prompt's length class (`LENGTHS`)."""
    tiers: dict[str, TierStats] = {}
    """Active tiers by name: gpu, host, ssd."""
    preemptions: int = 0
    displaced: int = 0
    """Preemptions that gave a slot to a higher priority."""
    yielded: int = 0
    """Preemptions that gave a slot to a tenant that had none."""
    overtaken: int = 0
    """Requests admitted ahead of the first in line, which lacked pages or a slot."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    decode_tokens: int = 0
    """Computed tokens of decodes: one per decoding request of an iteration, and its drafts."""
    prefill_tokens: int = 0
    """Computed prompt tokens, including those computed again after a preemption."""
    attention: dict[str, int] = {}
    """Iterations by the path of attention and by what was cut (`runner.iteration.attention_path`)."""
    chunks_cut: dict[str, int] = {}
    """Iterations whose prompts were cut short for the time between tokens, by reason
    (`scheduling.chunk_limit.BOUNDS`)."""
    chunks_late: int = 0
    """Iterations cut by the limit that still took longer."""
    nonfinite_logits: int = 0
    """Requests that ended because logits of their output or prompt were not finite."""


class IterationStats(msgspec.Struct, frozen=True, kw_only=True):
    """The last committed iteration."""

    tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    """Device time in seconds."""
    idle_seconds: float = 0.0
    """Seconds for which the device was idle before the iteration."""
    schedule_seconds: float = 0.0
    """CPU time of schedule and commit in seconds."""


class EnergyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Energy of the device in joules since start. What is neither idle nor charged is charged soon."""

    source: str = ""
    joules: float = 0.0
    idle_joules: float = 0.0
    """Energy drawn while no request was open."""
    charged: float = 0.0
    """Energy charged to requests."""


class PageChanges(msgspec.Struct, frozen=True, array_like=True):
    """Brief keys (`page_keys.BRIEF` bytes each) of pages that entered a prefix index and that left it."""

    entered: bytes = b""
    left: bytes = b""


class ImageStats(msgspec.Struct, frozen=True, kw_only=True):
    """The images of prompts. Counters are totals since start."""

    encoded: int = 0
    tokens: int = 0
    """Embeddings computed."""
    seconds: float = 0.0
    """Device seconds for them."""
    queries: int = 0
    """Images that a prompt needed. Those inside a cached prefix are not among them."""
    hits: int = 0
    """Images among them whose embeddings were cached."""
    failures: int = 0
    rows: int = 0
    """Embeddings in the cache now."""
    capacity: int = 0


class AdapterStats(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA adapters that requests use, by name."""

    most: int = 0
    """Adapters that can be in memory at once; 0 if adapters are off."""
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Draft tokens that were verified. Counters are totals since start; dictionaries have one of each of `DRAFTERS`."""

    drafts: int = 0
    """Drafts verified: one for each request of an iteration that had draft tokens."""
    draft_tokens: dict[str, int] = {}
    accepted_tokens: dict[str, int] = {}
    accepted_by_position: dict[str, int] = {}
    """Accepted tokens by their place in the draft, from 0."""
    foreseen_tokens: float = 0.0
    """Tokens that were expected to be accepted."""
    last_requests: int = 0
    """Requests that decoded in the last iteration."""
    last_draft_tokens: int = 0
    """Draft tokens of that iteration."""
    pauses: int = 0
    """Times that drafts were stopped because they did not pay."""


DRAFTERS = ("text", "prediction", "model", "grammar")
"""Where draft tokens come from: the request's own text, the client's prediction, a model, tokens that a grammar forces.
"""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after an iteration. Counters are totals since start."""

    scheduler: SchedulerStats = msgspec.field(default_factory=SchedulerStats)
    iteration: IterationStats = msgspec.field(default_factory=IterationStats)
    load_seconds: list[tuple[str, float]] = []
    """(tier, seconds) of page loads that ended since the last message."""
    iterations: int = 0
    iterations_pipelined: int = 0
    """Iterations with more than one nano-batch."""
    iterations_idle_seconds: float = 0.0
    """Seconds for which the device was idle between iterations while requests were open."""
    log_lines_dropped: int = 0
    """Lines that this process wrote to stderr and that were dropped."""
    energy: EnergyStats | None = None
    """None if there is no energy counter."""
    plan: PlanStats = PlanStats()
    pages: PageChanges = PageChanges()
    """Changes since the last message, once a client has requested them."""
    adapters: AdapterStats = AdapterStats()
    images: ImageStats | None = None
    """None if the model takes no images."""
    speculation: SpeculationStats = SpeculationStats()


class Started(msgspec.Struct, frozen=True, array_like=True):
    """Sent with a request's first token: the engine's figures about its start."""

    handle: int
    cached_tokens: int
    queue_seconds: float
    """Seconds from arrival in the engine to the first schedule."""
    prefill_seconds: float
    """Seconds from the first schedule to the first token."""
    retained_tokens: int = 0
    """Prompt tokens whose pages are retained as requested."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one sampled (or prompt) token: `ids[0]` is that token, then the k best, best first,
    then the request's `logprob_token_ids`."""

    rank: int
    """1-based rank of the token."""
    ids: tuple[int, ...]
    values: tuple[float, ...]


class Outputs(msgspec.Struct, tag="outputs", frozen=True, kw_only=True):
    """All tokens of one committed iteration, as parallel columns. A request with several tokens has consecutive rows,
    in order; a terminal event is its last row."""

    handles: bytes = b""
    """int64."""
    tokens: bytes = b""
    """int32 ids of the sampled tokens; -1 for a terminal event without a token."""
    finish: bytes = b""
    """uint8, `Finish`."""
    started: list[Started] = []
    logprobs: dict[int, list[TokenLogprobs]] = {}
    """By handle, for requests with `logprobs`: one for each of its tokens, in order."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """By handle, for prompt positions 1 …, sent in order and in several messages before the first token."""
    pooled: dict[int, bytes] = {}
    """By handle, with the terminal event of pooling requests: float32, one hidden state."""
    errors: dict[int, str] = {}
    """By handle, for `Finish.REFUSED`, `Finish.NONFINITE` and `Finish.BUSY`."""
    joules: dict[int, float] = {}
    """By handle, for metered requests: joules charged since they started."""
    predicted: dict[int, tuple[int, int]] = {}
    """By handle, when it changes: accepted and rejected draft tokens of the request's prediction since it started."""
    stats: EngineStats

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        return (
            np.frombuffer(self.handles, np.int64),
            np.frombuffer(self.tokens, np.int32),
            np.frombuffer(self.finish, np.uint8),
        )


class SleepReply(msgspec.Struct, tag="sleep_reply", frozen=True, kw_only=True):
    """The answer to `Sleep` or `Wake`."""

    why_not: str = ""
    """Why it failed; empty if it succeeded."""
    num_bytes: int = 0
    """Bytes of device memory freed or allocated."""
    seconds: float = 0.0


class AdapterNews(msgspec.Struct, tag="adapter_news", frozen=True):
    """The answer to `LoadAdapter` or `DropAdapter`, and a report to a new client."""

    name: str
    digest: str = ""
    """Identifies the adapter's content; empty if the name is dropped, or if it could not be loaded."""
    path: str = ""
    error: str = ""
    """Why it could not be loaded; the name keeps its earlier adapter, if any."""


FromEngine = EngineReady | Outputs | SleepReply | AdapterNews

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
