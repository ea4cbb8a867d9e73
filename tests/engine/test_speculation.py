"""Speculation as a whole: drafts that pay are verified, others are not, and no token changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.engine.config import EngineConfig
from weft.engine.config.speculation import DraftOptions
from weft.engine.engine import Engine
from weft.engine.errors import ConfigError
from weft.engine.runner.iteration.batch import Batch, SamplingInputs
from weft.engine.runner.options.resolve import _drafting
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable
from weft.engine.scheduling.speculation import TextDrafter
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

LENGTH = 800
BUBBLE = 0.0004
"""seconds that the device waits for the host if iterations are launched one at a time"""


class World:
    """Requests whose tokens are known in advance, on a device whose times are given, with a clock of its own."""

    def __init__(self, texts: list[list[int]], seconds: Callable[[int], float], options: DraftOptions) -> None:
        self.now, self._seconds, self._texts = 0.0, seconds, texts
        self.slots = SlotTable(len(texts), LENGTH + 8, 64)
        self.slots_of = np.arange(len(texts), dtype=np.int32)
        for i, text in enumerate(texts):
            request = Request(
                handle=i, token_ids=np.array(text[:1], np.int32), prompt_len=1, params=SamplingParams(),
                max_total_tokens=len(text), priority=0, order=i, arrival=0.0, salt="", stop_ids=(), seed=0,
            )  # fmt: skip
            slot = self.slots.assign(request, np.zeros(0, np.int32), 0)
            self.slots.phase[slot] = Phase.DECODE
            self._set(slot, 1)
        self.drafter = TextDrafter(self.slots, options, clock=lambda: self.now)
        self.verified = 0

    def _set(self, slot: int, known: int) -> None:
        s, text = self.slots, self._texts[self.slots.of(slot).handle]
        s.token_ids[slot, : len(text)] = text
        s.known[slot], s.scheduled[slot] = known, known - 1
        s.max_total_tokens[slot] = len(text)

    def step(self) -> None:
        s, slots = self.slots, self.slots.decoding().astype(np.int32)
        lengths = np.zeros(len(slots), np.int32)
        accepted = np.zeros(len(slots), np.int32)
        synchronous = self.drafter.active
        if synchronous:
            room = (s.max_total_tokens[slots] - s.known[slots] - 1).astype(np.int32)
            drafts = self.drafter.propose(slots, room, 10_000)
            assert (drafts.length <= room).all()
            lengths = drafts.length
            for row, slot in enumerate(slots.tolist()):
                text = self._texts[s.of(slot).handle]
                for place in range(int(lengths[row])):
                    if text[int(s.known[slot]) + place] != drafts.tokens[row, place]:
                        break
                    accepted[row] += 1
        rows = len(slots) + int(lengths.sum())
        self.verified += int(lengths.sum())
        self.now += self._seconds(rows) + (BUBBLE if synchronous else 0.0)
        batch = SimpleNamespace(num_chunks=0, num_decodes=len(slots), num_tokens=rows)
        self.drafter.ended(SimpleNamespace(batch=batch), self.now)
        for row, slot in enumerate(slots.tolist()):
            self._set(slot, int(s.known[slot]) + 1 + int(accepted[row]))
        if lengths.any():
            used = lengths > 0
            self.drafter.verified(slots[used], lengths[used], accepted[used])
        self.drafter.committed(True)

    def run(self) -> float:
        while len(self.slots.decoding()):
            self.step()
        return self.now


def copied(seed: int) -> list[int]:
    """A text that repeats itself with small changes, as edited code does."""
    rng = np.random.default_rng(seed)
    part = rng.integers(0, 5000, 150)
    parts = []
    for _ in range(LENGTH // len(part)):
        parts.append(np.where(rng.random(len(part)) < 0.03, rng.integers(0, 5000, len(part)), part))
    return np.concatenate(parts).tolist()


def unrelated(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, LENGTH).tolist()


def breaking(seed: int) -> list[int]:
    """Short repetitions that end suddenly."""
    rng = np.random.default_rng(seed)
    parts = [np.tile(rng.integers(0, 60, rng.integers(1, 4)), rng.integers(2, 5)) for _ in range(LENGTH)]
    return np.concatenate(parts)[:LENGTH].tolist()


def flat(rows: int) -> float:
    """A device bound by memory: rows are nearly free."""
    return 0.0043 + 2e-5 * rows


def steep(rows: int) -> float:
    """A device bound by arithmetic: a row costs as much as a token is worth."""
    return 0.001 + 0.004 * rows


def stairs(rows: int) -> float:
    """A device that computes rows in groups of 8."""
    return 0.002 + 0.003 * -(-rows // 8)


MEASURED = DraftOptions("suffix", 16, measured=True)


@pytest.mark.parametrize("number", [1, 6])
def test_drafts_shorten_text_that_repeats_itself(number: int) -> None:
    world = World([copied(i) for i in range(number)], flat, MEASURED)
    assert world.run() < 0.45 * LENGTH * flat(number)
    assert world.drafter.stats().draft_tokens["text"] == world.verified > 0


@pytest.mark.parametrize(
    ("make", "seconds", "number"),
    [(unrelated, flat, 1), (unrelated, steep, 1), (unrelated, stairs, 4), (breaking, stairs, 1), (copied, stairs, 16)],
)
def test_drafts_never_cost_more_than_a_hundredth(
    make: Callable[[int], list[int]], seconds: Callable[[int], float], number: int
) -> None:
    world = World([make(i) for i in range(number)], seconds, MEASURED)
    assert world.run() < 1.01 * LENGTH * seconds(number)


def test_the_guard_bounds_the_cost_of_text_that_deceives() -> None:
    """Repetitions that end suddenly, where each row costs as much as a token."""
    world = World([breaking(1)], steep, MEASURED)
    assert world.run() < 1.015 * LENGTH * steep(1)
    assert world.drafter.stats().pauses > 0


def test_text_that_never_repeats_is_not_drafted() -> None:
    world = World([list(range(1, LENGTH))], flat, MEASURED)
    world.run()
    assert world.verified == 0


def test_foreseen_tokens_are_those_that_are_accepted() -> None:
    world = World([copied(i) for i in range(4)], flat, MEASURED)
    world.run()
    stats = world.drafter.stats()
    assert stats.foreseen_tokens == pytest.approx(stats.accepted_tokens["text"], rel=0.15)
    assert sum(stats.accepted_by_position.values()) == stats.accepted_tokens["text"]


def test_a_fixed_depth_drafts_as_far_as_it_may() -> None:
    options = DraftOptions("suffix", 8, measured=False, factor=8.0, by_requests=((1, 1, 3), (5, 99, 0)))
    world = World([[1, 2, 3, 4] * 20 for _ in range(6)], flat, options)
    for _ in range(8):
        world.step()
    six = world.slots.decoding().astype(np.int32)
    room = np.full(6, 50, np.int32)
    assert world.drafter.propose(six, room, 99).length.tolist() == [0] * 6
    assert world.drafter.propose(six[:1], room[:1], 99).length.tolist() == [3]
    assert world.drafter.propose(six[:3], room[:3], 99).length.tolist() == [8] * 3
    assert world.drafter.propose(six[:3], room[:3], 10).length.tolist() == [8, 2, 0]
    assert world.drafter.propose(six[:3], np.array([1, 0, 5], np.int32), 99).length.tolist() == [1, 0, 5]


def test_a_request_without_drafts_gets_none() -> None:
    world = World([[1, 2, 3, 4] * 20 for _ in range(2)], flat, DraftOptions("suffix", 8, measured=False, factor=8.0))
    for _ in range(8):
        world.step()
    slots = world.slots.decoding().astype(np.int32)
    world.slots.max_drafts[slots[0]] = 0
    assert world.drafter.active
    assert world.drafter.propose(slots, np.full(2, 9, np.int32), 99).length.tolist() == [0, 8]
    world.slots.max_drafts[slots] = 0
    assert not world.drafter.active


class Generated:
    """An engine with the demo model, and what it generates."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(EngineConfig(device="cpu", max_num_seqs=4, max_model_len=512, cpu_threads=1, **options))
        self.predicted: dict[int, tuple[int, int]] = {}

    def run(self, *requests: AddRequest) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {request.handle: [] for request in requests}
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            if (outputs := self.engine.step()) is None:
                continue
            self.predicted |= outputs.predicted
            for handle, token, _ in zip(*(column.tolist() for column in outputs.columns()), strict=True):
                if token >= 0:
                    tokens[handle].append(token)
        self.engine.scheduler.check()
        return tokens


