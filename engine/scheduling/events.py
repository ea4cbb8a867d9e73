"""`Events`: the reports of one commit. `Outbox`: builds the message to the clients from them and from other reports."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import EngineStats, Finish, Outputs, Started, TokenLogprobs

NOT_FINITE = "the model's logits are not finite (NaN or inf): its weights or this device's results cannot be used"


class Events(NamedTuple):
    """The reports of one commit as columns; see `messages.Outputs`."""

    handles: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray
    started: list[Started]
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]
    pooled: dict[int, bytes]

    @classmethod
    def none(cls) -> Events:
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint8), [], {}, {}, {}, {})

    def with_ends(self, handles: list[int], reason: Finish) -> Events:
        """Return these events plus, for each of `handles`, a terminal event without a token."""
        n = len(handles)
        if not n:
            return self
        return self._replace(
            handles=np.concatenate((self.handles, np.array(handles, np.int64))),
            tokens=np.concatenate((self.tokens, np.full(n, -1, np.int32))),
            finish=np.concatenate((self.finish, np.full(n, reason, np.uint8))),
        )


def nonfinite_results(result: StepResult) -> tuple[np.ndarray, np.ndarray]:
    """Return `[R]` rows of the batch whose prompt has scores or hidden states that are not finite, and `[S]` samples of
    those rows or of logits that are not finite, bool."""
    batch = result.batch
    rows = np.zeros(batch.num_requests, np.bool_)
    for asked, columns in zip(batch.prompt_logprobs, result.prompt_logprobs, strict=True):
        rows[asked.row] |= bool(np.isnan(columns.values).any())
    if result.pooled is not None:
        for of, total in zip(batch.pooled, result.pooled, strict=True):
            rows[of.row] |= not np.isfinite(total).all()
    samples = rows[batch.sampled_rows]
    return rows, samples if result.nonfinite is None else samples | result.nonfinite


def add_pooled(slots: SlotTable, result: StepResult, live: np.ndarray) -> None:
    """Add hidden states to the requests that have not ended: rows where `live [R]` is true."""
    if result.pooled is None:
        return
    for of, total in zip(result.batch.pooled, result.pooled, strict=True):
        if live[of.row]:
            request = slots.of(result.batch.slots[of.row])
            request.pooled = total.astype(np.float64) + (0.0 if request.pooled is None else request.pooled)


def embedding(request: Request) -> bytes:
    """Return the float32 embedding of a prompt that is fully computed."""
    assert request.pooled is not None
    count = request.prompt_len if request.params.pooling == "mean" else 1
    return (request.pooled / count).astype(np.float32).tobytes()


def token_logprobs(slots: SlotTable, result: StepResult, sampled: np.ndarray) -> dict[int, list[TokenLogprobs]]:
    """Return log-probabilities by handle, for rows that requested them, where `sampled [S]` is true. A request has one
    for each of its new tokens, in order."""
    columns, sampling = result.logprobs, result.batch.sampling
    if columns is None:
        return {}
    out: dict[int, list[TokenLogprobs]] = {}
    most = int(np.bincount(sampling.logprob_rows).max()) if len(sampling.logprob_rows) else 0
    requested = columns.ids.shape[1] - most
    for i, row in enumerate(columns.rows.tolist()):
        if sampled[row]:
            width, asked = 1 + int(sampling.columns["logprobs"][row]), int((sampling.logprob_rows == row).sum())
            # The requested ids follow the best ones of the row that has most of them.
            kept = [*range(min(width, requested)), *range(requested, requested + asked)]
            entry = TokenLogprobs(
                int(columns.ranks[i]), tuple(columns.ids[i, kept].tolist()), tuple(columns.values[i, kept].tolist())
            )
            out.setdefault(int(slots.handle[sampling.slots[row]]), []).append(entry)
    return out


def prompt_logprobs(slots: SlotTable, result: StepResult, live: np.ndarray) -> dict[int, list[TokenLogprobs]]:
    """Return prompt log-probabilities by handle where `live [R]` is true, and count them as delivered."""
    out: dict[int, list[TokenLogprobs]] = {}
    for asked, columns in zip(result.batch.prompt_logprobs, result.prompt_logprobs, strict=True):
        if not live[asked.row]:
            continue
        request = slots.of(result.batch.slots[asked.row])
        request.prompt_logprobs_sent += len(asked.targets)
        out[request.handle] = [
            TokenLogprobs(rank, tuple(ids), tuple(values))
            for rank, ids, values in zip(
                columns.ranks.tolist(), columns.ids.tolist(), columns.values.tolist(), strict=True
            )
        ]
    return out


class Outbox:
    """Reports produced outside an iteration, kept for the next message: refusals, charges, prepared pipelines."""

    def __init__(self) -> None:
        self.pipelines_changed = False  # since the last message, pipelines became ready
        self.joules: dict[int, float] = {}
        """Joules charged so far by handle, for metered requests of the iteration to be committed."""
        self.predicted: dict[int, tuple[int, int]] = {}
        """See `Outputs.predicted`, for requests of the iteration that is committed."""
        self.refused: list[tuple[int, str, Finish]] = []

    def refuse(self, handle: int, why: str, how: Finish) -> None:
        """Refuse a request that has had no event."""
        self.refused.append((handle, why, how))

    def outputs(self, events: Events, stats: EngineStats) -> Outputs:
        """Return the message with a commit's events and everything collected, and empty the outbox."""
        errors, joules = events.errors, self.joules
        self.joules, self.pipelines_changed = {}, False
        predicted, self.predicted = self.predicted, {}
        if refused := self.refused:
            self.refused = []
            for how in (Finish.REFUSED, Finish.BUSY):
                events = events.with_ends([handle for handle, _, end in refused if end is how], how)
            errors = {**errors, **{handle: why for handle, why, _ in refused}}
        return Outputs(
            handles=events.handles.astype(np.int64, copy=False).tobytes(),
            tokens=events.tokens.astype(np.int32, copy=False).tobytes(),
            finish=events.finish.astype(np.uint8, copy=False).tobytes(), started=events.started,
            logprobs=events.logprobs, prompt_logprobs=events.prompt_logprobs, pooled=events.pooled, errors=errors,
            joules=joules, predicted=predicted, stats=stats,
        )  # fmt: skip
