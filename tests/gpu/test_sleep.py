"""A GPU's engine that sleeps: its memory is released, graphs keep their addresses, tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

pytest.importorskip("triton")
from interpreted import interpreted_gpu
from memory_driver import MemoryDriver

from weft.engine.config import Share
from weft.engine.runner.cuda import cuda_runner

HERE = torch.cuda.is_available()


def answer(harness: Harness, prompt: np.ndarray) -> list[int]:
    handle = harness.add(prompt, max_tokens=3, ignore_eos=True, **GREEDY)
    harness.run()
    return harness.tokens[handle]


@pytest.mark.nightly
@pytest.mark.skipif(HERE, reason="a GPU runs the real thing")
def test_an_interpreted_engine_sleeps_and_wakes(
    device: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device == "cpu"
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "page_size": 16, "max_num_seqs": 1, "max_num_batched_tokens": 8,
        "num_pages": 4, "prefix_caching": False, "plan": "serial",
    }  # fmt: skip
    driver = MemoryDriver(2**23)
    monkeypatch.setattr(cuda_runner, "cuda_sleepable_memory", lambda _: driver.sleepable())
    prompt = np.random.default_rng(5).integers(3, 90, 3)
    with interpreted_gpu(monkeypatch):
        harness = Harness(tiny_model("yi"), share=Share(sleeps=True), **options)
        runner = harness.engine.runner
        places = [tensor.data_ptr() for tensor in (runner.kv, *runner.weights.tensors())]
        before = answer(harness, prompt)
        assert harness.engine.sleep() > runner.kv.nbytes
        assert not driver.mapped
        assert not driver.created
        harness.engine.wake()
        assert [tensor.data_ptr() for tensor in (runner.kv, *runner.weights.tensors())] == places
        assert answer(harness, prompt) == before
        harness.engine.close()


@pytest.mark.skipif(not HERE, reason="needs a CUDA device")
def test_memory_is_really_released_and_taken_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "max_num_seqs": 16, "max_num_batched_tokens": 256, "page_size": 16,
        "kv_cache_gib": 1.0, "host_kv_gib": 0.1, "cache_dir": str(tmp_path), "share": Share(sleeps=True),
    }  # fmt: skip
    harness = Harness("demo", **options)
    assert harness.engine.runner.sleepable.num_bytes, "the driver does not do it"
    prompt = np.random.default_rng(5).integers(6, 2000, 150)
    before = answer(harness, prompt)
    for _ in range(2):
        awake, _ = torch.cuda.mem_get_info()
        given = harness.engine.sleep()
        assert given >= 2**30
        assert torch.cuda.mem_get_info()[0] - awake >= 0.99 * given
        assert harness.engine.wake() == given
        assert answer(harness, prompt) == before
    assert max(harness.cached.values()) >= 128, "the host tier kept the prompt's pages"
    harness.engine.close()
