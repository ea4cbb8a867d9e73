"""`Request`: what the engine knows of one sequence beside its row in the slot table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from weft.engine.errors import RequestError
from weft.engine.memory.loads import Loading
from weft.engine.memory.prefix_index import NO_HITS, Hits, PrefixEntry
from weft.engine.scheduling.grammar import Grammar
from weft.engine.wire.sampling import SamplingParams

Tokens = npt.NDArray[np.int32]


class State(Enum):
    """WAITING -> (LOADING ->) RUNNING -> FINISHED; preemption and a failed load lead back to WAITING."""

    WAITING = auto()
    LOADING = auto()
    """has a slot and pages; its cached prefix is on its way from a lower tier"""
    RUNNING = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. While RUNNING, its lengths and counters live in row `slot` of the slot table."""

    handle: int
    tokens: Tokens
    """prompt, and after a preemption also the confirmed output"""
    prompt_len: int
    params: SamplingParams
    limit: int
    """tokens in all (prompt and output) at which it ends with `length`"""
    priority: int
    order: int
    """arrival number: first come, first served among equal priorities, also after a preemption"""
    arrival: float
    """monotonic seconds"""
    salt: str
    stop_ids: tuple[int, ...]
    seed: int
    leader: int = -1
    """handle of the request whose pages it waits for"""
    siblings: list[Request] = field(default_factory=list)
    """requests that wait for this one's prompt; none once it has begun"""
    held: bool = False
    """waits for its leader's prompt"""
    begun: bool = False
    """it has had its first token, so its prompt is in the prefix index"""
    grammar: Grammar | None = None
    state: State = State.WAITING
    slot: int = -1
    scheduled_at: float = 0.0
    cached_tokens: int = 0
    """prompt tokens found in the prefix index when it first ran"""
    hits: Hits = NO_HITS
    """prompt tokens found at its last admission, by tier"""
    loading: Loading | None = None
    """what it waits for while LOADING"""
    keys: list[bytes] = field(default_factory=list)
    """prefix keys of the full pages of `tokens`, computed once per waiting period"""
    last_entry: PrefixEntry | None = None
    """index entry of its last published page"""
    last_key: bytes = b""
    publishable: bool = True
    prompt_logprobs_sent: int = 0
    """prompt positions whose log-probabilities have been delivered"""

    @property
    def sort_key(self) -> tuple[int, int]:
        return self.priority, self.order


def check_request(
    tokens: Tokens, params: SamplingParams, *, max_model_len: int, vocab_size: int, max_tokens_in_pool: int
) -> int:
    """Refuse at the door what could never be served; returns the token count at which the request ends.

    Raises `RequestError` naming the field.
    """
    if len(tokens) == 0:
        raise RequestError("the prompt is empty", "prompt")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise RequestError(f"the prompt has a token id outside 0 … {vocab_size - 1}", "prompt")
    longest = min(max_model_len, max_tokens_in_pool)
    room = longest - len(tokens)
    if room < (0 if params.max_tokens == 0 else 1):
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; with at least one output token at most {longest} fit", "prompt"
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            f"max_tokens is {params.max_tokens}, but the prompt has {len(tokens)} tokens of at most {longest}",
            "max_tokens",
        )
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        if any(not 0 <= i < vocab_size for i in ids):
            raise RequestError(f"{name} has a token id outside 0 … {vocab_size - 1}", name)
    if not all(math.isfinite(v) for v in params.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite", "logit_bias")
    return len(tokens) + (room if params.max_tokens is None else params.max_tokens)
