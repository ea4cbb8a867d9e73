"""`SumsOfBench`: collectives with selectable sums, including baselines."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from weft.engine.runner.cuda.peer_collectives import PeerCollectives
from weft.engine.runner.device.collectives import Graph
from weft.tools.papers.ways import Vendor, Way, way_of


class SumsOfBench:
    """`DeviceCollectives` that start with an engine's default until `use` selects another way."""

    def __init__(self, own: PeerCollectives) -> None:
        self._own, self.rank, self.ranks = own, own.rank, own.ranks
        self._way: Way | None = None
        self._vendor = Vendor(own.rank, own.ranks, "nccl")
        self.allocate, self.all_gather, self.abort_waits = own.allocate, own.all_gather, own.abort_waits

    def use(self, name: str) -> None:
        """Select a way. Every rank calls this at once. Raises `ConfigError`."""
        self._way, folder = way_of(name)
        if self._way.steps is not None:
            self._own.use({0: self._way.steps}, push_nano_batches=self._way.overlapped)
        elif self._way.vendor:
            self._vendor.open(folder)

    @property
    def _baseline(self) -> bool:
        return self._way is not None and self._way.steps is None

    def inside(self, graph: Graph) -> AbstractContextManager[None]:
        return self._own.inside(graph)

    def push(self, a: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> bool:
        return not self._baseline and self._own.push(a, weight, bias, **options)

    def reduce(self, partial: Tensor, x: Tensor, sumsq: Tensor, **options: Any) -> Tensor:
        """A baseline adds no residual and computes no squares; the residual stream does not change."""
        if not self._baseline:
            return self._own.reduce(partial, x, sumsq, **options)
        assert self._way is not None
        if self._way.vendor:
            self._vendor.all_reduce(partial)
        return sumsq[: self.ranks]
