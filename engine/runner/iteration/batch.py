"""`Batch`: one iteration as the scheduler hands it to the runner; `StepResult`: what comes back. Host arrays only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.runner.iteration.attention_path import AttentionPath
from weft.engine.wire.sampling import COLUMNS

PROMPT_LOGPROB_ROWS = 256
"""rows of logits at once: bounds memory for long prompts with a large vocabulary"""

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


def sampler_names() -> list[str]:
    """The arguments of the samplers in `kernels/` beside the logits: some of the columns, and each token's draw."""
    return [*(column.name for column in COLUMNS if column.sampler), "uniform"]


class SamplingInputs(NamedTuple):
    """What the S requests that get a token from this iteration want of it."""

    slots: I32
    logit_tokens: I32
    """[S] the row of the iteration's tokens whose logits are sampled"""
    columns: Mapping[str, np.ndarray]
    """[S] each: `wire.sampling.COLUMNS` by name"""
    uniform: F32
    """[S] in (0, 1): the draw, a function of the request's seed and the token's index alone"""
    bias_rows: I32
    bias_ids: I32
    bias_values: F32
    """sparse additions to the logits: logit_bias, and -1e30 on stop tokens before min_tokens"""
    mask_rows: I32
    """rows that may get some tokens only"""
    masks: I32
    """`[len(mask_rows), ceil(V / 32)]`: bit i of word w allows token 32 w + i; the others get -inf, after all else"""

    @classmethod
    def none(cls) -> SamplingInputs:
        """Of an iteration that samples nothing."""
        i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
        columns = {column.name: np.zeros(0, column.dtype) for column in COLUMNS}
        return cls(i, i, columns, f, i, i, f, i, i.reshape(0, 0))

    def sampler_arguments(self) -> dict[str, np.ndarray]:
        """What the samplers take beside the logits, by name, `[S]` each."""
        return {name: self.uniform if name == "uniform" else self.columns[name] for name in sampler_names()}


class CountReset(NamedTuple):
    """A request with penalties (re)starts in a slot: rebuild its resident counts."""

    slot: int
    prompt: I32
    """token ids"""
    output: I32
    """token ids"""


class PromptLogprobs(NamedTuple):
    """Positions whose next prompt token's log-probability is asked for."""

    row: int
    """row of the batch"""
    token_rows: I32
    """rows of the iteration's tokens"""
    targets: I32
    """the prompt's token ids that follow them"""
    top: int


class Pooled(NamedTuple):
    """Tokens whose hidden states, behind the final norm, are added up."""

    row: int
    """row of the batch"""
    token_rows: I32
    """rows of the iteration's tokens"""


class Batch(NamedTuple):
    """R requests, T tokens; decodes come first, one token each, then prefill chunks."""

    step: int
    num_decodes: int
    slots: I32
    epochs: I32
    query_len: I32
    """[R] tokens of this iteration"""
    kv_len: I32
    """[R] positions visible to the request's last token of this iteration"""
    token_ids: I32
    """[T]; -1 for decodes: their token is still on the device, in `last_token[slot]`"""
    positions: I32
    slot_mapping: npt.NDArray[np.int64]
    """[T] page * page_size + offset"""
    page_table: I32
    """[R, pages]; padding is page 0"""
    sampled_rows: I32
    """[S] rows that sample a token"""
    sampling: SamplingInputs
    count_resets: tuple[CountReset, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...]
    pooled: tuple[Pooled, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def read_rows(self) -> npt.NDArray[np.int64]:
        """Rows of the tokens whose state behind the last layer somebody reads: `[N]`, ascending."""
        asked = [of.token_rows for of in self.prompt_logprobs] + [of.token_rows for of in self.pooled]
        return np.unique(np.concatenate((self.sampling.logit_tokens, *asked))).astype(np.int64)

    @property
    def rows_by_reader(self) -> npt.NDArray[np.int64]:
        """As `read_rows`, but those that are sampled come first, in their order."""
        sampled = self.sampling.logit_tokens.astype(np.int64)
        if not self.prompt_logprobs and not self.pooled:
            return sampled
        return np.concatenate((sampled, np.setdiff1d(self.read_rows, sampled, assume_unique=True)))

    @property
    def num_chunks(self) -> int:
        return len(self.slots) - self.num_decodes

    @property
    def num_requests(self) -> int:
        return len(self.slots)


class Logprobs(NamedTuple):
    """Columns over rows: the token and the k best beside it."""

    rows: I32
    """rows of `SamplingInputs`, or positions of a `PromptLogprobs`"""
    ranks: I32
    """1-based"""
    ids: I32
    """[n, 1 + k]: the token, then the best first"""
    values: F32


class StepResult(NamedTuple):
    """What an iteration computed, on the host."""

    batch: Batch
    tokens: I32
    """[S] ids of the sampled tokens"""
    logprobs: Logprobs | None
    prompt_logprobs: tuple[Logprobs, ...]
    """one for each of `batch.prompt_logprobs`"""
    seconds: float
    """device time"""
    idle_seconds: float = 0.0
    """between the end of the iteration before and the beginning of this one"""
    nano_batches: int = 1
    """that the pipeline cut it into; 1: the serial plan"""
    nonfinite: npt.NDArray[np.bool_] | None = None
    """[S] rows whose logits were no numbers: their tokens mean nothing. None: no row's were"""
    pooled: F32 | None = None
    """[P, H] sums, a row for each of `batch.pooled`; None: nothing was asked for"""
    attention: AttentionPath | None = None
    """which way it went; None: what the batch says"""


def uniform_draw(seeds: npt.NDArray[np.uint64], index: I32) -> F32:
    """A draw in (0, 1) per row from (seed, index of the token): splitmix64's output function, top 23 bits.

    Stateless, so that a request's tokens do not depend on its neighbours, on preemption or on the order of iterations.
    """
    with np.errstate(over="ignore"):
        z = seeds + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
