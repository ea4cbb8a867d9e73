"""`Request`: the state of one sequence outside its row of the slot table; `Arrivals`: makes requests of messages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weft.engine.config.speculation import MOST_DRAFTS
from weft.engine.errors import RequestError
from weft.engine.memory.loads import Loading
from weft.engine.memory.pages import PagePool, Pages
from weft.engine.memory.prefix_index import NO_HITS, Hits, PrefixEntry
from weft.engine.runner.iteration.batch import Encoding
from weft.engine.scheduling.bad_words import BadWords, only
from weft.engine.scheduling.grammar import Grammar, Mask
from weft.engine.scheduling.thinking import ThinkingBound
from weft.engine.wire.messages import AddRequest, Image, Retention
from weft.engine.wire.sampling import SamplingParams

TokenIds = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Rows:
    """Rows of the runner's pool that hold the embeddings of an image."""

    name: tuple[str, bytes]  # salt and key of the image
    rows: npt.NDArray[np.int32]
    references: int = 0
    encoding: Encoding | None = None  # until the embeddings are there


@dataclass(eq=False, slots=True)
class PromptImage:
    """An image of a request's prompt."""

    image: Image
    key: bytes  # identifies the embeddings (`page_keys.image_key`)
    places: npt.NDArray[np.int32]  # prompt positions that get an embedding, ascending
    rows: Rows | None = None  # its embeddings, while the request holds them

    @property
    def start(self) -> int:
        return self.image.start

    @property
    def end(self) -> int:
        return self.image.start + self.image.length


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. While it has a slot, its lengths, counters and phase live in that row of the slot table. A request
    waits, then has a slot (LOADING, PREFILL, DECODE: `SlotTable.phase`), then has ended. Preemption and failed loads
    lead back to waiting."""

    handle: int
    token_ids: TokenIds  # prompt ids, and after a preemption also the confirmed output
    prompt_len: int
    params: SamplingParams
    max_total_tokens: int  # maximum tokens of prompt and output, at which it ends with `length`
    priority: int  # orders the requests of its tenant and precedence, lowest first
    order: int  # arrival number: equal priorities are served in this order, also after a preemption
    arrival: float  # arrival in monotonic seconds
    salt: str
    stop_ids: tuple[int, ...]
    seed: int
    leader: int = -1  # handle of the request whose pages it waits for; -1 for none
    tenant: int = 0  # Number of the tenant. Tenants of one precedence share the engine fairly.
    precedence: int = 0  # lower ones go first, of any tenant
    adapter: int = 0  # number of its LoRA adapter; 0 for none
    ticket: int = 0  # ticket in the waiting queue; 0 if it is not queued
    charged: float = 0.0  # tokens charged to its tenant when it first got a slot
    overtaken: int = 0  # requests admitted ahead of it while it was first in line
    early: bool = False  # it got its slot before its turn
    preempted: int = 0  # times it lost its slot to a higher priority
    yielded: int = 0  # times it lost its slot to a tenant without one
    siblings: list[Request] = field(default_factory=list)
    """Requests that wait for this one's prompt; empty once it has begun."""
    metered: bool = False  # report the energy charged
    retention: tuple[Retention, ...] = ()  # how long to retain the first pages of the prompt
    retained_tokens: int = 0  # prompt tokens retained
    names: tuple[bytes, ...] = ()  # names of the conversation for its next turn
    prediction: TokenIds | None = None  # a text that the output may repeat in part
    predicted: tuple[int, int] = (0, 0)  # draft tokens of the prediction: accepted, rejected
    max_drafts: int = MOST_DRAFTS  # maximum draft tokens of an iteration
    segment: int = 0  # tokens before the second text of a pair; 0: no pair
    images: tuple[PromptImage, ...] = ()  # images of the prompt, in order
    image_parts: Mapping[int, bytes] = field(default_factory=dict)
    """What images add to the prefix keys of the pages that they overlap (`page_keys.image_parts`)."""
    rope: TokenIds | None = None
    """`[3, prompt_len]` rotary positions of the prompt; None: those of its tokens."""
    rope_delta: int = 0  # what the rotary position of a later token exceeds its position by; at most 0
    fetched: bool = False  # its pages were loaded while it waited
    joules: float = 0.0  # joules charged before it last lost its slot
    held: bool = False  # it waits for its leader's prompt
    begun: bool = False  # it has had its first token, so its prompt is in the prefix index
    grammar: Grammar | None = None
    allowed: Mask | None = None  # mask of the tokens allowed at any position
    bad_words: BadWords | None = None
    words_state: int = 0  # state of `bad_words` after the confirmed output
    thinking: ThinkingBound | None = None  # bound on its thinking
    stuck: bool = False  # its constraints allow no token
    slot: int = -1  # row of the slot table; -1 for none
    ended: bool = False  # it produces no more events
    scheduled_at: float = 0.0
    cached_tokens: int = 0  # prompt tokens found in the prefix index when it first ran
    hits: Hits = NO_HITS  # prompt tokens found at its last admission, by tier
    stateless: int = 0  # further prompt tokens whose K and V were found then, but no recurrent state
    loading: Loading | None = None  # the loads it waits for while its slot is LOADING
    keys: list[bytes] = field(default_factory=list)
    """Prefix keys of the full pages of `token_ids`, computed once per waiting period."""
    last_entry: PrefixEntry | None = None  # index entry of its last published page
    last_key: bytes = b""
    publishable: bool = True
    checkpoints_wanted: list[int] = field(default_factory=list)
    """Positions in the prompt, ascending, at which chunks to come save the recurrent state."""
    checkpoints: list[tuple[int, Pages]] = field(default_factory=list)
    """(position, pages) of saved recurrent states that are not confirmed yet, ascending."""
    pooled: npt.NDArray[np.float64] | None = None  # sum of the hidden states computed since it got its slot
    prompt_logprobs_sent: int = 0  # prompt positions whose log-probabilities have been delivered

    @property
    def follows_output(self) -> bool:
        """The allowed tokens depend on every output token, through a grammar or bad words."""
        return self.grammar is not None or self.bad_words is not None

    @property
    def constrained(self) -> bool:
        """The allowed tokens depend on the output, including through a bound on thinking."""
        return self.follows_output or (self.thinking is not None and not self.thinking.settled)

    @property
    def masked(self) -> bool:
        """Only some tokens are allowed next."""
        forced = self.thinking is not None and self.thinking.mask is not None
        return forced or self.follows_output or self.allowed is not None

    @property
    def waiting(self) -> bool:
        return self.slot < 0 and not self.ended

    def goes_before(self, other: Request) -> bool:
        """Return whether it is computed first if both have a slot. Priorities count within a tenant only."""
        if self.precedence != other.precedence:
            return self.precedence < other.precedence
        if self.tenant == other.tenant and self.priority != other.priority:
            return self.priority < other.priority
        return self.order < other.order


