"""The GPU memory that an engine's pages get, alone or with other engines, and the errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.config import EngineConfig, Share
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.directory import read_spec
from weft.engine.runner.options import footprint
from weft.engine.runner.options import resolve as resolving
from weft.engine.runner.options.budget import CONTEXT_BYTES, MemoryUsage, bytes_for_pages, share_bytes
from weft.engine.runner.options.footprint import GIB
from weft.engine.runner.options.resolve import ResolvedConfig, resolve
from weft.kernels.common.gpu import KNOWN, compiling_for


def on_a_gpu(**options: Any) -> ResolvedConfig:
    config = EngineConfig(device="cuda", **options)
    with compiling_for(KNOWN["h200"]):
        return resolve(config, read_spec(config.model_path).shard(0, config.tensor_parallel_size))


def test_engines_on_one_gpu_account_for_each_other() -> None:
    pytest.importorskip("triton")
    three = on_a_gpu(share=Share(sharers=3, weight_sharers=3))
    assert (three.sharers, three.common_weights, three.num_pages) == (3, True, None)
    # With several models each sleeps with its own weights.
    own = on_a_gpu(share=Share(sharers=2, memory=0.5, sleeps=True))
    assert (own.sharers, own.common_weights, own.has_neighbours) == (2, False, True)
    with pytest.raises(ConfigError, match=r"--replicas 2 on GPUs needs --tensor-parallel-size 1: .*--data-parallel"):
        on_a_gpu(share=Share(sharers=2), tensor_parallel_size=2)


def test_requested_pages_of_engines_must_fit_a_gpu_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(footprint, "memory_bytes", lambda _: 2**30)
    monkeypatch.setattr(resolving, "gpu_device", lambda: torch.device("cuda", 0))
    in_common = {"share": Share(sharers=4, weight_sharers=4), "attention_backend": "triton"}
    assert on_a_gpu(kv_cache_gib=0.2, host_kv_gib=9, **in_common).num_pages is not None
    with pytest.raises(OutOfMemory, match=r"4 engines need 1.2 GiB .*the GPU has 1.0 GiB .*: lower --kv-cache-gib or"):
        on_a_gpu(kv_cache_gib=0.3, **in_common)


ALONE = ResolvedConfig(
    torch.device("cuda"), torch.bfloat16, torch.bfloat16, KvLayout.of(read_spec(EngineConfig().model_path), 16,
    torch.bfloat16), 4096, 64, 512, None, 0.9, 1, "triton", False, Path(), 0.0,
)  # fmt: skip
H200, RESERVE = 143771 << 20, 1 << 30


def test_an_engine_alone_on_a_gpu_takes_the_remainder_of_its_share() -> None:
    assert bytes_for_pages(ALONE, MemoryUsage(100, 70, own=20), 5) == 90 - 30 - 5
    assert share_bytes(ALONE, 100, 0) == 90


@given(st.integers(1, 16), st.integers(0, 40 * GIB), st.integers(0, 3 * GIB), st.floats(0.1, 0.98), st.booleans())
def test_engines_on_one_gpu_fit_in_any_order_of_start(
    n: int, weights: int, own: int, part: float, common: bool
) -> None:
    """Each takes its share. All shares, with a context each and the free reserve, are their part of the GPU."""
    config = replace(ALONE, sharers=n, common_weights=common, has_neighbours=True, gpu_memory_utilization=part)
    free, rooms = H200 - (weights if common else 0), set()
    for _ in range(n):
        free -= CONTEXT_BYTES + own + (0 if common else weights)
        taken = MemoryUsage(H200, free, own if common else own + weights, weights if common else 0)
        rooms.add(room := bytes_for_pages(config, taken, RESERVE))
        free -= room + RESERVE
    assert len(rooms) == 1
    assert 0 <= int(H200 * part) - (H200 - free) < n
    assert n * (share_bytes(config, H200, taken.common) - taken.common) + taken.common <= int(H200 * part)
