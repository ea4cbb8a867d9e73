"""The part of the machine that each engine gets."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.config import Share
from weft.engine.errors import ConfigError
from weft.engine.wire.preloaded import VISIBLE, gpus
from weft.server.config import ServeConfig
from weft.server.daemon.placement import described, place

EIGHT = set(range(8))


def config(**options: Any) -> ServeConfig:
    return ServeConfig(**options)


def test_one_engine_has_the_machine() -> None:
    (alone,) = place(config(ssd_kv_path="/kv", host_kv_gib=1), ["0", "1"], EIGHT, {})
    assert alone.share == Share()
    assert alone.ssd_kv_path == "/kv"


@given(st.integers(1, 6), st.integers(1, 6), st.sets(st.integers(0, 63), min_size=1, max_size=40))
def test_engines_on_a_cpu_share_no_core_as_far_as_there_are_enough(n: int, m: int, cores: set[int]) -> None:
    placements = place(config(replicas=n, data_parallel_size=m), [], cores, {})
    assert [p.share.engine for p in placements] == list(range(n * m))
    assert len({len(p.share.cpus) for p in placements}) == 1
    taken = [core for p in placements for core in p.share.cpus]
    assert len(taken) == len(set(taken))
    assert set(taken) <= cores
    if n * m > 1:
        assert all(p.share.sharers == n * m for p in placements)
        enough = len(cores) // (n * m) >= 2
        assert len(taken) == (len(cores) // (n * m) * n * m if enough else 0)
        threads = [p.cpu_threads for p in placements]
        assert all(t is None if enough else 1 <= t <= max(1, len(cores) / (n * m)) for t in threads)


def test_data_parallel_engines_have_a_gpu_each() -> None:
    placements = place(config(data_parallel_size=2, replicas=2), ["4", "GPU-7"], EIGHT, {})
    assert [p.share.gpu for p in placements] == ["4", "4", "GPU-7", "GPU-7"]
    assert {p.share.sharers for p in placements} == {2}
    assert not any(p.share.cpus for p in placements)
    assert "engine 2: GPU GPU-7" in described(placements[2])


def test_replicas_share_their_weights() -> None:
    assert {p.share.weight_sharers for p in place(config(data_parallel_size=2, replicas=3), [], EIGHT, {})} == {3}
    assert {p.share.weight_sharers for p in place(config(data_parallel_size=2), ["0", "1"], EIGHT, {})} == {1}
    keyed = {"admin_api_key": "secret"}
    # Other weights cannot be shared: these engines must exit to sleep.
    assert not any(p.share.sleeps for p in place(config(replicas=2, **keyed), [], EIGHT, {}))
    assert all(p.share.sleeps for p in place(config(data_parallel_size=2, **keyed), [], EIGHT, {}))
    each = place(config(replicas=2, tensor_parallel_size=2), [], EIGHT, {})
    assert {p.share.weight_sharers for p in each} == {1}


def test_missing_gpus_are_reported() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size 3 needs as many GPUs: there are 2"):
        place(config(data_parallel_size=3), ["0", "1"], EIGHT, {})
    assert len(place(config(data_parallel_size=3, device="cpu"), ["0", "1"], EIGHT, {})) == 3


def test_an_engine_of_several_ranks_sees_as_many_gpus() -> None:
    placements = place(config(data_parallel_size=2, tensor_parallel_size=2), ["0", "1", "2", "3"], EIGHT, {})
    assert [p.share.gpu for p in placements] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="of 2 each: there are 3"):
        place(config(data_parallel_size=2, tensor_parallel_size=2), ["0", "1", "2"], EIGHT, {})


def test_cores_of_an_engine_are_neighbours() -> None:
    placements = place(config(replicas=2), [], EIGHT, {core: core % 2 for core in range(8)})
    assert [p.share.cpus for p in placements] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    (first, _) = place(config(replicas=2), [], {0, 1, 2}, {})
    assert described(first) == "engine 0: all cores, 1 threads"


def test_each_engine_has_its_own_store() -> None:
    placements = place(config(replicas=2, host_kv_gib=1, ssd_kv_path="/kv"), [], set(range(5)), {})
    assert [p.ssd_kv_path for p in placements] == ["/kv/engine-0", "/kv/engine-1"]
    assert [described(p) for p in placements] == [
        "engine 0: cores 0-1, KV store /kv/engine-0",
        "engine 1: cores 2-3, KV store /kv/engine-1",
    ]


def test_visible_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "3, GPU-5,")
    assert gpus() == ["3", "GPU-5"]
    monkeypatch.setenv(VISIBLE, "")
    assert gpus() == []
    assert VISIBLE in os.environ
