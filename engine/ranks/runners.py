"""`rank_runner`: the runner of one rank, on a CPU or on a GPU of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.engine.config import EngineConfig
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress
from weft.engine.ranks.arena import Arena
from weft.engine.ranks.links import Links
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.ranks.shots import agreed_shots, file_of
from weft.engine.runner.collectives import Several
from weft.engine.runner.compile_job import CompileJob
from weft.engine.runner.cpu_runner import CpuRunner
from weft.engine.runner.make import make_runner
from weft.engine.runner.resolve import ResolvedConfig
from weft.engine.runner.runner import Runner
from weft.kernels.gpu import gpu
from weft.kernels.source_digest import source_digest

if TYPE_CHECKING:
    from weft.engine.runner.peer_collectives import PeerCollectives


def _shots(
    device: PeerCollectives, host: SharedCollectives, spec: ModelSpec, config: ResolvedConfig
) -> dict[int, int]:  # fmt: skip
    here = gpu(config.device)
    assert here is not None
    source = source_digest("collectives.py")
    file = file_of(config.cache_dir, here.name, source, host.ranks, spec.hidden_size)
    measure = partial(device.microseconds, hidden=spec.hidden_size, dtype=config.compute_dtype)
    with torch.inference_mode():
        return agreed_shots(
            host, file, config.max_num_batched_tokens, measure if config.tuning_seconds > 0 else None
        )  # fmt: skip


def rank_runner(
    links: Links,
    spec: ModelSpec,
    weights: Weights,
    options: EngineConfig,
    config: ResolvedConfig,
    host: SharedCollectives,
    progress: Progress | None = None,
    compiling: CompileJob | None = None,
) -> Runner:
    """spec, weights: the rank's part. Every rank does this at the same point. See `make_runner`.

    Raises `ConfigError`, `OutOfMemory` or `RankLost`.
    """
    if config.device.type != "cuda":
        return CpuRunner(spec, weights, config, host)
    from weft.engine.runner.peer_collectives import PeerCollectives, Sizes  # needs Triton

    sizes = Sizes(spec, config.max_num_batched_tokens, config.max_num_seqs, config.compute_dtype)
    device = PeerCollectives(Arena(sizes.total, config.device, host), links.rank, links.ranks, sizes)
    links.on_lost = device.end_waiting
    device.use(_shots(device, host, spec, config))
    several = Several(host, device, links.check)
    return make_runner(spec, weights, options, config, progress, compiling, several)