def asked(handle: int, length: int = 40, **more: Any) -> AddRequest:
    prompt = (np.arange(length, dtype=np.int32) * (handle + 3)) % 23 + 40
    params = SamplingParams(max_tokens=60, temperature=0.7 * (handle % 2), seed=handle, ignore_eos=True)
    return AddRequest(handle=handle, prompt_token_ids=prompt.tobytes(), params=params, **more)


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    return Generated(batch_invariant=True).run(*(asked(i) for i in range(4)))


VLLM = '{"method": "suffix", "num_speculative_tokens": 4}'


@pytest.mark.parametrize(
    "how", [{"speculation": "suffix"}, {"speculation": "ngram"}, {"speculation": "auto"}, {"speculative_config": VLLM}]
)
def test_tokens_are_those_without_speculation(how: dict[str, Any], plain: dict[int, list[int]]) -> None:
    generated = Generated(batch_invariant=True, **how)
    assert generated.run(*(asked(i) for i in range(4))) == plain
    if how.get("speculation") != "auto":
        assert sum(generated.engine.stats().speculation.accepted_tokens.values()) > 0


def test_a_right_prediction_saves_iterations_and_is_counted(plain: dict[int, list[int]]) -> None:
    generated = Generated(batch_invariant=True, speculation="suffix")
    prediction = np.array([7, *plain[0]], np.int32).tobytes()
    assert generated.run(asked(0, prediction=prediction))[0] == plain[0]
    alone = generated.engine.stats()
    accepted, rejected = generated.predicted[0]
    assert accepted == alone.speculation.accepted_tokens["prediction"] > 30
    assert accepted + rejected == alone.speculation.draft_tokens["prediction"]
    assert alone.iterations < 10


