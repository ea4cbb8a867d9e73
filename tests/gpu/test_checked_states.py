"""The bench of a search gives the same states for every pipeline, and others for one that misses a dependency."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from bench_of_rank import Meter
from interpreted import streams_in_order
from interpreted_rank import CUTS, models
from test_background_plan import two_lanes

from weft.autosearch import gpu_bench
from weft.autosearch.background_search import FAR, farthest
from weft.autosearch.bench_protocol import Load
from weft.engine.plans.plan import serial_period


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands for a GPU")
def test_a_pipeline_gives_the_serial_plans_states_with_shared_pages(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device == "cpu"
    cpu = torch.device("cpu")
    properties: Any = SimpleNamespace(multi_processor_count=4, total_memory=1 << 33)
    monkeypatch.setattr(gpu_bench, "Meter", Meter)
    monkeypatch.setattr(gpu_bench.torch, "device", lambda *_: cpu)
    for name, value in (("current_device", 0), ("synchronize", None), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    load = Load(128, 100, 40, 28)
    with streams_in_order(monkeypatch):
        bench = gpu_bench.GpuBench(
            models()["llama"], layers=1, max_tokens=CUTS[-1][1], max_context=160, page_size=16, dtype=torch.float16,
            most_pages=130,
        )  # fmt: skip
        serial = bench.outputs(serial_period(bench.spec, 128, 4), load)
        own = bench.outputs(two_lanes(bench.spec, 128, 4, 1), load)
        assert serial.shape == (128, bench.spec.hidden_size)
        assert farthest(serial, own) <= FAR
        changed = bench.outputs(serial_period(bench.spec, 128, 4), load._replace(context=20))
        assert farthest(serial, changed) > FAR
