"""`CpuBench`: the bench of a CPU rank, to try `weft bench ranks` without GPUs."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.synthetic_batch import batch_of
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights
from weft.engine.plans.plan import NanoOperation, Period
from weft.engine.progress import GIB
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.options.footprint import memory_bytes
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.torch_backend import TorchAttention
from weft.tools.papers.ways import Vendor, Way, way_of

LAYERS = 4
PAGE_SIZE = 16
SHORTER = "give a workload of shorter requests or a smaller --tokens"


class _Sums:
    """`Collectives` with selectable sums. The default goes through memory that ranks share."""

    def __init__(self, own: Collectives) -> None:
        self._own, self.rank, self.ranks = own, own.rank, own.ranks
        self.vendor = Vendor(own.rank, own.ranks, "gloo")
        self.way: Way | None = None

    def all_gather(self, mine: Tensor) -> Tensor:
        return self._own.all_gather(mine)

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self.way is None or self.way.steps is not None:
            return self._own.all_reduce(partial)
        total = partial.float()
        if self.way.vendor:
            self.vendor.all_reduce(total)
        return total


class CpuBench:
    """A `ReductionBench` that times full iterations of the serial plan. It measures no watts and clocks."""

    num_sms, memory = 1, 0

    def __init__(
        self, spec: ModelSpec, host: Collectives, *, max_tokens: int, max_context: int, seconds: float
    ) -> None:
        self.seconds = seconds
        self.spec = replace(spec, num_layers=min(LAYERS, spec.num_layers))
        self._host, self._sums = host, _Sums(host)
        device, positions = torch.device("cpu"), max(max_tokens, max_context)
        self._weight_bytes = self.spec.weight_bytes(4)
        self._check_fits(f"the weights of {self.spec.num_layers} layers", 0, "use a smaller model")
        self._check_fits(f"a context of {positions} tokens", positions * 4 * self.spec.head_dim, SHORTER)
        weights = load_weights(
            self.spec, Path(), device=device, dtype=torch.float32, max_positions=positions, dummy_seed=0
        )  # fmt: skip
        self._layout = KvLayout.of(self.spec, PAGE_SIZE, torch.float32)
        attention = TorchAttention(
            AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, torch.float32, device, None, spec.windows,
                spec.attention_scale, spec.attention_softcap, spec.sinks,
            )
        )  # fmt: skip
        none = torch.zeros(self._layout.shape(1))
        self._executor = CpuExecutor(self.spec, weights, none, attention, collectives=self._sums)

    def _check_fits(self, what: str, num_bytes: int, instead: str) -> None:
        """Check that this and the weights fit in the machine's memory, for all ranks. Raises `OutOfMemory`."""
        needed, there = self._host.ranks * (self._weight_bytes + num_bytes), memory_bytes(torch.device("cpu"))
        if needed > there:
            takes = f"{needed / GIB:.1f} GiB on {self._host.ranks} ranks, and the machine has {there / GIB:.1f}"
            raise OutOfMemory(f"{what} would take {takes}: {instead}")

    def close(self) -> None:
        """Idempotent."""
        self._sums.vendor.close()

    def sums(self, way: str) -> None:
        chosen, folder = way_of(way)
        if chosen.overlapped or (chosen.steps is not None and chosen.steps.pushed):
            raise ConfigError("on a CPU GEMMs send no partial sums, and nano-batches run in series")
        if chosen.vendor:
            self._sums.vendor.open(folder)
        self._sums.way = chosen

    def alone(self, op: NanoOperation, load: Load) -> Timing:  # noqa: ARG002
        raise ConfigError("on a CPU operations are not timed alone")

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:  # noqa: ARG002
        raise ConfigError("on a CPU operations do not overlap")

    @torch.inference_mode()
    def period(self, period: Period, load: Load) -> Timing:  # noqa: ARG002
        batch = batch_of(load, PAGE_SIZE)
        pages = int(batch.page_table.max()) + 1
        self._check_fits(f"{pages} KV pages", pages * self._layout.page_bytes, SHORTER)
        self._executor.kv = torch.zeros(self._layout.shape(pages))
        inputs = self._executor.inputs(batch, torch.from_numpy(batch.token_ids).long())

        def iteration() -> float:
            begun = time.perf_counter()
            self._executor.forward(inputs)
            return time.perf_counter() - begun

        iteration()
        # equally often on every rank, or one would wait forever
        (first,) = self._host.all_gather(torch.tensor([iteration()], dtype=torch.float64))[0].tolist()
        times = [iteration() for _ in range(max(2, round(self.seconds / max(first, 1e-4))))]
        return Timing(1e3 * statistics.fmean(times) / self.spec.num_layers, 0.0, 0.0)
