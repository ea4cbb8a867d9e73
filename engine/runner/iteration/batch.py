"""`Batch`: the input of one iteration, from scheduler to runner; `StepResult`: its output. Host arrays only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.runner.iteration.attention_path import AttentionPath
from weft.engine.wire.sampling import COLUMNS

PROMPT_LOGPROB_ROWS = 256  # Rows of logits computed at once. Bounds memory for long prompts with a large vocabulary.

UNDRAFTED = -2  # Token id of a draft that the runner makes.

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


def sampler_names() -> list[str]:
    """Return the names of the samplers' arguments except the logits: some of the columns, and "uniform"."""
    return [*(column.name for column in COLUMNS if column.sampler), "uniform"]


class SamplingInputs(NamedTuple):
    """Sampling parameters of the S token rows that are sampled: one for each request that gets a token from this
    iteration, and one for each draft."""

    slots: I32
    logit_tokens: I32  # `[S]` token rows whose logits are sampled.
    columns: Mapping[str, np.ndarray]  # `[S]` each: `wire.sampling.COLUMNS` by name.
    uniform: F32  # `[S]` draws in (0, 1), each a function of the request's seed and the token's index only.
    bias_rows: I32
    bias_ids: I32
    bias_values: F32  # Sparse additions to the logits: logit_bias, and -1e30 on stop tokens before min_tokens.
    mask_rows: I32  # Rows that a grammar restricts to some tokens.
    masks: I32
    """`[len(mask_rows), ceil(V / 32)]`: bit i of word w allows token 32 w + i. Other tokens get -inf at the end."""
    logprob_rows: I32  # Ascending rows with `logprob_token_ids`, once per id.
    logprob_ids: I32

    @classmethod
    def none(cls) -> SamplingInputs:
        """Return the inputs of an iteration that samples nothing."""
        i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
        columns = {column.name: np.zeros(0, column.dtype) for column in COLUMNS}
        return cls(i, i, columns, f, i, i, f, i, i.reshape(0, 0), i, i)

    def sampler_arguments(self) -> dict[str, np.ndarray]:
        """Return the samplers' arguments except the logits, by name, `[S]` each."""
        return {name: self.uniform if name == "uniform" else self.columns[name] for name in sampler_names()}


class CountReset(NamedTuple):
    """Rebuilds the resident token counts of a request with penalties that (re)starts in a slot."""

    slot: int
    prompt: I32  # Token ids.
    output: I32  # Token ids.


class PromptLogprobs(NamedTuple):
    """Positions of a prompt whose next token needs a log-probability."""

    row: int  # Row of the batch.
    token_rows: I32  # Rows of the iteration's tokens.
    targets: I32  # Prompt token ids that follow them.
    top: int


class Pooled(NamedTuple):
    """Tokens of a request whose hidden states after the final norm are summed."""

    row: int  # Row of the batch.
    token_rows: I32  # Rows of the iteration's tokens.


class StateRows(NamedTuple):
    """Where the R requests of an iteration find and leave their recurrent states: n pages each (`StateLayout`).

    A state that is read is never one that another row writes. A row may write where it reads."""

    read: I32  # `[R, n]` pages of the state that each request starts from. Page 0 if `fresh`.
    fresh: npt.NDArray[np.bool_]  # `[R]` rows whose first position is 0: they start from zeros and read nothing.
    write: I32  # `[R, n]` pages that receive the state after the row's last token of this iteration.
    checkpoint_rows: I32  # `[C]` rows of the batch, ascending.
    checkpoint_tokens: I32
    """`[C]` how many of the row's tokens of this iteration the checkpoint covers, 1 to `query_len`, ascending within a
    row. The position is a multiple of the page size, and of the block unless it is at the row's end."""
    checkpoint_pages: I32  # `[C, n]` pages that receive the state there, in addition to `write`.


class EncodeJob(NamedTuple):
    """An image to encode before the iteration that computes its tokens."""

    rows: I32  # Rows of the pool that receive its embeddings, in order.
    pixels: bytearray
    """uint8 RGB rows of all tiles, back to back."""
    shapes: tuple[tuple[int, int], ...]  # (height, width) of each tile.
    grid: tuple[int, ...]


class Encoding:
    """The state of an `EncodeJob` that was begun. The encoder's thread writes it."""

    def __init__(self) -> None:
        self.done = False  # Set last.
        self.failed = False
        self.seconds = 0.0


class ImageInputs(NamedTuple):
    """What images add to an iteration of T tokens."""

    rows: I32  # `[T]` row of the pool with the token's embedding; -1: its id's.
    positions: I32 | None = None  # `[3, T]` rotary positions; None: `Batch.positions`.
    until: I32 | None = None
    """`[T]` the last position that each token sees: its own, or the last of its image. None: attention is causal."""


class Verified(NamedTuple):
    """The samples of an iteration with drafts. Arrays, or the same as tensors on a device."""

    first: Any  # `[S]` index of the first sample of the same row.
    expected: Any  # `[S]` the draft after the sampled position; -1 for none.

    def ends(self, tokens: Any, nonfinite: Any) -> Any:
        """Return after which of the sampled `tokens [S]` no sample of the row counts, `[S]` bool: the draft after it is
        wrong, or there is none. nonfinite `[S]`: samples that are not tokens."""
        return (tokens != self.expected) | nonfinite

    def reached(self, ends: Any) -> Any:
        """Return which samples count, `[S]` bool."""
        return before_end(ends, self.first)


