"""What crosses the socket between an API process and the engine process: msgspec structs, tagged, never pickle.

Token ids and other per-iteration columns travel as raw little-endian arrays (`bytes`), so that one iteration of a
thousand requests is one message with a handful of buffers.
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
    """the request itself cannot be served: the fault is the client's"""
    NONFINITE = 5
    """the model computed logits that are no numbers (NaN, inf): there is nothing to sample from"""
    BUSY = 6
    """not now: nothing was done, and the same request may be served later"""


HANDLE_BITS = 40
"""A client's handles are `client << HANDLE_BITS | k`: whose they are can be read off them."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """A client's first message; answered by `EngineReady` or `EngineFailed`."""

    pages: bool = False
    """it wants to know which pages the engine keeps, now and from now on"""


class ClientGone(msgspec.Struct, tag="client_gone", frozen=True):
    """From who watches the clients' processes: this one has ended, so drop all its requests."""

    client: int


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a prompt is to be kept."""

    tokens: int
    """of the prompt, from its first one on"""
    seconds: float
    """from when the prompt is computed"""


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """One sequence to generate. `handle` is chosen by the sender, among its own, and unique among its open requests."""

    handle: int
    prompt_token_ids: bytes
    """int32"""
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    leader: int = -1
    """handle of a request with the same prompt, sent before: this one waits for its pages instead of computing them"""
    tenant: int = 0
    """number of the API key it came with: those of one priority take turns"""
    metered: bool = False
    """tell what it was charged (`Outputs.joules`)"""
    retention: tuple[Retention, ...] = ()
    """where they say different times of a page, the longest counts"""
    names: tuple[bytes, ...] = ()
    """that the next turn of its conversation may be known by, 16 bytes each"""


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    handles: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    pass


class Prefetch(msgspec.Struct, tag="prefetch", frozen=True):
    """The next turn of a conversation is on its way: have its pages on the device when it comes."""

    names: tuple[bytes, ...]
    """that it may be known by (`AddRequest.names`), the one that says most first"""


class Profile(msgspec.Struct, tag="profile", frozen=True):
    """Record what the engine process does for some seconds, as a Chrome trace in a new file."""

    path: str
    seconds: float


class Sleep(msgspec.Struct, tag="sleep", frozen=True):
    """No request is open: give the memory back, until `Wake`. Answered by `SleepReply`."""


class Wake(msgspec.Struct, tag="wake", frozen=True):
    """Serve again. Answered by `SleepReply`."""


ToEngine = Hello | ClientGone | AddRequest | AbortRequests | ResetPrefixCache | Prefetch | Profile | Sleep | Wake


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds at most, in bytes: of its process on a CPU, of the device on a GPU."""

    weights: int = 0
    kv_pages: int = 0
    host_pages: int = 0
    """of the host tier, in host memory on a GPU too"""
    working: int = 0
    """everything else: libraries, buffers, caches of compiled kernels"""

    @property
    def total(self) -> int:
        return self.weights + self.kv_pages + self.host_pages + self.working


class PlanStats(msgspec.Struct, frozen=True, array_like=True):
    """The pipelines of the plan; those that neither serve nor are left out are still compiled, loaded or captured."""

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
    """slots: requests that may ever run at once"""
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    load_seconds: float
    slot_limit: int = 0
    """requests that may run at once at first"""
    hidden_size: int = 0
    """numbers of a hidden state"""
    memory: MemoryBudget = MemoryBudget()
    energy_source: str = ""
    """whose counter says what is drawn: nvml, rapl; empty: nobody's"""
    energy_missing: str = ""
    """why nobody's"""
    plan: PlanStats = PlanStats()
    """how far it is at first"""
    threads: int = 0
    """that compute, on a CPU"""
    model_id: str = ""
    """of the root of its pages' keys (`page_keys.root`)"""
    pages: bytes = b""
    """brief keys of the pages in its prefix index, for clients that asked"""
    prefetches: bool = False
    """it has tiers from which pages can be fetched ahead (`Prefetch`)"""


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start; `message` is one line for the operator."""

    message: str


class TierStats(msgspec.Struct, kw_only=True):
    """A tier of the KV cache; counters are totals since start."""

    up: bool = True
    used: int = 0
    """pages in it, held ones included"""
    capacity: int = 0
    hit_tokens: int = 0
    """prompt tokens found here and in no faster tier"""
    missed_tokens: int = 0
    """prompt tokens found neither here nor in a faster tier"""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_saved: int = 0
    """that packing left out of those stored and loaded"""
    raw_pages: int = 0
    """stored as they are, because they could not be packed"""
    evictions: int = 0
    spilled: int = 0
    """pages stored here because they lay idle"""
    prefetched: int = 0
    """pages loaded from here before their request could run"""
    failures: int = 0
    """pages that could not be stored or loaded, and the failure that switched the tier off"""


LENGTHS = {"1k": 1024, "4k": 4096, "16k": 16384, "64k": 65536}
"""prompts of fewer tokens, by name; longer ones are "more"."""


class LengthHits(msgspec.Struct, kw_only=True):
    """Tokens of prompts of some length that were looked up, by where they were found; totals since start."""

    gpu: int = 0
    host: int = 0
    ssd: int = 0
    missed: int = 0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler knows; counters are totals since start."""

    running: int = 0
    slot_limit: int = 0
    """requests that may run at once now"""
    slot_limit_changes: dict[str, int] = {}
    """by reason (`scheduling.slot_limit.REASONS`), where the number of seats follows an objective"""
    waiting: int = 0
    queue: dict[str, int] = {}
    """requests that cannot be computed yet, by what they wait for: slots, pages, tokens (room in an iteration), sibling
    (another request computes the same prompt), grammar (compiled), load (KV pages on their way to the GPU)"""
    pages_held: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    retained_pages: int = 0
    """that are evicted last, because clients asked for it"""
    retentions_displaced: int = 0
    """pages that lost this before their time, for others"""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_lengths: dict[str, LengthHits] = {}
    """by the name of the prompt's length (`LENGTHS`)"""
    tiers: dict[str, TierStats] = {}
    """by name: gpu, host, ssd, as far as they are on"""
    preemptions: int = 0
    displaced: int = 0
    """preemptions for the seat, in favour of a better priority"""
    overtaken: int = 0
    """requests admitted before one whose turn it was, for it lacked pages or a seat"""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    decode_tokens: int = 0
    """computed, one for each running request of an iteration"""
    prefill_tokens: int = 0
    """computed, after a preemption again"""
    attention: dict[str, int] = {}
    """iterations, by the path that attention took and by what was cut (`runner.attention_path`)"""
    chunks_cut: dict[str, int] = {}
    """iterations whose prompts were cut short for the time between tokens, by what decided how far
    (`scheduling.chunk_limit.BOUNDS`)"""
    chunks_late: int = 0
    """of those cut by the limit: that took longer than it all the same"""
    nonfinite_logits: int = 0
    """requests that ended because their logits, or those of their prompt, were no numbers"""


