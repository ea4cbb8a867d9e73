"""What crosses the socket between an API process and the engine process: msgspec structs, tagged, never pickle.

Token ids and other per-iteration columns travel as raw little-endian arrays (`bytes`), so that one iteration of a
thousand requests is one message with a handful of buffers.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from weft.engine.sampling import SamplingParams


class Finish(IntEnum):
    """Why a sequence ended (0: it has not)."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class AddRequest(msgspec.Struct, tag="add", frozen=True, kw_only=True):
    """One sequence to generate. `handle` is chosen by the sender and unique among its open requests."""

    handle: int
    prompt: bytes
    """int32 token ids"""
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    handles: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    pass


ToEngine = AddRequest | AbortRequests | ResetPrefixCache


class EngineReady(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """Sent once, when the model is loaded and the pool is sized."""

    model_type: str
    num_parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    load_seconds: float


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine could not start; `message` is one line for the operator."""

    message: str


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State after an iteration; counters are totals since start."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    iterations: int = 0
    iteration_tokens: int = 0
    """tokens in the last iteration"""
    iteration_requests: int = 0
    iteration_seconds: float = 0.0
    iteration_idle_seconds: float = 0.0
    """device idle before the last iteration"""
    schedule_seconds: float = 0.0
    """CPU time of schedule + commit for the last iteration"""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request got its first token: what only the engine knows about its beginning."""

    handle: int
    cached_tokens: int
    queue_seconds: float
    """from arrival in the engine to the first schedule"""
    prefill_seconds: float
    """from the first schedule to the first token"""


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
    """int32; -1 for a terminal event that brings no token"""
    finish: bytes = b""
    """uint8, `Finish`"""
    started: list[Started] = []
    logprobs: dict[int, TokenLogprobs] = {}
    """by handle, for the requests that asked"""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """by handle, for positions 1 … of the prompt, sent in order, in parts, before the first token"""
    errors: dict[int, str] = {}
    """by handle, for `Finish.ERROR`"""
    stats: EngineStats

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        return (
            np.frombuffer(self.handles, np.int64),
            np.frombuffer(self.tokens, np.int32),
            np.frombuffer(self.finish, np.uint8),
        )


FromEngine = EngineReady | EngineFailed | Outputs

encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)