def test_a_wrong_prediction_changes_nothing(plain: dict[int, list[int]]) -> None:
    generated = Generated(batch_invariant=True, speculation="suffix")
    wrong = np.array([token for token in plain[1] for token in (token, 5)], np.int32)
    assert generated.run(asked(1, prediction=wrong.tobytes()))[1] == plain[1]
    accepted, rejected = generated.predicted[1]
    assert rejected > accepted


def test_a_request_may_refuse_drafts(plain: dict[int, list[int]]) -> None:
    generated = Generated(batch_invariant=True, speculation="suffix")
    assert generated.run(asked(0, max_drafts=0))[0] == plain[0]
    assert generated.engine.stats().speculation.drafts == 0


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("recurrent layers", {"recurrent": True}, "triton"),
    ("one GPU only", {"tensor_parallel_size": 2}, "triton"),
    ("transformers' code", {"native": False}, "triton"),
    ("not flash-attn", {}, "flash-attn"),
]


@pytest.mark.parametrize(("reason", "given", "attention"), REFUSED)
def test_what_cannot_verify_drafts_refuses_them(reason: str, given: dict[str, Any], attention: str) -> None:
    """In one line, and 'auto' is off."""
    spec: Any = SimpleNamespace(**{"recurrent": False, "native": True, "architecture": "AnyForCausalLM", **given})
    ranks = given.get("tensor_parallel_size", 1)

    def drafting(**how: Any) -> DraftOptions | None:
        return _drafting(EngineConfig(tensor_parallel_size=ranks, **how), spec, attention, cuda=True)

    for how, name in (
        ({"speculation": "ngram"}, "--speculation ngram"),
        ({"speculative_config": VLLM}, "--speculative"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}.*{reason}[^\n]*$"):
            drafting(**how)
    assert drafting(speculation="auto") is None
    assert drafting() is None


def test_a_device_of_single_queries_gets_a_decode_for_each_draft() -> None:
    tokens = np.array([-1, 4, 5, 6, 9, 9], np.int32)
    positions = np.array([30, 31, 32, 7, 16, 17], np.int32)
    three = np.array([3, 1, 2], np.int32)
    sampling = SamplingInputs.none()._replace(
        slots=np.array([2, 2, 2, 0, 1], np.int32), logit_tokens=np.array([0, 1, 2, 3, 5], np.int32)
    )
    batch = Batch(
        step=1, num_decodes=2, slots=np.array([2, 0, 1], np.int32), epochs=three, query_len=three,
        kv_len=np.array([33, 8, 18], np.int32), token_ids=tokens, positions=positions,
        slot_mapping=positions.astype(np.int64), page_table=np.arange(6, dtype=np.int32).reshape(3, 2),
        sampled_rows=np.array([0, 0, 0, 1, 2], np.int32), sampling=sampling, count_resets=(), prompt_logprobs=(),
        drafted=True,
    )  # fmt: skip
    each = batch.by_query()
    assert (each.num_decodes, each.num_requests, each.num_tokens, each.decode_tokens) == (4, 5, 6, 4)
    assert each.slots.tolist() == [2, 2, 2, 0, 1]
    assert each.query_len.tolist() == [1, 1, 1, 1, 2]
    assert each.kv_len.tolist() == [31, 32, 33, 8, 18]
    assert each.page_table.tolist() == [[0, 1], [0, 1], [0, 1], [2, 3], [4, 5]]
    assert each.sampled_rows.tolist() == [0, 1, 2, 3, 4]
    assert each.read_rows.tolist() == batch.read_rows.tolist()