class IterationStats(msgspec.Struct, frozen=True, kw_only=True):
    """The iteration committed last."""

    tokens: int = 0
    requests: int = 0
    seconds: float = 0.0
    """device time"""
    idle_seconds: float = 0.0
    """device idle before it"""
    schedule_seconds: float = 0.0
    """CPU time of schedule + commit"""


class EnergyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of the device, in joules since start; what is neither at rest nor charged will be soon."""

    source: str = ""
    joules: float = 0.0
    idle_joules: float = 0.0
    """while no request was open"""
    charged: float = 0.0
    """to requests"""


class PageChanges(msgspec.Struct, frozen=True, array_like=True):
    """Brief keys (`page_keys.BRIEF` bytes each) of pages that came into a prefix index and that left it."""

    entered: bytes = b""
    left: bytes = b""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State after an iteration; counters are totals since start."""

    scheduler: SchedulerStats = msgspec.field(default_factory=SchedulerStats)
    iteration: IterationStats = msgspec.field(default_factory=IterationStats)
    load_seconds: list[tuple[str, float]] = []
    """(tier, seconds) of page loads that ended since the message before"""
    iterations: int = 0
    iterations_pipelined: int = 0
    """of more than one nano-batch"""
    iterations_idle_seconds: float = 0.0
    """device idle between iterations while requests were open"""
    log_lines_dropped: int = 0
    """that this process wrote to stderr and nobody took"""
    energy: EnergyStats | None = None
    """None: nobody counts it"""
    plan: PlanStats = PlanStats()
    pages: PageChanges = PageChanges()
    """since the message before, once a client has asked"""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request got its first token: what only the engine knows about its beginning."""

    handle: int
    cached_tokens: int
    queue_seconds: float
    """from arrival in the engine to the first schedule"""
    prefill_seconds: float
    """from the first schedule to the first token"""
    retained_tokens: int = 0
    """prompt tokens whose pages are kept for it, as it asked"""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one sampled (or prompt) token: `ids[0]` is that token, the rest the k best, best first."""

    rank: int
    """1-based rank of the token"""
    ids: tuple[int, ...]
    values: tuple[float, ...]


class Outputs(msgspec.Struct, tag="outputs", frozen=True, kw_only=True):
    """All tokens of one committed iteration, as parallel columns."""

    handles: bytes = b""
    """int64"""
    tokens: bytes = b""
    """int32 ids of the sampled tokens; -1 for a terminal event that brings none"""
    finish: bytes = b""
    """uint8, `Finish`"""
    started: list[Started] = []
    logprobs: dict[int, TokenLogprobs] = {}
    """by handle, for the requests that asked"""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """by handle, for positions 1 … of the prompt, sent in order, in parts, before the first token"""
    pooled: dict[int, bytes] = {}
    """by handle, with the terminal event of requests for hidden states: float32, as many as a state has"""
    errors: dict[int, str] = {}
    """by handle, for `Finish.REFUSED`, `Finish.NONFINITE` and `Finish.BUSY`"""
    joules: dict[int, float] = {}
    """by handle, for the requests that asked: charged since they began"""
    stats: EngineStats

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        return (
            np.frombuffer(self.handles, np.int64),
            np.frombuffer(self.tokens, np.int32),
            np.frombuffer(self.finish, np.uint8),
        )


class SleepReply(msgspec.Struct, tag="sleep_reply", frozen=True, kw_only=True):
    """To who said `Sleep` or `Wake`: it is done."""

    why_not: str = ""
    """it is not"""
    num_bytes: int = 0
    """of the device's memory, given back or taken"""
    seconds: float = 0.0


FromEngine = EngineReady | EngineFailed | Outputs | SleepReply

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
