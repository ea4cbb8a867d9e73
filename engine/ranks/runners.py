"""`rank_runner`: builds the runner of one rank, on a CPU or on the rank's GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.engine.config import EngineConfig
from weft.engine.model.reductions import directly_reduced
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress
from weft.engine.ranks.agreement import barrier
from weft.engine.ranks.all_reduce_tuning import file_of, tuned_steps
from weft.engine.ranks.links import Links
from weft.engine.ranks.peer_memory import PeerMemory
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.runner.cpu.cpu_runner import CpuRunner
from weft.engine.runner.device.collectives import RankGroup
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.device.runner import Runner
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.engine.runner.start.make import make_runner
from weft.kernels.common.gpu import gpu
from weft.kernels.common.source_digest import source_digest
from weft.kernels.matmul.tuned import BUCKETS

if TYPE_CHECKING:
    from weft.engine.runner.cuda.peer_collectives import PeerCollectives

SOURCES = (
    "collectives/peer", "collectives/push_gemm", "collectives/push_gemm_hopper", "common/dependent_launch",
    "common/hopper", "matmul/gemm", "matmul/gemm_activations", "matmul/gemm_config", "matmul/gemm_hopper",
    "matmul/gemm_launch", "matmul/gemm_tiles", "matmul/gemm_triton",
)  # fmt: skip
"""The modules of `kernels` that timings of collectives depend on."""
MEASURED_LAYERS = 4  # Layers whose projections are measured together with the all-reduce after them.


def _use_tuned_steps(
    device: PeerCollectives, host: SharedCollectives, spec: ModelSpec, weights: Weights, config: ResolvedConfig
) -> None:
    """Choose how all-reduces are computed, from the cache or by measuring with these weights."""
    here = gpu(config.device)
    assert here is not None
    # GEMMs that may push to other ranks. RankGroup layers, because one alone would stay in the L2 cache.
    names = [op.name for op in directly_reduced(spec.layer_operations())] if spec.quantization is None else []
    layers = [layer for layer in weights.layers[-MEASURED_LAYERS:] if all(name in layer for name in names)]
    products = [layer[name].weight for layer in layers for name in names]
    shape = "-".join(map(str, (spec.hidden_size, *dict.fromkeys(product.shape[1] for product in products))))
    file = file_of(config.cache_dir, here.name, source_digest(*SOURCES), host.ranks, shape)
    measure = None
    if config.tuning_seconds > 0:
        measure = partial(
            device.microseconds, hidden=spec.hidden_size, dtype=config.compute_dtype, products=products
        )  # fmt: skip
    pushes = bool(products) and _tiles_agree(host, products, here.sms)
    with torch.inference_mode():
        device.use(tuned_steps(host, file, config.max_num_batched_tokens, measure, pushes=pushes))


def _tiles_agree(host: SharedCollectives, products: list[torch.Tensor], sms: int) -> bool:
    """Return whether all ranks choose the same tiles for these GEMMs; ready flags count tiles."""
    from weft.kernels.matmul.gemm_launch import choose  # needs Triton

    tiles = [choose(tokens, product.shape[0], product.shape[1], sms) for product in products for tokens in BUCKETS]
    every = host.all_gather(torch.tensor(tiles, dtype=torch.int64))
    return bool((every == every[0]).all())


def rank_runner(
    links: Links, spec: ModelSpec, weights: Weights, options: EngineConfig, config: ResolvedConfig,
    host: SharedCollectives, progress: Progress | None = None, compiling: CompileJob | None = None,
    images: ImagePool | None = None,
) -> Runner:  # fmt: skip
    """Build a rank's runner; see `make_runner`. spec, weights: the rank's shard.

    Collective: returns once all ranks have their runners. Raises `ConfigError`, `OutOfMemory` or `RankLost`."""
    if config.device.type != "cuda":
        runner: Runner = CpuRunner(spec, weights, config, host, images)
        barrier(host)
        return runner
    from weft.engine.runner.cuda.peer_collectives import PeerCollectives, PeerLayout  # needs Triton

    sizes = PeerLayout(spec, config.max_num_batched_tokens, config.max_num_seqs, config.compute_dtype)
    device = PeerCollectives(PeerMemory(sizes.total, config.device, host), links.rank, links.ranks, sizes)
    links.on_lost = device.abort_waits
    rank_group = RankGroup(host, device, links.check, partial(_use_tuned_steps, device, host, spec, weights, config))
    runner = make_runner(spec, weights, options, config, progress, compiling, rank_group, images)
    barrier(host)
    return runner
