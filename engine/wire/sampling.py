"""`SamplingParams`: the sampling fields of a request; `COLUMNS`: the fields that reach the samplers.

`SamplingParams` crosses the socket unchanged. In the engine its numbers become columns with a row per running request.
Slots, batches, the GPU's slab and both runners are built from `COLUMNS`, so a new field is declared only here and in
the HTTP body. Its effect is implemented in `engine/runner/device/sampling.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from weft.engine.errors import RequestError
from weft.engine.wire.grammar_text import MAX_GRAMMAR_CHARS
from weft.engine.wire.thinking import Thinking

MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_CHARS = 16_384  # characters of all bad words together
GREEDY_EPSILON = 1e-5
MAX_TOP_K = 2**31 - 1  # larger values are clipped: no vocabulary has more tokens
LEAST_REPETITION_PENALTY = 1e-20  # smaller values are clipped: a logit divided by less would be infinite


class Bounds(NamedTuple):
    """The range of a number; None is unbounded."""

    rule: str
    """Completes "FIELD must be ..." in error messages."""
    ge: int | None = None
    gt: int | None = None
    le: int | None = None

    def hold(self, value: float) -> bool:
        """Whether a value is in range; NaN is not."""
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return above and (self.le is None or value <= self.le)


BOUNDS = {
    "max_tokens": Bounds("at least 0", ge=0),
    "min_tokens": Bounds("at least 0", ge=0),
    "temperature": Bounds("between 0 and 2", ge=0, le=2),
    "top_p": Bounds("above 0 and at most 1", gt=0, le=1),
    "top_k": Bounds("-1 or more", ge=-1),
    "min_p": Bounds("between 0 and 1", ge=0, le=1),
    "presence_penalty": Bounds("between -2 and 2", ge=-2, le=2),
    "frequency_penalty": Bounds("between -2 and 2", ge=-2, le=2),
    "repetition_penalty": Bounds("above 0 and at most 10", gt=0, le=10),
    "logit_bias": Bounds("between -100 and 100", ge=-100, le=100),  # each value
    "seed": Bounds("a 64-bit integer", ge=-(2**63), le=2**63 - 1),
    "logprobs": Bounds(f"0 to {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS),
    "prompt_logprobs": Bounds(f"0 to {MAX_LOGPROBS}", ge=0, le=MAX_LOGPROBS),
}
"""Bounds of the numeric sampling fields. `SamplingParams` checks them; the HTTP bodies and their schema use them."""


Pooling = Literal["last", "mean", "cls", "max", "all", "head"]
"""What to return of a prompt: the hidden state of its last token, or the mean over all tokens. Encoders also return the
first token's state, the maximum over all tokens, all states, or, if they classify, the logits of the classes."""
DECODER_POOLING = ("last", "mean")
"""What decoders return."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling fields of one sequence, in the terms of the HTTP contract. Raises `RequestError` when a value is out of
    range; `param` names it."""

    max_tokens: int | None = 16
    """Maximum output tokens; None for as many as the context allows."""
    min_tokens: int = 0
    """Output tokens before which no stop token is sampled."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off; k: the sampled token's log-probability and the k best."""
    prompt_logprobs: int | None = None
    """Like `logprobs`, for every prompt token but the first. It turns prefix reuse off for the request."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities to return for every output token, besides the `logprobs` best."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens to sample. They must include an end token for the output to end."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not occur in the output, however they are tokenized."""
    grammar: str | None = None
    """Grammar of the output, in the form of `grammar_text`. The output ends when the grammar does."""
    pooling: Pooling | None = None
    """Return hidden states of the prompt and no output (`max_tokens` 0). The mean needs all of them, so it turns prefix
    reuse off."""
    thinking: Thinking | None = None
    """Bound on the length of the output's thinking."""
    grammar_bytes: int = 0
    """Measured bytes of the compiled grammar, 0 if unknown. The engine bounds the sum."""

    def __post_init__(self) -> None:
        def check(ok: bool, param: str, rule: str) -> None:
            if not ok:
                raise RequestError(f"{param} must be {rule}, not {getattr(self, param)!r}"[:200], param)

        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            numbers = value.values() if isinstance(value, dict) else (value,)
            check(all(number is None or bounds.hold(number) for number in numbers), name, bounds.rule)
        scores = self.prompt_logprobs is not None or self.pooling is not None
        check(self.max_tokens != 0 or scores, "max_tokens", "at least 1")
        check(self.pooling is None or self.max_tokens == 0, "max_tokens", "0 if hidden states are pooled")
        check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "at most max_tokens")
        check(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        check(len(self.stop_token_ids) <= MAX_STOP_TOKENS, "stop_token_ids", f"at most {MAX_STOP_TOKENS} ids")
        check(len(self.logprob_token_ids) <= MAX_LOGPROB_IDS, "logprob_token_ids", f"at most {MAX_LOGPROB_IDS} ids")
        check(not self.logprob_token_ids or self.logprobs is not None, "logprob_token_ids", "empty without logprobs")
        check(self.allowed_token_ids != (), "allowed_token_ids", "at least one id")
        check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} texts")
        check(all(self.bad_words), "bad_words", "texts of at least one character")
        check(
            sum(map(len, self.bad_words)) <= MAX_BAD_CHARS, "bad_words", f"texts of {MAX_BAD_CHARS} characters together"
        )
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"the grammar must have at most {MAX_GRAMMAR_CHARS} characters", "grammar")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def needs_counts(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """One number per running request. Free rows have the value of default parameters."""

    name: str
    dtype: type[np.generic]
    of: Callable[[SamplingParams], float]
    """Value of the column for a request."""
    sampler: bool = False
    """The samplers in `kernels/` take the column as the argument of this name, so it is sent to the GPU with every
    iteration, as int32 or float32. Other columns stay on the host; `runner.device.sampling` sends the rows in use."""

    def __post_init__(self) -> None:
        if self.sampler and self.dtype not in (np.int32, np.float32):
            raise ValueError(f"column {self.name}: the samplers take int32 and float32, not {self.dtype.__name__}")


COLUMNS = (
    Column("temperature", np.float32, lambda p: 0.0 if p.greedy else p.temperature, sampler=True),  # 0: greedy
    Column("top_k", np.int32, lambda p: min(max(p.top_k, 0), MAX_TOP_K), sampler=True),  # 0: off
    Column("top_p", np.float32, lambda p: p.top_p, sampler=True),
    Column("min_p", np.float32, lambda p: p.min_p, sampler=True),
    Column("presence", np.float32, lambda p: p.presence_penalty),
    Column("frequency", np.float32, lambda p: p.frequency_penalty),
    Column("repetition", np.float32, lambda p: max(p.repetition_penalty, LEAST_REPETITION_PENALTY)),
    Column("counted", np.bool_, lambda p: p.needs_counts),  # has a penalty: its token counts are resident
    Column("logprobs", np.int32, lambda p: -1 if p.logprobs is None else p.logprobs),  # k best; -1: none
)
