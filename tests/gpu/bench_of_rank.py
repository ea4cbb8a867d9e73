"""The search's bench on a rank of a simulated GPU: `python bench_of_rank.py RANK RANKS FILE OUT`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import Replayed, streams_in_order
from interpreted_rank import CUTS, PLANNED, File, models, side_by_side
from quick_interpreter import make_quick
from test_executor import SMALL
from torch import Tensor

from weft.autosearch import gpu_bench
from weft.engine.plans.plan import NanoOperation
from weft.kernels.collectives import peer as kernels


class Host:
    """See `Collectives`: every rank returns the same values, because all times are equal."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def all_gather(self, mine: Tensor) -> Tensor:
        return mine.expand(self.ranks, *mine.shape)


class Meter:
    def __init__(self, _gpus: int) -> None: ...

    def mean(self, _since: float) -> tuple[float, float]:
        return 1500.0, 700.0


def _graph(_: gpu_bench.GpuBench, launch: Any) -> Replayed:
    with torch.inference_mode():
        launch()
    return Replayed(launch)


def main() -> None:
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    make_quick()
    kernels.WAVES = 1
    monkeypatch, device = pytest.MonkeyPatch(), torch.device("cpu")
    properties = SimpleNamespace(multi_processor_count=4, total_memory=1 << 33)
    monkeypatch.setattr(gpu_bench, "PeerMemory", lambda *_: File(sys.argv[3], rank, ranks, 0))
    monkeypatch.setattr(gpu_bench, "Meter", Meter)
    monkeypatch.setattr(gpu_bench.GpuBench, "_graph", _graph)
    monkeypatch.setattr(gpu_bench.torch, "device", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    with streams_in_order(monkeypatch):
        bench = gpu_bench.GpuBench(
            models()["llama"].shard(rank, ranks), layers=2, max_tokens=CUTS[-1][1], max_context=160, page_size=16,
            seconds=0.004, dtype=torch.float16, host=Host(rank, ranks),  # type: ignore[arg-type]
        )  # fmt: skip
        product = NanoOperation("down", 0, 128, 4, config=SMALL)
        total = NanoOperation("down_reduce", 0, 128, 2, "network")
        attention = NanoOperation("decode", 0, 128, 2, "memory")
        found = [bench.alone(op, PLANNED) for op in (product, total)]
        found += [*bench.pair(product, total, PLANNED), *bench.pair(attention, total, PLANNED)]
        found.append(bench.period(side_by_side(bench.spec, 4), PLANNED))
    torch.save([list(timing) for timing in found], sys.argv[4])


if __name__ == "__main__":
    main()
