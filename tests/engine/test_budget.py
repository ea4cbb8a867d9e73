"""An engine's memory budget before any traffic."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.wire.preloaded import PRIMITIVE_CACHES, environment


def test_pages_and_weights_are_counted_exactly(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine(EngineConfig(model=str(tiny_model("qwen3")), num_pages=50, host_kv_gib=0.001, dtype="float32"))
    memory = engine.describe().memory
    assert memory.kv_pages == engine.runner.kv.nbytes
    tied = engine.spec.num_parameters * 4
    rotary = sum(table.nbytes for table in engine.runner._executor.weights.rotary)
    assert memory.weights == pytest.approx(tied + rotary, rel=0.01)  # norms are folded into matrices
    assert memory.host_pages == int(0.001 * 2**30)
    assert memory.total == memory.weights + memory.kv_pages + memory.host_pages + memory.working
    engine.close()


def test_working_memory_grows_with_the_iteration(tiny_model: Callable[[str], Path]) -> None:
    def working(**options: int) -> int:
        engine = Engine(EngineConfig(model=str(tiny_model("yi")), num_pages=50, **options))
        engine.close()
        return engine.describe().memory.working

    assert working(max_num_seqs=64) < working(max_num_seqs=512, max_num_batched_tokens=4096)


def test_caches_of_primitives_are_bounded_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRIMITIVE_CACHES:
        monkeypatch.delenv(name, raising=False)
    assert PRIMITIVE_CACHES.items() <= environment().items()
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "77")
    assert environment()["LRU_CACHE_CAPACITY"] == "77"
    assert environment()["PATH"] == os.environ["PATH"]
