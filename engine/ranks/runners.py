"""`rank_runner`: the runner of one rank, on a CPU or on a GPU of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.engine.config import EngineConfig
from weft.engine.model.spec import ModelSpec
from weft.engine.model.sums import summed_alone
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress
from weft.engine.ranks.arena import Arena
from weft.engine.ranks.links import Links
from weft.engine.ranks.scans import meet
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.ranks.shots import agreed_steps, file_of
from weft.engine.runner.cpu.cpu_runner import CpuRunner
from weft.engine.runner.device.collectives import Several
from weft.engine.runner.device.compile_job import CompileJob
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
PRODUCT_LAYERS = 4
"""whose products are measured with the sums behind them"""


def _use_measured(
    device: PeerCollectives, host: SharedCollectives, spec: ModelSpec, weights: Weights, config: ResolvedConfig
) -> None:
    """How sums are made. With these weights."""
    here = gpu(config.device)
    assert here is not None
    # those that may write to the ranks themselves, of a few layers: one alone would lie in the L2
    names = [op.name for op in summed_alone(spec.layer_operations())] if spec.quantization is None else []
    layers = [layer for layer in weights.layers[-PRODUCT_LAYERS:] if all(name in layer for name in names)]
    products = [layer[name].weight for layer in layers for name in names]
    shape = "-".join(map(str, (spec.hidden_size, *dict.fromkeys(product.shape[1] for product in products))))
    file = file_of(config.cache_dir, here.name, source_digest(*SOURCES), host.ranks, shape)
    measure = partial(
        device.microseconds, hidden=spec.hidden_size, dtype=config.compute_dtype, products=products
    )  # fmt: skip
    seconds = config.tuning_seconds
    pushes = bool(products) and _tiles_agree(host, products, here.sms)
    with torch.inference_mode():
        steps = agreed_steps(
            host, file, config.max_num_batched_tokens, measure if seconds > 0 else None, pushes=pushes
        )  # fmt: skip
    device.use(steps)


def _tiles_agree(host: SharedCollectives, products: list[torch.Tensor], sms: int) -> bool:
    """Whether all ranks cut these products into the same tiles, which is what flags tell of."""
    from weft.kernels.matmul.gemm_launch import choose  # needs Triton

    tiles = [choose(tokens, product.shape[0], product.shape[1], sms) for product in products for tokens in BUCKETS]
    every = host.all_gather(torch.tensor(tiles, dtype=torch.int64))
    return bool((every == every[0]).all())


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
    """spec, weights: the rank's part. Every rank does this at the same point, and has its runner once all have theirs.
    See `make_runner`.

    Raises `ConfigError`, `OutOfMemory` or `RankLost`.
    """
    if config.device.type != "cuda":
        runner: Runner = CpuRunner(spec, weights, config, host)
        meet(host)
        return runner
    from weft.engine.runner.cuda.peer_collectives import PeerCollectives, Sizes  # needs Triton

    sizes = Sizes(spec, config.max_num_batched_tokens, config.max_num_seqs, config.compute_dtype)
    device = PeerCollectives(Arena(sizes.total, config.device, host), links.rank, links.ranks, sizes)
    links.on_lost = device.end_waiting
    several = Several(host, device, links.check, partial(_use_measured, device, host, spec, weights, config))
    runner = make_runner(spec, weights, options, config, progress, compiling, several)
    meet(host)
    return runner
