"""Several ranks in one process, a thread each: their computation without the processes."""

from __future__ import annotations

from typing import Any

import torch
from harness import Harness

from weft.engine.model.weights import load_weights
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.runner.cpu.cpu_runner import CpuInFlight, CpuRunner
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.options.resolve import resolve


class Threads:
    """The runner of an engine whose ranks are `CpuRunner`s, each with its thread (see `runner.Runner`)."""

    def __init__(self, harness: Harness, ranks: int) -> None:
        engine = harness.engine
        shared = Descriptors.make(ranks)
        self.runners = []
        for rank in range(ranks):
            spec = engine.spec.shard(rank, ranks)
            config = resolve(engine.config, spec)
            weights = load_weights(
                spec, engine.config.model_path, device=torch.device("cpu"), dtype=config.weight_dtype,
                max_positions=config.max_model_len,
            )  # fmt: skip
            collectives = SharedCollectives(Links(rank, shared))
            self.runners.append(CpuRunner(spec, weights, config, collectives))
        self.num_pages, self.preparation = self.runners[0].num_pages, self.runners[0].preparation

    def launch(self, batch: Batch) -> CpuInFlight:
        launched = [runner.launch(batch) for runner in self.runners]
        return launched[0]

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


def of_threads(model: Any, ranks: int, **options: Any) -> Harness:
    """An engine whose model is spread over `ranks` threads."""
    harness = Harness(model, **options)
    if ranks > 1:
        harness.engine.runner.close()
        harness.engine.runner = harness.engine.loop._runner = Threads(harness, ranks)  # type: ignore[assignment]
    return harness
