"""`Request`: what the engine knows of one sequence beside its row in the slot table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.engine.errors import RequestError
from weft.engine.memory.loads import Loading
from weft.engine.memory.prefix_index import NO_HITS, Hits, PrefixEntry
from weft.engine.scheduling.bad_words import BadWords
from weft.engine.scheduling.grammar import Grammar, Mask
from weft.engine.scheduling.thinking import ThinkingBound
from weft.engine.wire.messages import Retention
from weft.engine.wire.sampling import SamplingParams

TokenIds = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. While it has a slot, its lengths, counters and phase live in that row of the slot table.

    It waits, has a slot (LOADING, PREFILL, DECODE: `SlotTable.phase`), and has ended; preemption and a failed load lead
    back to waiting.
    """

    handle: int
    token_ids: TokenIds
    """prompt, and after a preemption also the confirmed output"""
    prompt_len: int
    params: SamplingParams
    max_total_tokens: int
    """prompt and output: at so many it ends with `length`"""
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
    tenant: int = 0
    """whose it is: tenants of one priority take turns"""
    ticket: int = 0
    """its place in the waiting queue; 0: it is not in it"""
    charged: float = 0.0
    """tokens that its tenant was charged when it first had a slot"""
    passed: int = 0
    """requests that were admitted before it when it was its turn"""
    early: bool = False
    """had its slot before its turn"""
    displaced: int = 0
    """times it gave up its seat for a better priority"""
    siblings: list[Request] = field(default_factory=list)
    """requests that wait for this one's prompt; none once it has begun"""
    metered: bool = False
    """whoever sent it wants to know what it was charged"""
    retention: tuple[Retention, ...] = ()
    """how long the beginning of its prompt is to be kept"""
    retained_tokens: int = 0
    """prompt tokens that are"""
    names: tuple[bytes, ...] = ()
    """that the next turn of its conversation may be known by"""
    fetched: bool = False
    """its pages were sent for while it waited"""
    joules: float = 0.0
    """charged before it last lost its slot"""
    held: bool = False
    """waits for its leader's prompt"""
    begun: bool = False
    """it has had its first token, so its prompt is in the prefix index"""
    grammar: Grammar | None = None
    allowed: Mask | None = None
    """tokens that may come at all"""
    bad_words: BadWords | None = None
    words_state: int = 0
    """of `bad_words`, behind the confirmed output"""
    thinking: ThinkingBound | None = None
    """of what it may think"""
    stuck: bool = False
    """its constraints have left no token"""
    slot: int = -1
    """row of the slot table; -1: none"""
    ended: bool = False
    """nothing more will come of it"""
    scheduled_at: float = 0.0
    cached_tokens: int = 0
    """prompt tokens found in the prefix index when it first ran"""
    hits: Hits = NO_HITS
    """prompt tokens found at its last admission, by tier"""
    loading: Loading | None = None
    """what it waits for while its slot is LOADING"""
    keys: list[bytes] = field(default_factory=list)
    """prefix keys of the full pages of `token_ids`, computed once per waiting period"""
    last_entry: PrefixEntry | None = None
    """index entry of its last published page"""
    last_key: bytes = b""
    publishable: bool = True
    pooled: npt.NDArray[np.float64] | None = None
    """sum of the hidden states that have come since it last had a slot"""
    prompt_logprobs_sent: int = 0
    """prompt positions whose log-probabilities have been delivered"""

    @property
    def follows_output(self) -> bool:
        """What may come next depends on what came, at every token: on its grammar, or on words that must not occur."""
        return self.grammar is not None or self.bad_words is not None

    @property
    def constrained(self) -> bool:
        """As `follows_output`, or near the end of its thinking."""
        return self.follows_output or (self.thinking is not None and not self.thinking.settled)

    @property
    def masked(self) -> bool:
        """Some tokens alone may come next."""
        forced = self.thinking is not None and self.thinking.mask is not None
        return forced or self.follows_output or self.allowed is not None

    @property
    def waiting(self) -> bool:
        return self.slot < 0 and not self.ended

    @property
    def sort_key(self) -> tuple[int, int]:
        return self.priority, self.order


def check_request(
    token_ids: TokenIds, params: SamplingParams, *, max_model_len: int, vocab_size: int, max_tokens_in_pool: int
) -> int:
    """Refuse at the door what could never be served; returns its `max_total_tokens`.

    Raises `RequestError` naming the field.
    """
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty", "prompt")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise RequestError(f"the prompt has a token id outside 0 … {vocab_size - 1}", "prompt")
    longest = min(max_model_len, max_tokens_in_pool)
    room = longest - len(token_ids)
    if room < (0 if params.max_tokens == 0 else 1):
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with at least one output token at most {longest} fit", "prompt"
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            f"max_tokens is {params.max_tokens}, but the prompt has {len(token_ids)} tokens of at most {longest}",
            "max_tokens",
        )
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but the prompt has {len(token_ids)} tokens of at most {longest}",
            "min_tokens",
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("thinking", () if params.thinking is None else params.thinking.force),
    ):
        if any(not 0 <= i < vocab_size for i in ids):
            raise RequestError(f"{name} has a token id outside 0 … {vocab_size - 1}", name)
    if not all(math.isfinite(v) for v in params.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite", "logit_bias")
    return len(token_ids) + (room if params.max_tokens is None else params.max_tokens)
