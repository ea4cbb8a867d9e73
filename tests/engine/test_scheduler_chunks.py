"""Where prompts are cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_device import ListEngine, continuation

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.model.directory import read_spec
from weft.engine.runner.resolve import resolve
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import Phase, SlotTable
from weft.engine.wire.sampling import SamplingParams


@pytest.mark.parametrize(("step", "budget"), [(1, 300), (128, 300), (128, 130), (128, 128)])
def test_chunks_end_at_multiples_of_the_step_or_with_the_prompt(step: int, budget: int) -> None:
    scheduler = Scheduler(
        SlotTable(8, 2048, 16), PagePool(600, 16, PrefixIndex("test")), max_num_batched_tokens=budget,
        prefix_caching=False, chunk_step=step,
    )  # fmt: skip
    lengths = [700, 33, 257, 128]
    for i, length in enumerate(lengths):
        scheduler.add(
            Request(
                handle=i, token_ids=np.arange(length, dtype=np.int32), prompt_len=length,
                params=SamplingParams(max_tokens=1), max_total_tokens=length + 1, priority=0, order=i,
                arrival=0.0, salt="", stop_ids=(), seed=i,
            )
        )  # fmt: skip
    done: dict[int, int] = {}
    for number in range(1, 60):
        batch = scheduler.schedule(number)
        if batch is None:
            break
        assert batch.num_tokens <= budget
        for slot, end in zip(batch.slots.tolist(), batch.kv_len.tolist(), strict=True):
            handle = int(scheduler.slots.handle[slot])
            assert end % step == 0 or end == lengths[handle]
            done[handle] = end
    assert [done[i] for i in range(4)] == lengths


def test_the_last_chunk_takes_all_that_is_left_when_it_just_fits() -> None:
    engine = ListEngine(32, budget=5, chunk_step=4, prefix_caching=False)
    engine.add([5] * 9, 1)
    for length in (4, 5):
        engine.launch()
        assert engine.launched[0].query_len.tolist() == [length]
        engine.complete()


def test_a_dense_batch_smaller_than_a_chunk_is_refused() -> None:
    config = EngineConfig(batch_invariant=True, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 128"):
        resolve(config, read_spec(config.model_path))


# -- whole tiles


def decoding(number: int, tile: int, **options: int) -> ListEngine:
    """So many requests decode."""
    engine = ListEngine(1000, slots=number + 5, budget=64, tile=tile, prefix_caching=False, **options)
    for _ in range(number):
        engine.add([3], 60)
    while (engine.scheduler.slots.phase == Phase.DECODE).sum() < number:
        engine.step()
    return engine


def tokens_of(engine: ListEngine, iterations: int) -> list[int]:
    """Of the iterations to come."""
    seen = []
    for _ in range(iterations):
        engine.launch()
        seen.append(engine.launched[0].num_tokens)
        engine.complete()
    return seen


def test_a_prompt_beside_decodes_ends_with_a_whole_tile() -> None:
    engine = decoding(10, 16)
    engine.add(range(30), 1)
    assert tokens_of(engine, 3) == [32, 16, 12]  # of the prompt 22, 6 and 2
    assert tokens_of(decoding(10, 1), 1) == [10]


@pytest.mark.parametrize(("number", "prompt"), [(7, 30), (15, 3)], ids=["few", "short"])
def test_a_prompt_that_few_wait_for_or_that_would_wait_long_is_not_cut(number: int, prompt: int) -> None:
    engine = decoding(number, 16)
    engine.add(range(prompt), 1)
    assert tokens_of(engine, 1) == [number + prompt]


@settings(max_examples=25, deadline=None)
@given(
    st.integers(8, 20), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([8, 16, 32]),
    st.sampled_from([1, 4]),
)  # fmt: skip
def test_whole_tiles_keep_nobody_for_long_and_change_no_token(
    number: int, prompts: list[int], tile: int, step: int
) -> None:
    took = []
    for engine in (decoding(number, tile, chunk_step=step), decoding(number, 1, chunk_step=step)):
        asked = [engine.add([5 + i] * length, 1) for i, length in enumerate(prompts)]
        iterations = 0
        while not all(request.handle in engine.started for request in asked):
            engine.step()
            iterations += 1
            assert iterations < 100
        took.append(iterations)
        for i, (request, length) in enumerate(zip(asked, prompts, strict=True)):
            assert engine.output[request.handle] == continuation([5 + i] * length, 1)
    # At least half of a chunk is computed, and what is left of it goes on with the next one.
    assert took[0] <= 2 * took[1] + 7 * len(prompts)
