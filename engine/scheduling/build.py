"""Builds the arrays of a `Batch` from a scheduling decision, with vector operations over slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.engine.runner.iteration.batch import (
    I32,
    Batch,
    CountReset,
    Pooled,
    PromptLogprobs,
    SamplingInputs,
    uniform_draw,
)
from weft.engine.scheduling import constraints
from weft.engine.scheduling.grammar import Mask
from weft.engine.scheduling.slots import Phase, SlotTable

SUPPRESSED = -1e30
"""Bias of stop tokens before `min_tokens`. It is not -inf, because a grammar may allow no other token."""

Chunk = tuple[int, int]  # (slot, tokens) of a prefill


class ChosenDrafts(NamedTuple):
    """The drafts of an iteration's n decodes."""

    tokens: I32  # All drafts, in order of the decodes.
    length: I32  # `[n]` drafts of each decode.
    masks: dict[int, list[Mask]]
    """Masks of all positions of decodes with drafts whose tokens are restricted, by slot."""


def build_batch(
    s: SlotTable, page_size: int, step: int, decodes: I32, chunks: Sequence[Chunk], count_resets: Sequence[CountReset],
    drafts: ChosenDrafts | None = None,
) -> Batch:  # fmt: skip
    """Build the batch of iteration `step`. Advances the slots' `scheduled` and `in_flight` counters."""
    num_decodes = len(decodes)
    rows = np.concatenate((decodes, np.array([c[0] for c in chunks], np.int32)))
    query_len = np.ones(len(rows), np.int32)
    query_len[num_decodes:] = [c[1] for c in chunks]
    start = s.scheduled.take(rows)
    decode_tokens = num_decodes
    if drafts is not None:
        query_len[:num_decodes] += drafts.length
        decode_tokens += len(drafts.tokens)
    total = int(query_len.sum())
    token_ids = np.full(total, -1, np.int32)
    positions = np.empty(total, np.int32)
    token_rows = np.repeat(np.arange(len(rows), dtype=np.int32), query_len)
    if drafts is None:
        positions[:num_decodes] = start[:num_decodes]
        if s.replays:
            known = start[:num_decodes] < s.known.take(decodes)
            token_ids[:num_decodes][known] = s.token_ids[decodes[known], start[:num_decodes][known]]
    else:
        _place_drafts(s, decodes, drafts, token_rows[:decode_tokens], token_ids, positions)
    at = decode_tokens
    scored: list[PromptLogprobs] = []
    pooled: list[Pooled] = []
    for row, (slot, length) in enumerate(chunks, start=num_decodes):
        first = int(start[row])
        token_ids[at : at + length] = s.token_ids[slot, first : first + length]
        positions[at : at + length] = np.arange(first, first + length, dtype=np.int32)
        if s.prompt_logprobs[slot] >= 0 and (part := _prompt_logprobs(s, row, slot, first, length, at)):
            scored.append(part)
        if (pooling := s.pooling[slot]) is not None:
            before = at if pooling == "mean" else at + length - 1
            if pooling == "mean" or first + length == s.target[slot]:
                pooled.append(Pooled(row, np.arange(before, at + length, dtype=np.int32)))
        at += length
    pages = s.page_table[rows[token_rows], positions // page_size].astype(np.int64)
    end = start + query_len
    s.scheduled[rows] = end
    s.in_flight[rows] += query_len
    s.last_step[rows] = step
    # A chunk that completes the prefill samples the next token, unless the request has no output. Nothing is sampled
    # whose token is known.
    target = s.target.take(rows)
    samples = (np.arange(len(rows)) < num_decodes) | ((end == target) & (target < s.max_total_tokens.take(rows)))
    if s.replays:
        samples &= end >= s.known.take(rows)
    sampled_rows = np.flatnonzero(samples).astype(np.int32)
    logit_tokens = np.cumsum(query_len) - 1
    if drafts is not None:
        # Every token of a decode is sampled.
        logit_tokens = np.concatenate((np.arange(decode_tokens), logit_tokens[sampled_rows[num_decodes:]]))
        sampled_rows = np.concatenate((token_rows[:decode_tokens], sampled_rows[num_decodes:]))
        index = positions[logit_tokens] + 1
    else:
        logit_tokens = logit_tokens[sampled_rows]
        index = end[sampled_rows]
    s.phase[rows[end >= target]] = Phase.DECODE
    return Batch(
        step=step, num_decodes=num_decodes, slots=rows, epochs=s.epoch.take(rows), query_len=query_len, kv_len=end,
        token_ids=token_ids, positions=positions, slot_mapping=pages * page_size + positions % page_size,
        page_table=s.page_table[rows, : int(s.num_pages[rows].max())], sampled_rows=sampled_rows,
        sampling=_sampling(s, rows[sampled_rows], logit_tokens, index, {} if drafts is None else drafts.masks),
        count_resets=tuple(count_resets), prompt_logprobs=tuple(scored), pooled=tuple(pooled),
        adapters=adapters if (adapters := s.adapter.take(rows)).any() else None, drafted=drafts is not None,
    )  # fmt: skip


def _place_drafts(
    s: SlotTable, decodes: I32, drafts: ChosenDrafts, rows: I32, token_ids: I32, positions: I32
) -> None:  # fmt: skip
    """Write the tokens and positions of decodes with drafts. `rows` is the row of each of their tokens. A decode whose
    newest token is on the host gets its id, so that it does not need the device's copy."""
    first = np.searchsorted(rows, np.arange(len(decodes)))
    offset = np.arange(len(rows)) - first[rows]
    positions[: len(rows)] = s.scheduled[decodes][rows] + offset
    is_draft = offset > 0
    token_ids[: len(rows)][is_draft] = drafts.tokens
    known = s.scheduled[decodes] < s.known[decodes]
    token_ids[first[known]] = s.token_ids[decodes[known], s.scheduled[decodes[known]]]


def _prompt_logprobs(s: SlotTable, row: int, slot: int, first: int, length: int, at: int) -> PromptLogprobs | None:
    """Return the positions of a chunk to score: p predicts prompt token p + 1. Positions delivered before a preemption
    are skipped."""
    request = s.of(slot)
    low = max(first, request.prompt_logprobs_sent)
    high = min(first + length, int(s.prompt_len[slot]) - 1)
    if low >= high:
        return None
    token_rows = np.arange(at + low - first, at + high - first, dtype=np.int32)
    return PromptLogprobs(row, token_rows, s.token_ids[slot, low + 1 : high + 1].copy(), int(s.prompt_logprobs[slot]))


def _sampling(
    s: SlotTable, slots: I32, logit_tokens: np.ndarray, index: I32, draft_masks: dict[int, list[Mask]]
) -> SamplingInputs:
    """`index [S]` is the index of each new token in its request. `draft_masks` are those of `ChosenDrafts`."""
    bias_rows: list[np.ndarray] = []
    bias_ids: list[np.ndarray] = []
    bias_values: list[np.ndarray] = []
    for row in np.flatnonzero(s.biased.take(slots)).tolist():
        request = s.of(slots[row])
        bias = request.params.logit_bias
        bias_rows.append(np.full(len(bias), row, np.int32))
        bias_ids.append(np.fromiter(bias.keys(), np.int32, len(bias)))
        bias_values.append(np.fromiter(bias.values(), np.float32, len(bias)))
    early = np.flatnonzero(index < s.min_total.take(slots))
    if len(early):
        stops = s.stop_ids[slots[early]]
        where = np.nonzero(stops >= 0)
        bias_rows.append(early[where[0]].astype(np.int32))
        bias_ids.append(stops[where])
        bias_values.append(np.full(len(where[0]), SUPPRESSED, np.float32))
    wanted_ids = [
        (row, s.of(slots[row]).params.logprob_token_ids)
        for row in np.flatnonzero(s.columns["logprobs"].take(slots) >= 0).tolist()
    ]
    mask_rows = np.flatnonzero(s.masked.take(slots)).astype(np.int32)
    none_i, none_f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return SamplingInputs(
        slots=slots,
        logit_tokens=logit_tokens.astype(np.int32),
        columns={name: column.take(slots) for name, column in s.columns.items()},
        uniform=uniform_draw(s.seed.take(slots), index),
        bias_rows=np.concatenate(bias_rows) if bias_rows else none_i,
        bias_ids=np.concatenate(bias_ids) if bias_ids else none_i,
        bias_values=np.concatenate(bias_values) if bias_values else none_f,
        mask_rows=mask_rows,
        masks=constraints.masks(s, slots[mask_rows], draft_masks) if len(mask_rows) else none_i.reshape(0, 0),
        logprob_rows=np.array([row for row, ids in wanted_ids for _ in ids], np.int32),
        logprob_ids=np.array([token_id for _, ids in wanted_ids for token_id in ids], np.int32),
    )