def before_end(ends: Any, first: Any) -> Any:
    """Return which samples no earlier sample of their row ends, `[S]` bool. ends `[S]` bool; first `[S]` as in
    `Verified`. Both are arrays or tensors."""
    count = 1 * ends
    before = count.cumsum(0) - count
    return before == before[first]


class Batch(NamedTuple):
    """An iteration of R requests and T tokens: first decodes, with one token each and their drafts, then prefill
    chunks."""

    step: int
    num_decodes: int
    slots: I32
    epochs: I32
    query_len: I32  # `[R]` tokens per request in this iteration.
    kv_len: I32  # `[R]` positions visible to the request's last token of this iteration.
    token_ids: I32
    """`[T]`; -1 for a decode's token that is read on the device, from `last_token[slot]`, and `UNDRAFTED`."""
    positions: I32
    slot_mapping: npt.NDArray[np.int64]  # `[T]` page * page_size + offset.
    page_table: I32  # `[R, pages]`, padded with page 0.
    sampled_rows: I32  # `[S]` rows that sample a token, ascending. Decodes sample after each of their tokens.
    sampling: SamplingInputs
    count_resets: tuple[CountReset, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...]
    pooled: tuple[Pooled, ...] = ()
    states: StateRows | None = None  # None: the model has no recurrent states.
    adapters: I32 | None = None  # `[R]` number of each request's LoRA adapter, 0 for none; None: no request has one.
    images: ImageInputs | None = None  # None: no token depends on an image.
    drafted: bool = False  # A decode has drafts. Otherwise decodes have one token each, whose id is -1.

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def until(self) -> I32 | None:
        """See `ImageInputs`."""
        return None if self.images is None else self.images.until

    @property
    def decode_tokens(self) -> int:
        """Tokens of the decodes, drafts included."""
        return int(self.query_len[: self.num_decodes].sum()) if self.drafted else self.num_decodes

    @property
    def verified(self) -> Verified | None:
        """What accepting drafts depends on, or None if there are none."""
        if not self.drafted:
            return None
        rows, at = self.sampled_rows, self.sampling.logit_tokens
        expected = np.full(len(rows), -1, np.int32)
        follows = np.flatnonzero(rows[1:] == rows[:-1])
        expected[follows] = self.token_ids[at[follows] + 1]
        return Verified(np.searchsorted(rows, rows), expected)

    def by_query(self) -> Batch:
        """Return the iteration with a decode for each token of its decodes. Those of one request share its pages. This
        is for devices whose kernels know decodes of one query only; it has no `verified`."""
        d, at = self.num_decodes, self.decode_tokens
        of = np.concatenate((np.repeat(np.arange(d), self.query_len[:d]), np.arange(d, self.num_requests)))
        chunk_samples = self.sampled_rows[at:] + at - d
        return self._replace(
            num_decodes=at, slots=self.slots[of], epochs=self.epochs[of], page_table=self.page_table[of],
            query_len=np.concatenate((np.ones(at, np.int32), self.query_len[d:])),
            kv_len=np.concatenate((self.positions[:at] + 1, self.kv_len[d:])),
            sampled_rows=np.concatenate((np.arange(at, dtype=np.int32), chunk_samples)), drafted=False,
            adapters=None if self.adapters is None else self.adapters[of],
        )  # fmt: skip

    @property
    def read_rows(self) -> npt.NDArray[np.int64]:
        """`[N]` token rows whose state after the last layer is read, ascending."""
        asked = [of.token_rows for of in self.prompt_logprobs] + [of.token_rows for of in self.pooled]
        return np.unique(np.concatenate((self.sampling.logit_tokens, *asked))).astype(np.int64)

    @property
    def rows_by_reader(self) -> npt.NDArray[np.int64]:
        """`read_rows`, but with the sampled rows first, in their order."""
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
    """Log-probabilities of each row's token and of the k most likely tokens."""

    rows: I32  # Rows of `SamplingInputs`, or positions of a `PromptLogprobs`.
    ranks: I32  # Rank of the token, from 1.
    ids: I32  # `[n, 1 + k + m]`: the token, the most likely ones in order, up to m requested ones (`logprob_ids`).
    values: F32


class StepResult(NamedTuple):
    """Output of an iteration, on the host."""

    batch: Batch
    tokens: I32  # `[S]` sampled token ids.
    logprobs: Logprobs | None
    prompt_logprobs: tuple[Logprobs, ...]  # One for each of `batch.prompt_logprobs`.
    seconds: float  # Device time.
    idle_seconds: float = 0.0  # Device time between the end of the previous iteration and the start of this one.
    nano_batches: int = 1  # Nano-batches of the pipeline; 1 for the serial plan.
    nonfinite: npt.NDArray[np.bool_] | None = None
    """`[S]` rows with logits that are not finite, whose tokens are meaningless. None: there are no such rows."""
    pooled: F32 | None = None  # `[P, H]` sums, one row for each of `batch.pooled`; None if the batch pools nothing.
    attention: AttentionPath | None = None  # How attention was computed; None: derive it from the batch.


def uniform_draw(seeds: npt.NDArray[np.uint64], index: I32) -> F32:
    """Return a draw in (0, 1) per row from (seed, token index): the top 23 bits of splitmix64's output function.

    It is stateless: a request's tokens do not depend on its neighbours, on preemption or on the order of iterations."""
    with np.errstate(over="ignore"):
        z = seeds + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
