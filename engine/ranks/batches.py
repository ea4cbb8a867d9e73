"""Serializes a `Batch` to typed arrays in a fixed order and back, to send an iteration to other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from weft.engine.ranks.links import Bytes
from weft.engine.runner.iteration.batch import (
    Batch,
    CountReset,
    ImageInputs,
    Pooled,
    PromptLogprobs,
    SamplingInputs,
    StateRows,
)  # fmt: skip
from weft.engine.wire.sampling import COLUMNS

_I, _F = np.int32, np.float32
_KINDS: tuple[type[np.generic], ...] = (
    np.int64,  # step, decodes, columns of the page table, words of a mask, pages of a state (-1: no states), drafts
    *(_I, _I, _I, _I, _I, _I, np.int64),  # rows of requests and tokens
    *(_I, _I, _I, _I),  # page table, sampled rows
    *(_F, _I, _I, _F, _I, _I, _I, _I),  # draws, biases, masks, requested log-probabilities
    *(column.dtype for column in COLUMNS),
    *(_I, _I, _I, _I, _I),  # count resets, prompt logprobs
    *(_I, _I),  # hidden states
    *(_I, np.bool_, _I, _I, _I, _I),  # recurrent states
    _I,  # adapters of requests; none: no request has one
    *(_I, _I, _I),  # images: rows of tokens, rotary positions and last keys; none: no token depends on an image
)


def arrays_of(batch: Batch) -> list[np.ndarray]:
    s, resets, scores = batch.sampling, batch.count_resets, batch.prompt_logprobs
    state_pages = -1 if batch.states is None else batch.states.read.shape[1]
    numbers = [batch.step, batch.num_decodes, batch.page_table.shape[1], s.masks.shape[1], state_pages, batch.drafted]
    empty = np.zeros(0, np.int32)
    arrays = [
        np.array(numbers, np.int64),
        batch.slots, batch.epochs, batch.query_len, batch.kv_len, batch.token_ids, batch.positions,
        batch.slot_mapping,
        batch.page_table, batch.sampled_rows, s.slots, s.logit_tokens,
        s.uniform,
        s.bias_rows, s.bias_ids,
        s.bias_values,
        s.mask_rows, s.masks, s.logprob_rows, s.logprob_ids,
        *(s.columns[column.name] for column in COLUMNS),
        np.array([(r.slot, len(r.prompt), len(r.output)) for r in resets], np.int32),
        np.concatenate([part for r in resets for part in (r.prompt, r.output)] or [empty]),
        np.array([(p.row, len(p.token_rows), p.top) for p in scores], np.int32),
        np.concatenate([p.token_rows for p in scores] or [empty]),
        np.concatenate([p.targets for p in scores] or [empty]),
        np.array([(p.row, len(p.token_rows)) for p in batch.pooled], np.int32),
        np.concatenate([p.token_rows for p in batch.pooled] or [empty]),
        *(batch.states if batch.states is not None else [empty] * len(StateRows._fields)),
        empty if batch.adapters is None else batch.adapters,
        *(empty if part is None else part for part in batch.images or (None,) * len(ImageInputs._fields)),
    ]  # fmt: skip
    return [np.asarray(array, kind) for array, kind in zip(arrays, _KINDS, strict=True)]


def batch_of(arrays: Sequence[Bytes]) -> Batch:
    typed = iter([array.view(kind) for array, kind in zip(arrays, _KINDS, strict=True)])

    def take(count: int) -> list[np.ndarray]:
        return [next(typed) for _ in range(count)]

    step, decodes, pages, words, state_pages, drafted = next(typed).tolist()
    slots, epochs, query_len, kv_len, token_ids, positions, slot_mapping = take(7)
    page_table, sampled_rows, *sampled = take(4)
    uniform, bias_rows, bias_ids, bias_values, mask_rows, masks, logprob_rows, logprob_ids = take(8)
    columns = dict(zip((column.name for column in COLUMNS), take(len(COLUMNS)), strict=True))
    resets, tokens, scores, token_rows, targets, pooled, pooled_rows = take(7)
    read, fresh, write, rows, ends, copies = take(len(StateRows._fields))
    adapters, image_rows, rope, until = take(1 + len(ImageInputs._fields))
    cleared, scored, wanted = (
        resets.reshape(-1, 3).tolist(),
        scores.reshape(-1, 3).tolist(),
        pooled.reshape(-1, 2).tolist(),
    )
    texts = _split(tokens, [length for _, *lengths in cleared for length in lengths])
    scored_rows, scored_targets = (_split(flat, [length for _, length, _ in scored]) for flat in (token_rows, targets))
    wanted_rows = _split(pooled_rows, [length for _, length in wanted])
    return Batch(
        step=step, num_decodes=decodes, slots=slots, epochs=epochs, query_len=query_len, kv_len=kv_len,
        token_ids=token_ids, positions=positions, slot_mapping=slot_mapping,
        page_table=page_table.reshape(len(slots), pages), sampled_rows=sampled_rows,
        sampling=SamplingInputs(
            slots=sampled[0], logit_tokens=sampled[1], columns=columns, uniform=uniform, bias_rows=bias_rows,
            bias_ids=bias_ids, bias_values=bias_values, mask_rows=mask_rows,
            masks=masks.reshape(len(mask_rows), words), logprob_rows=logprob_rows, logprob_ids=logprob_ids,
        ),
        count_resets=tuple(CountReset(slot, next(texts), next(texts)) for slot, *_ in cleared),
        prompt_logprobs=tuple(
            PromptLogprobs(row, next(scored_rows), next(scored_targets), top) for row, _, top in scored
        ),
        pooled=tuple(Pooled(row, next(wanted_rows)) for row, _ in wanted),
        states=None if state_pages < 0 else StateRows(
            read.reshape(-1, state_pages), fresh, write.reshape(-1, state_pages), rows, ends,
            copies.reshape(-1, state_pages),
        ),
        drafted=bool(drafted), adapters=adapters if len(adapters) else None,
        images=ImageInputs(
            image_rows, rope.reshape(3, -1) if len(rope) else None, until if len(until) else None
        ) if len(image_rows) else None,
    )  # fmt: skip


def _split(flat: np.ndarray, lengths: Iterable[int]) -> Iterator[np.ndarray]:
    at = 0
    for length in lengths:
        yield flat[at : at + length]
        at += length