def check_request(
    token_ids: TokenIds, params: SamplingParams, *, max_model_len: int, vocab_size: int, max_tokens_in_pool: int
) -> int:
    """Check a request on arrival and return its `max_total_tokens`. Raises `RequestError`, with the field, if the
    request can never be served."""
    if len(token_ids) == 0:
        raise RequestError("the prompt is empty", "prompt")
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
        raise RequestError(f"the prompt has a token id outside 0 … {vocab_size - 1}", "prompt")
    longest = min(max_model_len, max_tokens_in_pool)
    left = longest - len(token_ids)
    if left < (0 if params.max_tokens == 0 else 1):
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with at least one output token at most {longest} fit", "prompt"
        )
    if params.max_tokens is not None and params.max_tokens > left:
        raise RequestError(
            f"max_tokens is {params.max_tokens}, but the prompt has {len(token_ids)} tokens of at most {longest}",
            "max_tokens",
        )
    if params.min_tokens > left:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but the prompt has {len(token_ids)} tokens of at most {longest}",
            "min_tokens",
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logprob_token_ids", params.logprob_token_ids),
        ("thinking", () if params.thinking is None else params.thinking.force),
    ):
        if any(not 0 <= i < vocab_size for i in ids):
            raise RequestError(f"{name} has a token id outside 0 … {vocab_size - 1}", name)
    if not all(math.isfinite(v) for v in params.logit_bias.values()):
        raise RequestError("logit_bias has a value that is not finite", "logit_bias")
    return len(token_ids) + (left if params.max_tokens is None else params.max_tokens)


class Arrivals:
    """Numbers an engine's requests in arrival order, and assigns seeds to those without one."""

    def __init__(
        self, pool: PagePool, *, max_model_len: int, vocab_size: int, eos_token_ids: tuple[int, ...], seed: int
    ) -> None:
        self._pool, self._max_model_len = pool, max_model_len
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._seeds = np.random.default_rng(seed)
        self._count = 0

    def request(self, message: AddRequest) -> Request:
        """Return the request of a message. Raises `RequestError` if it can never be served."""
        params = message.params
        token_ids = np.frombuffer(message.prompt_token_ids, np.int32)
        max_total_tokens = check_request(
            token_ids,
            params,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            max_tokens_in_pool=self._pool.capacity * self._pool.page_size,
        )
        eos = () if params.ignore_eos else self._eos_token_ids
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        self._count += 1
        request = Request(
            handle=message.handle, token_ids=token_ids, prompt_len=len(token_ids), params=params,
            max_total_tokens=max_total_tokens, priority=message.priority, order=self._count, arrival=time.monotonic(),
            salt=message.cache_salt, stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))), seed=seed % 2**64,
            leader=message.leader, tenant=message.tenant, precedence=message.precedence, metered=message.metered,
            retention=message.retention, names=message.names,
        )  # fmt: skip
        if message.prediction:
            request.prediction = np.frombuffer(message.prediction, np.int32)
        if message.max_drafts is not None:
            request.max_drafts = min(message.max_drafts, MOST_DRAFTS)
        if params.allowed_token_ids is not None:
            request.allowed = only(params.allowed_token_ids, self._vocab_size)
        if params.thinking is not None:
            request.thinking = ThinkingBound(params.thinking, self._vocab_size)
        return request
