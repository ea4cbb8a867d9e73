"""The arrays of a batch, one value at a time, against the rows that they are made from."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.runner.iteration.batch import Batch, CountReset, uniform_draw
from weft.engine.scheduling.build import SUPPRESSED, build_batch
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable
from weft.engine.wire.sampling import SamplingParams

PAGE = 4
MAX_LEN = 24
NUM_SLOTS = 6


def make_request(handle: int, prompt: int, done: int, max_tokens: int, **params: object) -> Request:
    """A request whose first `done` tokens are computed already."""
    request = Request(
        handle=handle,
        token_ids=np.arange(100 * handle, 100 * handle + prompt, dtype=np.int32),
        prompt_len=prompt,
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        max_total_tokens=prompt + max_tokens,
        priority=0,
        order=handle,
        arrival=0.0,
        salt="",
        stop_ids=(0, 9),
        seed=1000 + handle,
    )
    request.cached_tokens = done
    return request


def fill(requests: list[Request]) -> SlotTable:
    """A row for each request. Pages 10, 11, … are the first one's, 20, 21, … the second one's."""
    s = SlotTable(NUM_SLOTS, MAX_LEN, PAGE)
    for i, request in enumerate(requests):
        slot = s.assign(request, np.zeros(0, np.int32), request.cached_tokens)
        s.num_pages[slot] = -(-len(request.token_ids) // PAGE) + 1
        s.page_table[slot, : s.num_pages[slot]] = 10 * (i + 1) + np.arange(s.num_pages[slot])
    return s


def decoding(s: SlotTable, request: Request) -> int:
    """Put the row after its prefill: its first sample is known and not yet computed."""
    slot = request.slot
    s.scheduled[slot] = s.confirmed[slot] = s.target[slot]
    s.phase[slot] = Phase.DECODE
    return slot


ROWS = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 11), st.integers(1, 9), st.booleans()), min_size=1, max_size=NUM_SLOTS
)


@given(rows=ROWS, step=st.integers(1, 99))
@settings(max_examples=150)
def test_every_value_comes_from_its_own_row(rows: list[tuple[int, int, int, bool]], step: int) -> None:
    requests = [make_request(i, prompt, min(done, prompt - 1), 5) for i, (prompt, done, _, _) in enumerate(rows)]
    s = fill(requests)
    decodes = [decoding(s, r) for r, row in zip(requests, rows, strict=True) if row[3]]
    chunks = [
        (r.slot, min(row[2], len(r.token_ids) - r.cached_tokens))
        for r, row in zip(requests, rows, strict=True)
        if not row[3]
    ]
    before = copy.deepcopy(s)
    batch = build_batch(s, PAGE, step, np.array(decodes, np.int32), chunks, [])
    at = 0
    for row, (slot, length) in enumerate([(slot, 1) for slot in decodes] + chunks):
        first, pages = int(before.scheduled[slot]), before.page_table[slot]
        assert (batch.slots[row], batch.query_len[row], batch.kv_len[row]) == (slot, length, first + length)
        assert batch.epochs[row] == before.epoch[slot]
        for position in range(first, first + length):
            expected = -1 if row < len(decodes) else before.token_ids[slot, position]
            assert (batch.token_ids[at], batch.positions[at]) == (expected, position)
            assert batch.slot_mapping[at] == pages[position // PAGE] * PAGE + position % PAGE
            at += 1
        ends = row < len(decodes) or first + length == before.target[slot]
        assert (row in batch.sampled_rows) == ends
        if ends:
            n = batch.sampled_rows.tolist().index(row)
            assert batch.sampling.slots[n] == slot
            assert batch.sampling.logit_tokens[n] == at - 1
            assert batch.sampling.uniform[n] == uniform_draw(before.seed[[slot]], np.array([first + length]))[0]
        assert (s.scheduled[slot], s.in_flight[slot], s.last_step[slot]) == (first + length, length, step)
        assert s.phase[slot] == (Phase.DECODE if ends else Phase.PREFILL)
    widest = max(int(before.num_pages[slot]) for slot in batch.slots)
    assert np.array_equal(batch.page_table, before.page_table[batch.slots, :widest])
    assert (batch.step, batch.num_decodes, batch.num_tokens) == (step, len(decodes), at)


def one(request: Request, *, decode: bool = False) -> Batch:
    s = fill([make_request(9, 3, 0, 5), request])
    if decode:
        return build_batch(s, PAGE, 1, np.array([decoding(s, request)], np.int32), [], [])
    return build_batch(s, PAGE, 1, np.zeros(0, np.int32), [(request.slot, len(request.token_ids))], [])


def test_the_sampling_parameters_of_a_request_are_in_its_row() -> None:
    values = {"temperature": 0.5, "top_p": 0.75, "top_k": 3, "min_p": 0.25, "logprobs": 2}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    sampling = one(make_request(1, 5, 0, 4, **values, **penalties)).sampling
    got = {name: column.tolist() for name, column in sampling.columns.items()}
    wanted = {**values, "presence": 0.5, "frequency": 0.25, "repetition": 1.5, "counted": True}
    assert got == {name: [value] for name, value in wanted.items()}
    assert (len(sampling.bias_rows), len(sampling.mask_rows), sampling.masks.shape) == (0, 0, (0, 0))


def test_biases_name_their_row_among_those_sampled() -> None:
    plain, biased = make_request(0, 5, 0, 4), make_request(1, 5, 0, 4, logit_bias={3: 1.5, 5: -2.0})
    s = fill([plain, biased])
    batch = build_batch(s, PAGE, 1, np.zeros(0, np.int32), [(plain.slot, 5), (biased.slot, 5)], [])
    sampling = batch.sampling
    assert (sampling.bias_rows.tolist(), sampling.bias_ids.tolist()) == ([1, 1], [3, 5])
    assert sampling.bias_values.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("known", "early"), [(5, True), (6, True), (7, False)])
def test_stop_tokens_are_suppressed_until_there_are_enough_tokens(known: int, early: bool) -> None:
    request = make_request(1, 5, 0, 8, min_tokens=2)
    request.token_ids = np.arange(known, dtype=np.int32)
    sampling = one(request).sampling
    ids = [0, 9] if early else []
    assert sampling.bias_ids.tolist() == ids
    assert sampling.bias_rows.tolist() == [0] * len(ids)
    assert sampling.bias_values.tolist() == [np.float32(SUPPRESSED)] * len(ids)


def test_a_prompt_without_requested_output_is_not_sampled() -> None:
    request = make_request(1, 5, 0, 1)
    request.max_total_tokens = 5
    assert one(request).sampled_rows.tolist() == []


@pytest.mark.parametrize(
    ("done", "length", "sent", "rows", "targets"),
    [
        (0, 8, 0, range(7), range(101, 108)),  # the last position predicts the first output token: not the prompt's
        (0, 4, 0, range(4), range(101, 105)),
        (4, 3, 0, range(3), range(105, 108)),
        (7, 1, 0, (), ()),
        (0, 8, 3, range(3, 7), range(104, 108)),  # it was preempted after three had been delivered
        (4, 4, 6, (2,), (107,)),
        (4, 4, 7, (), ()),
    ],
)
def test_prompt_logprobs_are_requested_once_per_position(
    done: int, length: int, sent: int, rows: range, targets: range
) -> None:
    before = make_request(0, 6, 0, 4)
    request = make_request(1, 8, done, 4, prompt_logprobs=2)
    request.prompt_logprobs_sent = sent
    s = fill([before, request])
    batch = build_batch(s, PAGE, 1, np.zeros(0, np.int32), [(before.slot, 6), (request.slot, length)], [])
    if not rows:
        assert batch.prompt_logprobs == ()
        return
    (part,) = batch.prompt_logprobs
    row, tokens, ids, count = part
    assert (row, count) == (1, 2)
    assert tokens.tolist() == [6 + i for i in rows]
    assert ids.tolist() == list(targets)


def test_prompt_logprobs_of_only_the_prompt_token_are_requested_too() -> None:
    (part,) = one(make_request(1, 4, 0, 4, prompt_logprobs=0)).prompt_logprobs
    assert part[-1] == 0


def test_count_resets_are_part_of_the_batch() -> None:
    request = make_request(1, 3, 0, 2)
    s = fill([request])
    reset = CountReset(request.slot, request.token_ids, request.token_ids[:0])
    assert build_batch(s, PAGE, 1, np.zeros(0, np.int32), [(request.slot, 3)], [reset]).count_resets == (reset,)
