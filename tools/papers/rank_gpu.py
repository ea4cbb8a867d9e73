"""The GPU rank of `weft bench ranks`; see `weft.autosearch.bench_follower` for the format of its stdin."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.autosearch import bench_follower
from weft.autosearch.bench_follower import BenchConfig, main
from weft.autosearch.gpu_bench import GpuBench
from weft.engine.ranks.links import Links
from weft.engine.runner.cuda.peer_collectives import PeerCollectives
from weft.engine.runner.device.collectives import Collectives
from weft.tools.papers.sums_of_bench import SumsOfBench


class SumsGpuBench(GpuBench):
    """A `GpuBench` that implements `ReductionBench`."""

    def _of_ranks(
        self, host: Collectives, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> SumsOfBench:  # fmt: skip
        own = super()._of_ranks(host, max_tokens, dtype, device)
        assert isinstance(own, PeerCollectives)
        return SumsOfBench(own)

    def sums(self, way: str) -> None:
        """Raises `ConfigError`."""
        assert isinstance(self._collectives, SumsOfBench)
        self._collectives.use(way)


def open_rank(links: Links, opening: BenchConfig, progress: Callable[[str], None] = lambda _: None) -> SumsGpuBench:
    """Raises `ConfigError`, `ModelError`, `OutOfMemory` or `RankLost`."""
    bench = bench_follower.open_rank(links, opening, progress, SumsGpuBench)
    assert isinstance(bench, SumsGpuBench)
    return bench


if __name__ == "__main__":
    main(open_rank)
