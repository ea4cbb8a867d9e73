"""The CPU rank of `weft bench ranks`; see `weft.autosearch.bench_follower` for the format of its stdin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from weft.autosearch.bench_follower import BenchConfig, main
from weft.engine.model.directory import read_spec
from weft.engine.ranks.links import Links
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.tools.papers.cpu_bench import CpuBench


def open_rank(links: Links, opening: BenchConfig, _: Callable[[str], None] = lambda _: None) -> CpuBench:
    """Raises `ConfigError`, `ModelError`, `OutOfMemory` or `RankLost`."""
    spec = read_spec(Path(opening.model)).shard(links.rank, links.ranks)
    torch.set_num_threads(1)
    return CpuBench(
        spec, SharedCollectives(links), max_tokens=opening.max_tokens, max_context=opening.max_context,
        seconds=opening.seconds,
    )  # fmt: skip


if __name__ == "__main__":
    main(open_rank)
