"""An engine whose runner is a rank of a simulated GPU: `python engine_of_rank.py RANK RANKS FILE OUT MODEL`.

Every rank's process has the whole engine, which schedules alike everywhere; that replaces the orders of rank 0.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from interpreted import interpreted_gpu
from interpreted_rank import ARENA, File
from quick_interpreter import make_quick

from weft.engine.model.weights import load_weights
from weft.engine.ranks import loading
from weft.engine.runner.cuda import peer_collectives
from weft.engine.runner.cuda.cuda_runner import CudaRunner
from weft.engine.runner.cuda.peer_collectives import PeerCollectives, PeerLayout
from weft.engine.runner.device.collectives import RankGroup, SingleRank, Steps
from weft.engine.runner.options.resolve import resolve
from weft.kernels.collectives import peer as kernels

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 90, n) for n in (5, 11)]
PARAMS: tuple[dict[str, Any], ...] = (
    GREEDY,
    {"temperature": 0.9, "seed": 1, "top_k": 7, "top_p": 0.9, "logprobs": 2, "frequency_penalty": 0.5},
)
OPTIONS: dict[str, Any] = {
    "device": "cuda", "dtype": "float16", "page_size": 16, "max_num_seqs": 2, "max_num_batched_tokens": 16,
    "num_pages": 8, "prefix_caching": False, "plan": "serial",
}  # fmt: skip


def served(model: str) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """Tokens, and the requested log-probabilities."""
    harness = Harness(model, **OPTIONS)
    for prompt, requested in zip(PROMPTS, PARAMS, strict=True):
        harness.add(prompt, max_tokens=4, ignore_eos=True, **requested)
    harness.run()
    harness.engine.close()
    return harness.tokens, {h: [v for e in found for v in e.values] for h, found in harness.logprobs.items()}


def main() -> None:
    rank, ranks, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[5]
    torch.set_num_threads(1)
    make_quick()
    kernels.WAVES = peer_collectives.REPLAYS = 1
    peer_collectives.MEASURED = 2

    def make(spec: Any, _weights: Any, options: Any, *_: Any) -> CudaRunner:
        own = spec.shard(rank, ranks)
        config = resolve(options, own)
        weights = load_weights(
            own, Path(model), device=config.device, dtype=config.weight_dtype, max_positions=config.max_model_len
        )
        sizes = PeerLayout(own, config.max_num_batched_tokens, config.max_num_seqs, config.compute_dtype)
        assert sizes.total <= ARENA
        device = PeerCollectives(File(sys.argv[3], rank, ranks, 0), rank, ranks, sizes)
        products = [layer[name].weight for layer in weights.layers for name in ("o", "down")]
        for steps in (Steps(1), Steps(2), Steps(1, 1)):  # measurements leave nothing behind
            assert device.microseconds(2, steps, own.hidden_size, config.compute_dtype, products) > 0
        device.use({0: Steps(2), 8: Steps(1, 1)})  # prompts by one path, decodes by another
        return CudaRunner(own, weights, config, rank_group=RankGroup(SingleRank(), device, lambda: None))

    monkeypatch = pytest.MonkeyPatch()
    with interpreted_gpu(monkeypatch):
        monkeypatch.setattr(loading, "make_runner", make)
        torch.save(served(model), sys.argv[4])
    os._exit(0)


if __name__ == "__main__":
    main()
