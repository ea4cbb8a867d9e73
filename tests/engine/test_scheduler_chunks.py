"""Where prompts are split into chunks."""

from __future__ import annotations

import numpy as np
import pytest
from list_device import ListEngine

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.model.directory import read_spec
from weft.engine.runner.options.resolve import resolve
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
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


def test_the_last_chunk_takes_all_that_is_left_if_it_just_fits() -> None:
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
