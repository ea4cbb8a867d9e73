"""A bench compiles its kernels as an engine does, and finds those that an engine has compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weft.autosearch.open_bench import DENSE_BATCH, compile_first
from weft.engine.config import PRESETS, EngineConfig
from weft.engine.model.directory import read_spec
from weft.engine.runner.device.compile_job import CompileJob, stamp_file

MODEL = PRESETS / "llama-3-70b"
SPEC = read_spec(MODEL).shard(0, 2)


class Job:
    """See `CompileJob`."""

    def __init__(self, done: list[Any]) -> None:
        self._done = done

    def wait(self, progress: Callable[[str, int, int], None]) -> None:
        progress("compiling kernels", 1, 2)
        raise KeyboardInterrupt

    def stop(self) -> None:
        self._done.append("stopped")


def test_a_bench_compiles_the_engines_kernels_and_stops_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def begin(config: EngineConfig) -> Job:
        done.append(config)
        return Job(done)

    monkeypatch.setattr(CompileJob, "begin", begin)
    reported: list[str] = []
    for tokens in (DENSE_BATCH, 1024):
        with pytest.raises(KeyboardInterrupt):
            compile_first(SPEC, MODEL, tokens, 60.0, reported.append)
    usual, other = (config for config in done if config != "stopped")
    assert reported == ["compiling kernels, 1 of 2"] * 2
    assert done.count("stopped") == 2
    options = {"model_preset": "llama-3-70b", "load_format": "dummy", "tensor_parallel_size": 2}
    engine = EngineConfig.model_validate(options).for_measuring()
    assert stamp_file(usual) == stamp_file(engine)  # nothing is missing from what it has compiled
    assert (usual.model_path, usual.plan) == (MODEL, engine.plan)
    assert other.max_num_batched_tokens == 1024


def test_nothing_is_started_if_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileJob, "begin", lambda _: None)
    compile_first(SPEC, MODEL, 2048, 0.0, pytest.fail)
