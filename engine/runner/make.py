"""`make_runner`: the runner of the device that was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft import install_hint
from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.progress import Progress
from weft.engine.runner.compile_job import CompileJob
from weft.engine.runner.products import prepare_products
from weft.engine.runner.resolve import ResolvedConfig
from weft.engine.runner.runner import Runner

if TYPE_CHECKING:
    from weft.engine.model.broad.module import BroadModule


def make_runner(
    spec: ModelSpec,
    weights: Weights | BroadModule,
    options: EngineConfig,
    config: ResolvedConfig,
    progress: Progress | None = None,
) -> Runner:
    """The runner for the configuration's device, its KV pool allocated. Raises `OutOfMemory`.

    options: what `config` was resolved from.
    """
    if config.device.type == "cuda":
        if not isinstance(weights, Weights):
            raise ConfigError("transformers' code runs on a CPU alone as yet: use --device cpu")
        try:
            from weft.engine.runner.cuda_runner import CudaRunner
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise ConfigError(f"a GPU needs Triton: {install_hint('gpu')}, or use --device cpu") from None
        prepare_products(
            spec, config.device, config.max_num_batched_tokens, config.cache_dir, config.tuning_seconds, progress
        )
        if (compiling := CompileJob.begin(options)) is not None:  # tiles that were just found are other kernels
            compiling.wait(progress)
        return CudaRunner(spec, weights, config, progress)
    from weft.engine.runner.cpu_runner import CpuRunner

    return CpuRunner(spec, weights, config)
